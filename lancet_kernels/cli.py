"""The command `lancet`.

Every subcommand prints for people, or with `--json` for machines: one JSON document on the last line of
standard output, everything else on standard error. A failure is one line on standard error and an exit
code that is not 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lancet_kernels.atomic import json_text
from lancet_kernels.errors import RankFailed, UserError
from lancet_kernels.launch import launch, report_errors, start_ranks, under_launcher
from lancet_kernels.options import add_options, to_options
from lancet_kernels.runs import read_config, resolve_run
from lancet_kernels.train import TrainOptions, check_options, train


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. -> exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if under_launcher():
        # A rank: whatever goes wrong must be told to the launcher, with this rank's number.
        return report_errors(lambda: _run(argv))
    try:
        return _run(argv)
    except (UserError, RankFailed) as error:
        print(f"lancet: {error}", file=sys.stderr)
        return 1


def _run(argv: Sequence[str]) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    return arguments.run(parser, arguments, argv)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        """One line, as for every other error."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="lancet", description="Mixture-of-Experts training that hides its all-to-all.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    command = commands.add_parser(
        "train",
        help="train a Mixture-of-Experts model on text",
        description="Train a Mixture-of-Experts model on text, on several ranks that this command starts "
        "itself; under torchrun it is one of the ranks.",
    )
    add_options(command, TrainOptions)
    command.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="RUN",
        help="go on from the newest checkpoint of a run (a name, a path; default: the latest); "
        "options that are not given are taken from that run",
    )
    command.add_argument("--json", action="store_true", help="print the summary as JSON")
    command.set_defaults(run=_train, command=command)
    return parser


def _train(parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    if arguments.resume:
        arguments = _with_options_of(parser, arguments, argv)
    options: TrainOptions = to_options(TrainOptions, arguments)
    if under_launcher() or options.ranks == 1:
        return _train_here(options, arguments)
    check_options(options, options.ranks)
    launch(options.ranks, ["-m", "lancet_kernels.cli", *argv], device=options.chosen_device())
    return 0


def _with_options_of(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: Sequence[str]
) -> argparse.Namespace:
    """Parse again, with the resumed run's options as defaults."""
    saved = read_config(resolve_run(arguments.runs, arguments.resume))
    known = {name: saved[name] for name in TrainOptions.__dataclass_fields__ if name in saved}
    arguments.command.set_defaults(**(known | {"runs": arguments.runs}))
    return parser.parse_args(argv)


def _train_here(options: TrainOptions, arguments: argparse.Namespace) -> int:
    """This process is a rank, or the only one."""
    rank = start_ranks(options.chosen_device(), options.timeout)
    summary = train(options, rank, arguments.resume)
    if summary is not None:
        print(json_text(summary) if arguments.json else _report(options, summary), flush=True)
    return 0


def _report(options: TrainOptions, summary: dict) -> str:
    """The summary for people."""
    emulated = " (emulated link)" if options.link_gbps is not None else ""
    get = summary.__getitem__
    return "\n".join(
        (
            f"{get('model')}, {get('experts')} experts behind gate {get('gate')}, "
            f"{get('ranks')} rank(s) on {get('device')}, {get('steps')} steps on {get('data')}",
            f"  loss         {get('loss_first'):.3f} -> {get('loss_last'):.3f}, "
            f"validation {get('validation_loss'):.3f}",
            f"  speed        {get('tokens_per_s'):.0f} tokens/s, {get('step_ms'):.1f} ms per step",
            f"  all-to-all   {get('all_to_all_ms'):.1f} ms per step, "
            f"{get('exposed_ms'):.1f} ms of it exposed{emulated}",
            f"  routing      {get('dropped'):.1%} dropped, load-balance loss {get('balance_loss'):.3f}",
            f"  written to   {options.runs}/{get('run')}",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
