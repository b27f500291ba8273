"""`lancet bench`: a training step as it is, in DistributedDataParallel and with every plan, measured in one
run."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lancet_kernels.cli import aligned
from lancet_kernels.cli.check import own_step
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
from lancet_kernels.measure.launch import LANCET, Rank, launch, start_ranks, under_launcher
from lancet_kernels.ops.comm.link import emulate_link
from lancet_kernels.ops.comm.stand_in import standing_for
from lancet_kernels.ops.comm.waiting import BOARD_FILE
from lancet_kernels.schedules import MICROBATCHES, STRATEGY_NAMES

if TYPE_CHECKING:
    from torch import nn

    from lancet_kernels.measure.step_bench import Inputs
    from lancet_kernels.schedules.plan import Plan

OVERLAP = "overlap"
"""The step of the library's own model, over an emulated link."""
_SHARE = 0.4
_MODEL_OPTIONS = ("model", "gate", "batch", "sequence")


@dataclass(frozen=True)
class BenchOptions(PlanningFlags):
    """The options of `lancet bench`."""

    ranks: int = option(2, "processes on this machine; under torchrun those it started", parse=positive_int)
    strategies: tuple[str, ...] = option(
        STRATEGY_NAMES,
        f"some of {', '.join((*STRATEGY_NAMES, MICROBATCHES))}, with commas in between (default: all that "
        "--accumulate allows)",
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
    # Errors in the file or the options are raised before a rank starts.
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
    given = [name for name in _MODEL_OPTIONS if getattr(options, name) != getattr(BenchOptions, name)]
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
    planning = PlanningOptions(options.partition())
    strategies = options.strategies
    if options.accumulate > 1 and strategies == STRATEGY_NAMES:
        strategies = (*strategies, MICROBATCHES)
    # A new file of times, because old ones may have been measured beside other load. In our launcher's
    # folder, which is deleted even if this rank is killed.
    launchers = os.path.dirname(os.environ.get(BOARD_FILE, "")) or None
    with tempfile.TemporaryDirectory(prefix="lancet-times-", dir=launchers) as folder:
        times = Path(folder, "times.json")
        plans = optimize_each(
            step, inputs, strategies, times=times, options=planning, accumulate=options.accumulate
        )
    contenders = {**step_bench.baselines(step, inputs), **plans}
    _say(rank, f"measuring {options.rounds} rounds of {', '.join(contenders)}")
    measured = step_bench.measure(contenders, inputs, options.rounds, options.warmup, options.accumulate)
    best = min(plans, key=lambda name: measured[name].iteration_ms)
    figures = step_bench.report(measured, best, link)
    impossible = {k: v for module in plans.values() for k, v in module.plan.report.impossible.items()}
    figures |= about | {
        "link_gbps": gbps,
        "plans": {name: _summary(module.plan) for name, module in plans.items()},
        "impossible": {name: why for name, why in impossible.items() if name in options.strategies},
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
    if rank.rank == 0:
        print(json_text(figures) if arguments.json else table(figures), flush=True)
    if arguments.timeline:
        with file_errors(arguments.timeline, (OSError, ValueError)):
            step_bench.save_timeline(plans[best], inputs, arguments.timeline, rank.rank == 0)
    if rank.rank == 0 and arguments.output:
        with file_errors(arguments.output):
            write_json_atomically(arguments.output, figures)
    return 0


def _step(options: BenchOptions, step: str, rank: Rank) -> tuple[nn.Module, Inputs, dict[str, object]]:
    """The module to measure, its inputs on this rank, and its description for the figures."""
    if step == OVERLAP:
        trainer = Trainer(options.for_training(), rank, load_corpus())
        config = asdict(trainer.model.config)
        sizes = {key: value for key, value in config.items() if key not in ("name", "gate", "sequence")}
        about: dict[str, object] = {"model": options.model, "sizes": sizes | {"sequence": trainer.sequence}}
        about |= {"gate": options.chosen_gate, "batch": options.batch}
        return trainer.module, trainer.batch(1), about
    return *own_step(step, rank.device, options.seed), {"model": step}


def _summary(plan: Plan) -> dict[str, object]:
    from lancet_kernels.measure.step_bench import chosen

    ranges = [{"first": r.first, "last": r.last, "parts": r.parts} for r in plan.ranges]
    return {"chosen": chosen(plan), "method": plan.report.method, "ranges": ranges}


def _say(rank: Rank, text: str) -> None:
    if rank.rank == 0:
        print(text, file=sys.stderr, flush=True)


def table(figures: Mapping[str, Any]) -> str:
    """The figures of `step_bench.report` as a table for people."""
    from lancet_kernels.measure.step_bench import COUNTS, DDP, DDP_LIKE, PLAIN

    times: Mapping[str, float] = figures["iteration_ms"]
    waits = sorted({what for waited in figures["waited_ms"].values() for what in waited} - {COUNTS})
    usual = next(name for name in (DDP, DDP_LIKE, PLAIN) if name in times)
    head = ["", "step ms", "saved", *(f"waits {what.replace('_', '-')}" for what in waits), "peak GB"]
    rows = [[*head, "predicted ms", "off", "peak GB"]]
    for name, ms in times.items():
        waited = {what: f"{figures['waited_ms'][name].get(what, 0.0):.1f}" for what in waits}
        if name == DDP and "all_reduce" in waited:
            waited["all_reduce"] = "?"  # DistributedDataParallel waits for its sums out of our sight
        memory, predicted = f"{figures['peak_memory_gb'][name]:.3g}", ["", "", ""]
        if name in figures["predicted_ms"]:
            predicted = [
                f"{figures['predicted_ms'][name]:.1f}",
                f"{figures['prediction_errors'][name]:.0%}",
                f"{figures['predicted_peak_memory_gb'][name]:.3g}",
            ]
        rows.append([name, f"{ms:.1f}", f"{1 - ms / times[usual]:.1%}", *waited.values(), memory, *predicted])
    accounts: Mapping[str, Mapping[str, float]] = figures["account_ms"]
    parts = [*dict.fromkeys(part for account in accounts.values() for part in account)]
    account_rows = [["of the step, ms", *(part.replace("_", "-") for part in parts)]]
    for name, account in accounts.items():
        account_rows.append([name, *(f"{account.get(part, 0.0):.1f}" for part in parts)])
    return "\n".join(
        [
            aligned(rows, right=range(1, len(rows[0]))),
            f"saved: against {usual}; {PLAIN}: no gradient is summed",
            aligned(account_rows, right=range(1, len(parts) + 1)),
            f"link {figures['link']}; {_gain(figures)}",
        ]
    )


def _gain(figures: Mapping[str, Any]) -> str:
    """Speedup of the best strategy over the better baseline, and hidden communication."""
    from lancet_kernels.measure.step_bench import BASELINES, DDP, DDP_LIKE

    best, times = figures["best"], figures["iteration_ms"]
    others = {name: times[name] for name in (DDP, DDP_LIKE, *BASELINES) if name in times and name != best}
    if not others:
        return best
    rival = min(others, key=others.__getitem__)
    text = f"{best} against {rival} {others[rival] / times[best]:.2f}x"
    exposed = [
        f"exposed all-to-all {-figures[f'exposed_reduction_vs_{name}']:+.0%} against {name}"
        for name in BASELINES
        if f"exposed_reduction_vs_{name}" in figures and name != best
    ]
    return ", ".join([text, *exposed])
