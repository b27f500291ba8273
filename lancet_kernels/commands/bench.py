"""`lancet bench overlap`: how much all-to-all each strategy hides, measured in one run."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lancet_kernels.atomic import json_text, write_json_atomically
from lancet_kernels.commands.options import (
    add_options,
    non_negative_int,
    option,
    positive_float,
    positive_int,
    to_options,
)
from lancet_kernels.commands.planning_flags import PlanningFlags
from lancet_kernels.errors import UserError
from lancet_kernels.measuring import netns
from lancet_kernels.ops.comm.link import emulate_link
from lancet_kernels.schedules import STRATEGY_NAMES
from lancet_kernels.training.data import load_corpus
from lancet_kernels.training.launch import launch
from lancet_kernels.training.models import BENCH_MODEL, MODELS
from lancet_kernels.training.ranks import LAUNCHER_PID, Rank, start_ranks, under_launcher
from lancet_kernels.training.train_options import TrainOptions, check_options
from lancet_kernels.training.trainer import Trainer

if TYPE_CHECKING:
    from lancet_kernels.optimization.optimized_module import OptimizedModule


@dataclass(frozen=True)
class OverlapOptions(PlanningFlags):
    """What to measure. The fields are the options of `lancet bench overlap`."""

    model: str = option(BENCH_MODEL, f"one of {', '.join(MODELS)}", metavar="NAME")
    gate: str = option("switch", "as in lancet train", metavar="GATE")
    ranks: int = option(2, "processes on this machine", parse=positive_int)
    batch: int = option(8, "sequences per rank", parse=positive_int)
    sequence: int | None = option(None, "tokens per sequence (default: the model's)", parse=positive_int)
    link: str = option(
        "emulated",
        "emulated: all-to-alls are paced; netns: a real wire between network namespaces (root, 2 ranks)",
        choices=("emulated", "netns"),
    )
    rounds: int = option(12, "measured iterations of every strategy, in turn", parse=positive_int)
    warmup: int = option(
        2, "iterations of every strategy that are run before the measured ones", parse=non_negative_int
    )
    share: float = option(
        0.4,
        "share of the blocking iteration that all-to-all should take; sets the speed of the link",
        parse=positive_float,
    )
    link_gbps: float | None = option(
        None, "speed of the link in Gbit/s; --share is then ignored", parse=positive_float
    )
    seed: int = option(0, "seed of weights and data", parse=non_negative_int)
    timeout: float = option(300.0, "seconds that a rank waits for another rank", parse=positive_float)

    def for_training(self) -> TrainOptions:
        """The same model and data as options of `lancet train`."""
        return TrainOptions(
            model=self.model,
            gate=self.gate,
            ranks=self.ranks,
            batch=self.batch,
            sequence=self.sequence,
            seed=self.seed,
            device="cpu",
        )


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser of `lancet`."""
    group = commands.add_parser(
        "bench", help="measure on this machine", description="Measure on this machine."
    )
    benches = group.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    command = benches.add_parser(
        "overlap",
        help="how much all-to-all each strategy hides",
        description="Run all strategies in turn, on the same model, seeds and data, over an emulated link on "
        "which all-to-all takes a given share of the blocking iteration.",
    )
    add_options(command, OverlapOptions)
    command.add_argument(
        "--timeline", metavar="FILE", help="draw the predicted and the measured timeline (.png)"
    )
    command.add_argument("--output", metavar="FILE", help="also write the figures as JSON to this file")
    command.add_argument("--json", action="store_true", help="print the figures as JSON")
    # Internal: the speed of a real link must be set before the ranks that use it start.
    command.add_argument("--only-choose-link", action="store_true", help=argparse.SUPPRESS)
    command.set_defaults(run=run)


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Start the ranks, or be one. -> exit code."""
    options: OverlapOptions = to_options(OverlapOptions, arguments)
    if under_launcher() or options.ranks == 1:
        return _measure_here(options, arguments)
    check_options(options.for_training(), options.ranks)
    command = ["-m", "lancet_kernels.cli", *argv]
    if options.link == "emulated":
        launch(options.ranks, command)
        return 0
    lacking = netns.missing() if options.ranks == netns.RANKS else f"{netns.RANKS} ranks"
    if lacking:
        raise UserError(
            "link netns", got=f"a machine without {lacking}", expected=lacking, do="use --link emulated"
        )
    gbps = options.link_gbps or _chosen_speed(argv, options)
    netns.run_on_wire([*command, "--link-gbps", str(gbps)], gbps)
    return 0


def _chosen_speed(argv: Sequence[str], options: OverlapOptions) -> float:
    """Gbit/s at which all-to-all takes the requested share, computed from a few blocking iterations."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "speed.json")
        command = ["-m", "lancet_kernels.cli", *argv, "--link", "emulated", "--output", str(file)]
        launch(options.ranks, [*command, "--only-choose-link"])
        return json.loads(file.read_text())["link_gbps"]


def _measure_here(options: OverlapOptions, arguments: argparse.Namespace) -> int:
    # Imported here, because it imports the solver and torch's tracer.
    from lancet_kernels.measuring import overlap_bench as overlap
    from lancet_kernels.schedules.strategies import AUTO, PlanningOptions

    rank = start_ranks("cpu", options.timeout)
    trainer = Trainer(options.for_training(), rank, load_corpus())
    step, inputs = trainer.module, trainer.batch(1)
    gbps = options.link_gbps or overlap.slow_link(step, inputs, options.share)
    if arguments.only_choose_link:
        if rank.rank == 0:
            write_json_atomically(Path(arguments.output), {"link_gbps": gbps})
        return 0
    emulate_link(gbps if options.link == "emulated" else None)
    _say(rank, f"{options.link} link of {gbps:.3g} Gbit/s; planning")
    # A new file of times, because old ones may be from a time with other load on the machine.
    times = Path(tempfile.gettempdir(), f"lancet-times-{os.environ.get(LAUNCHER_PID, os.getpid())}.json")
    planning = PlanningOptions(options.partition())
    optimized = overlap.prepare(step, inputs, STRATEGY_NAMES, times, planning)
    if rank.rank == 0:
        times.unlink()
    _say(rank, f"measuring {options.rounds} rounds of {len(optimized)} strategies")
    measured = overlap.measure(optimized, inputs, options.rounds, options.warmup)
    figures = (
        overlap.report(measured, AUTO, options.link)
        | {"link_gbps": gbps, "plans": {name: _plan(module) for name, module in optimized.items()}}
        | _conditions(options, rank, trainer)
    )
    if arguments.timeline:
        overlap.save_timeline(optimized[AUTO], inputs, arguments.timeline, rank.rank == 0)
    if rank.rank == 0:
        if arguments.output:
            write_json_atomically(Path(arguments.output), figures)
        print(json_text(figures) if arguments.json else overlap.table(figures), flush=True)
    return 0


def _plan(module: OptimizedModule) -> dict[str, object]:
    """A summary of the plan."""
    plan = module.plan
    ranges = [{"first": r.first, "last": r.last, "parts": r.parts} for r in plan.ranges]
    return {"chosen": plan.chosen or plan.strategy, "method": plan.method, "ranges": ranges}


def _conditions(options: OverlapOptions, rank: Rank, trainer: Trainer) -> dict[str, object]:
    config = asdict(trainer.model.config)
    sizes = {key: value for key, value in config.items() if key not in ("name", "gate", "sequence")}
    return {
        "model": options.model,
        "sizes": sizes | {"sequence": trainer.sequence},
        "gate": options.gate,
        "ranks": rank.world,
        "batch": options.batch,
        "rounds": options.rounds,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "device": "cpu",
        "threads_per_rank": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _say(rank: Rank, text: str) -> None:
    if rank.rank == 0:
        print(text, file=sys.stderr, flush=True)
