"""The command `lancet`, or `python -m lancet_kernels`.

Every subcommand prints for people, or with `--json` (but `selftest`) for machines: one JSON document on the
last line of standard output, everything else on standard error. A failure is one line on standard error and
an exit code that is not 0.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from lancet_kernels import __version__
from lancet_kernels.errors import RankFailed, UserError
from lancet_kernels.measure.launch import report_errors, under_launcher

_COMMANDS = {
    "train": "train", "plan": "plan_command", "bench": "bench", "explain": "explain", "check": "check",
    "env": "environment", "selftest": "selftest", "tune": "tune", "kernels": "kernels",
}  # fmt: skip
"""Their modules; those of every day first, the last two are for authors of kernels."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. -> exit code."""
    # A command prints the library's log on standard error.
    logging.basicConfig(format="lancet: %(message)s")
    argv = list(sys.argv[1:] if argv is None else argv)
    if under_launcher():
        # A rank of a job: every error must be reported to the launcher, with this rank's number.
        return report_errors(lambda: _run(argv))
    try:
        try:
            return _run(argv)
        finally:
            print(end="", flush=True)
    except OSError as error:
        try:
            print(end="", flush=True)
        except OSError:
            # The interpreter must not fail again at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):  # The reader, `head` say, has closed the pipe.
                return 128 + signal.SIGPIPE
            print(f"lancet: standard output: {error.strerror}", file=sys.stderr)
            return 1
        raise
    except (UserError, RankFailed) as error:
        print(f"lancet: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run(argv: Sequence[str]) -> int:
    parser = _parser(*(name for name in argv[:1] if name in _COMMANDS))
    arguments = parser.parse_args(argv)
    return arguments.run(parser, arguments, argv)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as for every other error."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def parse_known_args(self, *arguments: Any, **by_name: Any) -> tuple[Any, list[str]]:
        """As argparse's, but a command refuses what it does not know itself: its `--help` has the options."""
        parsed, unknown = super().parse_known_args(*arguments, **by_name)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown


def _parser(*names: str) -> argparse.ArgumentParser:
    """The parser of these commands, whose modules alone are imported; without names of all."""
    parser = _Parser(prog="lancet", description="Mixture-of-Experts training that hides its all-to-all.")
    parser.add_argument("--version", action="version", version=f"lancet {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name in names or _COMMANDS:
        importlib.import_module(f"lancet_kernels.cli.{_COMMANDS[name]}").add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
