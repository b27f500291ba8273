"""`lancet env`: what is installed here and which backends can run, to paste into a bug report."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lancet_kernels.atomic import json_text


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser of `lancet`."""
    command = commands.add_parser(
        "env",
        help="show versions, GPUs, backends and caches, for a bug report",
        description="Show versions, GPUs, links between them, which backends can run here and why the "
        "others cannot, and the state of the cache files. To paste into a bug report: no host names, user "
        "names or secrets are in it.",
    )
    command.add_argument("--json", action="store_true", help="print the facts as JSON")
    command.set_defaults(run=run)


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Print the facts. -> exit code."""
    # Imported here, because it imports torch.distributed and, for the caches, Triton.
    from lancet_kernels.environment import as_text, environment

    facts = environment()
    print(json_text(facts) if arguments.json else as_text(facts))
    return 0
