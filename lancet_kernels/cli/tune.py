"""`lancet tune`: find the best configuration of fused launches, by timing them on the GPU of this machine."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lancet_kernels.cli.kernels import ARCHITECTURES
from lancet_kernels.cli.options import add_options, option, positive_float, positive_int
from lancet_kernels.errors import UserError
from lancet_kernels.files import json_text
from lancet_kernels.measure.fused_pass import WORKLOADS, parse_workload

if TYPE_CHECKING:
    from lancet_kernels.measure.tuner import Outcome, Place

DTYPES = ("bfloat16", "float16", "float32")
# Ranks meet at least once per candidate.
TIMEOUT_S = 1800.0
STATUSES = {
    "tuned": "tuned now",
    "known": "tuned before",
    "left": "left for the next run",
    "failed": "without a candidate that works",
    "dry-run": "would be tuned",
}


@dataclass(frozen=True)
class TuneOptions:
    """The options of `lancet tune`."""

    dtype: str = option("bfloat16", "dtype of the operands", choices=DTYPES)
    arch: str = option(
        "sm_90", "architecture whose candidates --dry-run lists without a GPU", choices=ARCHITECTURES
    )
    minutes: float | None = option(
        None, "stop after this many minutes (default: when everything is tuned)", parse=positive_float
    )
    candidates: int | None = option(
        None, "time only the first so many candidates of each layer (default: all)", parse=positive_int
    )
    rounds: int = option(15, "timings per candidate", parse=positive_int)
    cache: str | None = option(
        None, "file to store the results in (default: in the user's cache folder)", metavar="FILE"
    )
    force: bool = option(False, "tune again what is in the file already")
    dry_run: bool = option(False, "only list what would be timed")


def add_parser(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "tune",
        help="find the best configuration of fused launches",
        description="Find the best configuration (kernel, tile, warps, stages, rows per put) of the fused "
        "launches of each layer, and store it for later runs. About a dozen candidates are compiled and "
        "timed; what does not fit is dropped. Needs a GPU; without one, --dry-run lists what would be timed. "
        "Under torchrun all ranks tune together. An interrupted run continues where it stopped.",
    )
    command.add_argument(
        "--workload",
        action="append",
        metavar="NAME",
        help=f"{', '.join(WORKLOADS)}, or T,D,F,E,K[,activation]; may be repeated (default: all of these)",
    )
    add_options(command, TuneOptions)
    command.add_argument("--json", action="store_true", help="print the outcome as JSON")
    command.set_defaults(run=run)


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Tune. -> 1 if a task has no candidate that works."""
    workloads = [parse_workload(text) for text in arguments.workload or WORKLOADS]
    # Imported here, because these need Triton, which is not available on every platform.
    import torch
    from tqdm import tqdm

    from lancet_kernels.kernels.config import TunedCache, default_cache
    from lancet_kernels.measure.launch import start_ranks, under_launcher
    from lancet_kernels.measure.tuner import Place, Task, tune

    dtype = getattr(torch, arguments.dtype)
    # One of the layers with the same shape.
    tasks = list({task.shape: task for task in (Task(w, dtype) for w in workloads)}.values())
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not arguments.dry_run:
        do = "`lancet tune --dry-run` lists what would be timed, "
        do += f"`lancet kernels --arch {arguments.arch}` compiles every kernel"
        raise UserError("lancet tune", got="no GPU", expected="a GPU to time kernels on", do=do)
    rank = local_rank = 0
    if under_launcher():
        joined = start_ranks("cuda" if has_gpu else "cpu", TIMEOUT_S)
        rank, local_rank = joined.rank, joined.local_rank
    arch = int(arguments.arch.removeprefix("sm_"))
    place = Place.here(torch.device("cuda", local_rank)) if has_gpu else Place.elsewhere(arch)
    cache = TunedCache(arguments.cache or default_cache())
    if local_rank == 0 and not arguments.dry_run:
        cache.check_writable()
    if rank == 0:
        note = "" if has_gpu else " (no GPU here)"
        print(f"{_tasks(len(tasks))} on {place.name}{note}; cache: {cache.path}", file=sys.stderr)
    hidden = rank != 0 or not sys.stderr.isatty()
    with tqdm(total=len(tasks), unit="task", disable=hidden, leave=False) as bar:

        def progress(done: int, text: str) -> None:
            bar.set_postfix_str(text, refresh=False)
            bar.update(done - bar.n)

        outcomes = tune(
            tasks, place, cache, most=arguments.candidates, minutes=arguments.minutes,
            rounds=arguments.rounds, force=arguments.force, dry_run=arguments.dry_run, on_progress=progress,
            save=local_rank == 0,
        )  # fmt: skip
    if rank == 0:
        print(json_text(_as_json(outcomes, place, cache)) if arguments.json else _text(outcomes))
    return 1 if any(outcome.status == "failed" for outcome in outcomes) else 0


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
        fields["winner"] = {"config": asdict(outcome.cached.config), "ms": outcome.cached.milliseconds}
    return fields


def _text(outcomes: Sequence[Outcome]) -> str:
    lines = [line for outcome in outcomes for line in (outcome.key, *_configuration_text(outcome))]
    counts = Counter(outcome.status for outcome in outcomes)
    summary = [f"{counts[status]} {text}" for status, text in STATUSES.items() if counts[status]]
    return "\n".join([*lines, "", f"{_tasks(len(outcomes))}: {', '.join(summary)}"])


def _configuration_text(outcome: Outcome) -> list[str]:
    if outcome.cached is not None:
        entry = outcome.cached
        return [f"    measured on {entry.date}: {_short(entry.config)}"]
    counted = f"    {len(outcome.candidates)} candidates"
    if outcome.status == "dry-run":
        return [f"{counted}:", *(f"        {_short(candidate.config)}" for candidate in outcome.candidates)]
    dropped = sum(candidate.dropped is not None for candidate in outcome.candidates)
    lines = [counted + (f", {dropped} that do not run" if dropped else "")]
    best, default = outcome.winner, outcome.candidates[0]
    if best is not None:
        gain = ""
        if best.ms is not None and default.ms is not None:
            gain = f"; the default takes {default.ms / best.ms:.2f} times as long"
        lines.append(f"    measured: {_short(best.config)}{gain}")
    return lines


def _short(config: Any) -> str:
    fields = asdict(config)
    del fields["gemm"]
    return f"{config.gemm} " + " ".join(f"{name}={value}" for name, value in fields.items())
