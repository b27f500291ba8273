"""`lancet selftest`: does what this machine has give right results?"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lancet_kernels.atomic import json_text
from lancet_kernels.commands.options import positive_int
from lancet_kernels.errors import RankFailed, UserError
from lancet_kernels.training.launch import launch
from lancet_kernels.training.ranks import start_ranks, under_launcher

if TYPE_CHECKING:
    from lancet_kernels.commands.self_test import Result

# How long a rank waits for another one.
TIMEOUT_S = 45.0


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser of `lancet`."""
    command = commands.add_parser(
        "selftest",
        help="check that layers, kernels, plans and communication give right results here",
        description="Run a small layer forward and backward on every backend that this machine has, a "
        "planned step, a kernel, and an all-to-all between ranks, and compare each with a reference. A line "
        "for each; the exit code is not 0 if one fails. It takes less than a minute.",
    )
    command.add_argument("--ranks", type=positive_int, default=2, help="ranks on the CPU (default: 2)")
    command.add_argument(
        "--gpu",
        action="store_true",
        help="fail if there is no GPU to check (one that is there is always checked, with a rank for each "
        "of at most --ranks GPUs)",
    )
    command.add_argument("--json", action="store_true", help="print the results as JSON")
    # For ourselves: what the ranks are told.
    command.add_argument("--device", choices=("cpu", "cuda"), help=argparse.SUPPRESS)
    command.add_argument("--results", help=argparse.SUPPRESS)
    command.set_defaults(run=run)


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Start the ranks on each device, or be one. -> 1 if a check failed, else 0."""
    if arguments.results:
        return _be_a_rank(arguments)
    if under_launcher():
        raise UserError(
            "selftest",
            got="a rank of another launcher",
            expected="a call that starts its own ranks",
            do="call it without torchrun",
        )
    # Imported here, because these import torch.
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if arguments.gpu and not gpus:
        raise UserError(
            "--gpu",
            got="no GPU that torch can use",
            expected="at least one",
            do="see `lancet env` for what torch finds, or leave --gpu out",
        )
    results = _on_ranks(arguments.ranks, "cpu", arguments.json)
    if gpus:
        results += _on_ranks(min(arguments.ranks, gpus), "cuda", arguments.json)
    failed = sum(result.status == "failed" for result in results)
    skipped = sum(result.status == "skipped" for result in results)
    if arguments.json:
        print(json_text({"checks": [vars(result) for result in results], "failed": failed}))
    else:
        print(f"{len(results) - failed - skipped} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


def _on_ranks(ranks: int, device: str, quiet: bool) -> list[Result]:
    """The results of all checks on one kind of device. A rank that fails makes its check fail."""
    from lancet_kernels.commands.self_test import Result

    with tempfile.TemporaryDirectory(prefix="lancet-selftest-") as folder:
        file = Path(folder, "results.json")
        command = ["-m", "lancet_kernels.cli", "selftest", "--device", device, "--results", str(file)]
        environment = {"TRITON_INTERPRET": "1" if device == "cpu" else "0"}
        failure = ""
        try:
            launch(ranks, command + ["--json"] * quiet, device=device, environment=environment)
        except RankFailed as error:
            failure = str(error)
        written = json.loads(file.read_text()) if file.exists() else []
    results = [Result(**fields) for fields in written]
    if failure:
        if not results or results[-1].status != "running":
            results.append(Result("start of the ranks", device))
        results[-1].status, results[-1].detail = "failed", failure
        if not quiet:
            print(results[-1].line(), flush=True)
    return results


def _be_a_rank(arguments: argparse.Namespace) -> int:
    from lancet_kernels.commands.self_test import run_checks

    rank = start_ranks(arguments.device, TIMEOUT_S)
    out = sys.stderr if arguments.json else sys.stdout
    run_checks(rank, Path(arguments.results), lambda line: print(line, file=out, flush=True))
    return 0
