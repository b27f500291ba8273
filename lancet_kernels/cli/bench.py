"""`lancet bench`: a training step as it is, in DistributedDataParallel and with every plan, measured in one
run."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.utils._pytree as pytree

from lancet_kernels.cli.options import (
    PlanningFlags,
    add_options,
    fraction,
    names_among,
    non_negative_int,
    option,
    positive_float,
    positive_int,
    to_options,
)
from lancet_kernels.cli.train_options import TrainOptions, check_options, load_corpus
from lancet_kernels.cli.trainer import Trainer
from lancet_kernels.errors import UserError
from lancet_kernels.files import file_errors, json_text, write_json_atomically
from lancet_kernels.layer.gpt2_moe import BENCH_MODEL, MODELS
from lancet_kernels.measure.launch import LANCET, LAUNCHER_PID, Rank, launch, start_ranks, under_launcher
from lancet_kernels.ops.comm.link import emulate_link
from lancet_kernels.ops.comm.stand_in import standing_for
from lancet_kernels.schedules import MICROBATCHES, STRATEGY_NAMES

if TYPE_CHECKING:
    from torch import nn

    from lancet_kernels.measure.step_bench import Inputs
    from lancet_kernels.optimization.optimized_module import OptimizedModule

OVERLAP = "overlap"
"""The step of the library's own model, over an emulated link."""
_SHARE = 0.4
_OF_MODELS = ("model", "gate", "batch", "sequence")


@dataclass(frozen=True)
class BenchOptions(PlanningFlags):
    """What to measure. The fields are the options of `lancet bench`."""

    ranks: int = option(2, "processes on this machine; under torchrun those it started", parse=positive_int)
    strategies: tuple[str, ...] = option(
        STRATEGY_NAMES,
        "names with commas in between (default: all)",
        parse=names_among((*STRATEGY_NAMES, MICROBATCHES)),
    )
    device: str = option(
        "auto", "where to compute; auto: cuda if there is one", choices=("auto", "cpu", "cuda")
    )
    stands_for: int | None = option(
        None,
        "measure one process that stands for so many ranks, which are alike, over an emulated link",
        parse=positive_int,
    )
    link_gbps: float | None = option(
        None, "emulate a link of so many Gbit/s between CPU ranks or those stood for", parse=positive_float
    )
    share: float | None = option(
        None,
        "emulate a link on which all-to-all takes this share of the blocking iteration, 0.4 say (default for "
        f"{OVERLAP})",
        parse=fraction,
    )
    accumulate: int = option(
        1, "microbatches of an iteration, whose gradients are summed once", parse=positive_int
    )
    rounds: int = option(12, "measured iterations of every contender, in turn", parse=positive_int)
    warmup: int = option(2, "iterations of each before the measured ones", parse=non_negative_int)
    model: str = option(BENCH_MODEL, f"of {OVERLAP}: one of {', '.join(MODELS)}", metavar="NAME")
    gate: str | None = option(
        None,
        f"of {OVERLAP}: as in lancet train (default: switch; with --stands-for random, since ranks that are "
        "alike have balanced routing)",
        metavar="GATE",
        parse=str,
    )
    batch: int = option(8, f"of {OVERLAP}: sequences per rank", parse=positive_int)
    sequence: int | None = option(
        None, f"of {OVERLAP}: tokens per sequence (default: the model's)", parse=positive_int
    )
    seed: int = option(0, "seed of weights and data", parse=non_negative_int)
    timeout: float = option(300.0, "seconds that a rank waits for another rank", parse=positive_float)

    def for_training(self) -> TrainOptions:
        """The same model and data as options of `lancet train`."""
        return TrainOptions(
            model=self.model,
            gate=self.chosen_gate,
            ranks=self.stands_for or self.ranks,
            batch=self.batch,
            sequence=self.sequence,
            seed=self.seed,
            device=self.chosen_device(),
        )

    def chosen_device(self) -> str:
        """ "cpu" or "cuda"; an emulated link is one of CPU ranks, or of a rank that stands for others."""
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() and not self.on_cpu_link else "cpu"

    @property
    def chosen_gate(self) -> str:
        """The gate of the library's own model."""
        return self.gate or ("switch" if self.stands_for is None else "random")

    @property
    def emulated(self) -> bool:
        """Is the speed of a link given?"""
        return self.link_gbps is not None or self.share is not None

    @property
    def on_cpu_link(self) -> bool:
        """Do several processes share an emulated link?"""
        return self.emulated and self.stands_for is None


def add_parser(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "bench",
        help="measure your training step: plain, in DDP, and with every plan",
        description="Run a training step as it is, in DistributedDataParallel and with the plan of every "
        "strategy, in turn, on the ranks of this machine: time, what computation waits for, memory, and what "
        "was predicted. "
        f"`{OVERLAP}` measures the library's own model, over an emulated link on which all-to-all takes 40 % "
        "of the blocking iteration.",
    )
    command.add_argument(
        "step",
        metavar=f"FILE.py:FUNCTION|{OVERLAP}",
        help="a function that returns the module and its example inputs, as for `lancet plan --module`; it "
        "runs on every rank",
    )
    add_options(command, BenchOptions)
    command.add_argument(
        "--timeline", metavar="FILE", help="draw the fastest plan, as predicted and as measured (.png)"
    )
    command.add_argument("--output", metavar="FILE", help="also write the figures as JSON to this file")
    command.add_argument("--json", action="store_true", help="print the figures as JSON")
    command.set_defaults(run=run)


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Start the ranks, or be one. -> exit code."""
    if arguments.step == OVERLAP and arguments.share is None and arguments.link_gbps is None:
        arguments.share = _SHARE
    options: BenchOptions = to_options(BenchOptions, arguments)
    _check(options, arguments.step)
    if under_launcher() or (options.ranks == 1 and options.stands_for is None):
        return _measure_here(options, arguments)
    # Errors in the file or the options are said before a rank starts.
    if arguments.step == OVERLAP:
        check_options(options.for_training(), options.stands_for or options.ranks)
    else:
        # Imported here, because it imports torch's tracer.
        from lancet_kernels.predict.own_step import load_function

        load_function(arguments.step)
    command = [*LANCET, *argv]
    launch(1 if options.stands_for else options.ranks, command, device=options.chosen_device())
    return 0


def _check(options: BenchOptions, step: str) -> None:
    """Raise UserError for options that do not fit together."""
    given = [name for name in _OF_MODELS if getattr(options, name) != getattr(BenchOptions, name)]
    if step != OVERLAP and given:
        raise UserError(
            "options",
            got=f"{step} and --{given[0]}",
            expected="only one of them, because your function defines its model",
            do="set it in your function",
        )
    if options.on_cpu_link and options.chosen_device() == "cuda":
        raise UserError(
            "link",
            got="device cuda",
            expected="cpu, because only CPU ranks share an emulated link",
            do="add --stands-for, with which one process stands for all ranks",
        )
    if options.stands_for is None:
        return
    if options.ranks != BenchOptions.ranks:
        raise UserError(
            "options",
            got="--stands-for and --ranks",
            expected="only one of them, because one process stands for all ranks",
            do="leave --ranks out",
        )
    if not options.emulated:
        raise UserError(
            "link of stand-in ranks", got="no speed", expected="one", do="add --link-gbps or --share"
        )


def _measure_here(options: BenchOptions, arguments: argparse.Namespace) -> int:
    # Imported here, because it imports torch's tracer.
    from lancet_kernels.measure import step_bench
    from lancet_kernels.optimization.optimize import optimize_each
    from lancet_kernels.schedules.strategies import PlanningOptions

    rank = start_ranks(options.chosen_device(), options.timeout)
    if options.stands_for is not None:
        standing_for(options.stands_for)
        rank = replace(rank, world=options.stands_for)
    step, inputs, about = _step(options, arguments.step, rank)
    gbps = options.link_gbps
    if gbps is None and options.share is not None and rank.world > 1:
        gbps = step_bench.slow_link(step, inputs, options.share)
    emulate_link(gbps if rank.world > 1 else None)
    link = "real" if gbps is None else "emulated"
    if options.stands_for is not None:
        link = f"emulated wire, one rank stands for {options.stands_for}"
    _say(rank, f"{link} link{'' if gbps is None else f' of {gbps:.3g} Gbit/s'}; planning")
    # A new file of times, because old ones may be from a time with other load on the machine.
    times = Path(tempfile.gettempdir(), f"lancet-times-{os.environ.get(LAUNCHER_PID, os.getpid())}.json")
    planning = PlanningOptions(options.partition())
    strategies = options.strategies
    if options.accumulate > 1 and strategies == STRATEGY_NAMES:
        strategies = (*strategies, MICROBATCHES)
    plans = optimize_each(
        step, inputs, strategies, times=times, options=planning, accumulate=options.accumulate
    )
    if rank.rank == 0:
        times.unlink(missing_ok=True)
    contenders = {**step_bench.baselines(step, inputs), **plans}
    _say(rank, f"measuring {options.rounds} rounds of {', '.join(contenders)}")
    measured = step_bench.measure(contenders, inputs, options.rounds, options.warmup, options.accumulate)
    best = min(plans, key=lambda name: measured[name].iteration_ms)
    figures = step_bench.report(measured, best, link)
    figures |= {"link_gbps": gbps, "plans": {name: _plan(module) for name, module in plans.items()}}
    figures |= about | _conditions(options, rank)
    impossible = {k: v for module in plans.values() for k, v in module.plan.report.impossible.items()}
    figures["impossible"] = {name: why for name, why in impossible.items() if name in options.strategies}
    if arguments.timeline:
        with file_errors(arguments.timeline, (OSError, ValueError)):
            step_bench.save_timeline(plans[best], inputs, arguments.timeline, rank.rank == 0)
    if rank.rank == 0:
        if arguments.output:
            write_json_atomically(Path(arguments.output), figures)
        print(json_text(figures) if arguments.json else step_bench.table(figures), flush=True)
    return 0


def _step(options: BenchOptions, step: str, rank: Rank) -> tuple[nn.Module, Inputs, dict[str, object]]:
    """The module to measure, its inputs on this rank, and what it is, for the figures."""
    if step == OVERLAP:
        trainer = Trainer(options.for_training(), rank, load_corpus())
        config = asdict(trainer.model.config)
        sizes = {key: value for key, value in config.items() if key not in ("name", "gate", "sequence")}
        about: dict[str, object] = {"model": options.model, "sizes": sizes | {"sequence": trainer.sequence}}
        about |= {"gate": options.chosen_gate, "batch": options.batch}
        return trainer.module, trainer.batch(1), about
    from lancet_kernels.predict.own_step import call_make_step, load_function

    torch.manual_seed(options.seed)
    module, inputs = call_make_step(step, load_function(step), nullcontext())
    inputs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(rank.device), inputs)
    return module.to(rank.device), inputs, {"model": step}


def _plan(module: OptimizedModule) -> dict[str, object]:
    """A summary of the plan."""
    from lancet_kernels.schedules.plan import PLAIN

    plan = module.plan
    ranges = [{"first": r.first, "last": r.last, "parts": r.parts} for r in plan.ranges]
    chosen = PLAIN if plan.plain else plan.report.chosen or plan.strategy
    return {"chosen": chosen, "method": plan.report.method, "ranges": ranges}


def _conditions(options: BenchOptions, rank: Rank) -> dict[str, object]:
    return {
        "ranks": rank.world,
        "stands_for": options.stands_for,
        "rounds": options.rounds,
        "accumulate": options.accumulate,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "device": rank.device.type,
        "threads_per_rank": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _say(rank: Rank, text: str) -> None:
    if rank.rank == 0:
        print(text, file=sys.stderr, flush=True)
