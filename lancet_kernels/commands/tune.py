"""`lancet tune`: find the best configuration of each kernel, by timing it on the GPU of this machine."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from lancet_kernels.atomic import json_text
from lancet_kernels.commands.options import positive_float, positive_int
from lancet_kernels.errors import UserError
from lancet_kernels.kernels.tuned_entry import KINDS
from lancet_kernels.tuning.workloads import WORKLOADS, parse_workload

if TYPE_CHECKING:
    from lancet_kernels.tuning.candidates import Outcome
    from lancet_kernels.tuning.place import Place

DTYPES = ("bfloat16", "float16", "float32")
# Rank 0 compiles while the others wait.
TIMEOUT_S = 1800.0
STATUSES = {
    "tuned": "tuned now",
    "known": "tuned before",
    "left": "left for the next run",
    "failed": "without a candidate that works",
    "dry-run": "would be tuned",
}


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser of `lancet`."""
    command = commands.add_parser(
        "tune",
        help="find the best configuration of each kernel",
        description="Find the best configuration (tile, warps, stages, group order, programs that put, rows "
        "per put) of each kernel and shape, and store it for later runs. At most 20 candidates per kernel "
        "and shape are compiled and timed; what spills or does not fit is dropped. Needs a GPU; without one, "
        "--dry-run lists what would be timed. Under torchrun all ranks tune together. An interrupted run "
        "continues where it stopped.",
    )
    add_arguments(command)
    command.set_defaults(run=run)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--workload",
        action="append",
        metavar="NAME",
        help=f"{', '.join(WORKLOADS)}, or T,D,F,E,K[,activation]; may be repeated (default: all of these)",
    )
    command.add_argument(
        "--kinds",
        metavar="LIST",
        help=f"kinds of kernels, separated by commas: {', '.join(KINDS)} (default: all)",
    )
    command.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="dtype of the operands (default: bfloat16)"
    )
    command.add_argument(
        "--arch", choices=("sm_80", "sm_90", "sm_100"), default="sm_90",
        help="architecture whose candidates --dry-run lists without a GPU (default: sm_90)",
    )  # fmt: skip
    command.add_argument(
        "--minutes",
        type=positive_float,
        help="stop after this many minutes (default: when everything is tuned)",
    )
    command.add_argument(
        "--candidates",
        type=positive_int,
        default=20,
        help="time only the first so many candidates per kernel and shape (default: 20, which is all)",
    )
    command.add_argument(
        "--rounds", type=positive_int, default=15, help="timings per candidate (default: 15)"
    )
    command.add_argument(
        "--workers", type=positive_int, default=2, help="processes that compile (default: 2)"
    )
    command.add_argument(
        "--cache", metavar="FILE", help="file to store the results in (default: in the user's cache folder)"
    )
    command.add_argument("--force", action="store_true", help="tune again what is in the file already")
    command.add_argument("--dry-run", action="store_true", help="only list what would be timed")
    command.add_argument("--json", action="store_true", help="print the outcome as JSON")


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Tune. -> 1 if a task has no candidate that works."""
    workloads = [parse_workload(text) for text in arguments.workload or WORKLOADS]
    # Imported here, because these need Triton, which is not available on every platform.
    import torch
    from tqdm import tqdm

    from lancet_kernels.kernels.tuning import TunedCache, default_cache
    from lancet_kernels.training.ranks import start_ranks, under_launcher
    from lancet_kernels.tuning.place import Place
    from lancet_kernels.tuning.tune_tasks import make_tasks
    from lancet_kernels.tuning.tuner import check_has_gpu, tune

    kinds = arguments.kinds.split(",") if arguments.kinds else list(KINDS)
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise UserError(
            "--kinds", got=", ".join(unknown), expected=f"some of {', '.join(KINDS)}", do="check the names"
        )
    tasks = make_tasks(workloads, getattr(torch, arguments.dtype), kinds)
    has_gpu = torch.cuda.is_available()
    elsewhere = Place.elsewhere(int(arguments.arch.removeprefix("sm_")))
    if not has_gpu and not arguments.dry_run:
        check_has_gpu(elsewhere)
    rank = local_rank = 0
    if under_launcher():
        joined = start_ranks("cuda" if has_gpu else "cpu", TIMEOUT_S)
        rank, local_rank = joined.rank, joined.local_rank
    place = Place.here(torch.device("cuda", local_rank)) if has_gpu else elsewhere
    cache = TunedCache(arguments.cache or default_cache())
    if local_rank == 0 and not arguments.dry_run:
        cache.check_writable()
    if rank == 0:
        print(_what(place, len(tasks), cache), file=sys.stderr)
    with ExitStack() as stack:
        progress = None
        if rank == 0:
            bar = stack.enter_context(
                tqdm(total=len(tasks), unit="task", disable=not sys.stderr.isatty(), leave=False)
            )

            def progress(done: int, text: str) -> None:
                bar.set_postfix_str(text, refresh=False)
                bar.update(done - bar.n)

        outcomes = tune(
            tasks, place, cache, most=arguments.candidates, minutes=arguments.minutes,
            workers=arguments.workers, rounds=arguments.rounds, force=arguments.force,
            dry_run=arguments.dry_run, on_progress=progress, save=local_rank == 0,
        )  # fmt: skip
    if rank == 0:
        print(json_text(_as_json(outcomes, place, cache)) if arguments.json else _text(outcomes))
    return 1 if any(outcome.status == "failed" for outcome in outcomes) else 0


def _what(place: Place, tasks: int, cache: Any) -> str:
    here = "" if place.device is not None else " (no GPU here)"
    return f"{_tasks(tasks)} on {place.name}{here}; cache: {cache.path}"


def _tasks(number: int) -> str:
    return f"{number} task{'s' * (number != 1)}"


def _as_json(outcomes: Sequence[Outcome], place: Place, cache: Any) -> dict[str, Any]:
    import torch
    import triton

    return {
        "device": place.name,
        "cache": str(cache.path),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "tasks": [_task(outcome) for outcome in outcomes],
        "counts": {status: sum(o.status == status for o in outcomes) for status in STATUSES},
    }


def _task(outcome: Outcome) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "key": outcome.key,
        "workload": str(outcome.task.workload),
        "status": outcome.status,
        "candidates": [candidate.as_json() for candidate in outcome.candidates],
    }
    if outcome.winner is not None:
        fields["winner"] = outcome.winner.as_json()
    if outcome.cached is not None:
        fields["winner"] = {"config": outcome.cached.config, "ms": outcome.cached.milliseconds}
    return fields


def _text(outcomes: Sequence[Outcome]) -> str:
    lines = []
    for outcome in outcomes:
        lines += [outcome.key, *_configuration_text(outcome)]
    counts = [
        f"{count} {text}"
        for status, text in STATUSES.items()
        if (count := sum(outcome.status == status for outcome in outcomes))
    ]
    return "\n".join([*lines, "", f"{_tasks(len(outcomes))}: {', '.join(counts)}"])


def _configuration_text(outcome: Outcome) -> list[str]:
    if outcome.cached is not None:
        entry = outcome.cached
        return [f"    {entry.how} on {entry.date}: {_short(entry.configuration())}"]
    counted = f"    {len(outcome.candidates)} candidates"
    if outcome.status == "dry-run":
        return [f"{counted}:", *(f"        {_short(candidate.config)}" for candidate in outcome.candidates)]
    reasons = Counter(_kind_of_reason(c.reason) for c in outcome.candidates if c.reason)
    lines = [counted + "".join(f", {count} {reason}" for reason, count in reasons.items())]
    best, default = outcome.winner, outcome.default
    if best is not None and default is not None:
        gain = ""
        if best.ms is not None and default.ms is not None:
            gain = f"; the default takes {default.ms / best.ms:.2f} times as long"
        lines.append(f"    measured: {_short(best.config)}{gain}")
    return lines


def _kind_of_reason(reason: str) -> str:
    """A reason without its details, so that equal reasons can be counted."""
    return "refused by the compiler" if reason.startswith("compiler") else "that do not run"


def _short(config: Any) -> str:
    from lancet_kernels.kernels.tuned_entry import config_fields

    fields = config_fields(config)
    gemm = fields.pop("gemm", None)
    text = " ".join(f"{name}={value}" for name, value in fields.items())
    return f"{config.gemm} {text}" if gemm else text
