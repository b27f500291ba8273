"""`lancet plan`: simulates all strategies on a cluster, and explains the plan of one; runs no step."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from lancet_kernels.cli.hf_flags import OF_HF, HfFlags, run_hf
from lancet_kernels.cli.options import (
    PlanningFlags,
    add_options,
    option,
    positive_float,
    positive_float_or_none,
    positive_int,
    to_options,
)
from lancet_kernels.errors import UserError, check_name
from lancet_kernels.files import file_errors, json_text
from lancet_kernels.graph.costs.clusters import cluster_names, load_cluster
from lancet_kernels.layer.gpt2_moe import MODELS
from lancet_kernels.ops.moe.gates import GATES
from lancet_kernels.schedules import STRATEGY_NAMES

if TYPE_CHECKING:
    from lancet_kernels.predict.own_step import OwnStep
    from lancet_kernels.predict.simulate import Setting, Simulated

_SHORT_DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

_MODEL_OPTIONS = ("model", "gate", "top_k", "batch", "experts_per_gpu", "capacity_factor", "dtype")
"""Options of the library's own models."""
_NOT_OF_HF = ("memory_gb", "most_parts", "group_ms", "longest_range_ms")
"""Options of the planner, which `--hf` does not have."""


@dataclass(frozen=True)
class PlanOptions(HfFlags, PlanningFlags):
    """The options of `lancet plan`."""

    module: str | None = option(
        None,
        "plan your own step: a function that returns the module and its example inputs",
        metavar="FILE.py:FUNCTION",
    )
    model: str = option("gpt2-s-moe", f"one of {', '.join(MODELS)}", metavar="NAME")
    cluster: str | None = option(
        None,
        f"{', '.join(cluster_names())}, or a .toml file of your own (default: p4de; with --hf, which needs "
        "efficiencies of kernels, dgx-h100)",
        metavar="CLUSTER",
    )
    gpus: int = option(
        16, "number of GPUs: part of one node, or whole nodes", parse=positive_int, alias="--ranks"
    )
    gate: str = option(
        "switch", f"{', '.join(GATES)}; options as in 'topk(renormalize=True)'", metavar="GATE"
    )
    top_k: int | None = option(None, "experts per token (default: 2 for gshard, else 1)", parse=positive_int)
    batch: int | None = option(
        None, "sequences per GPU (default: the paper's batch; 8 for models without one)", parse=positive_int
    )
    experts_per_gpu: int = option(2, "experts that each GPU hosts", parse=positive_int)
    capacity_factor: float | None = option(
        1.25,
        "tokens that an expert takes, relative to an even share; none: dropless",
        parse=positive_float_or_none,
    )
    dtype: str | None = option(
        None,
        "dtype of activations and weights, bf16 or fp32 say (default: bfloat16 where the cluster's GPUs have "
        "it, else float32)",
        metavar="DTYPE",
    )
    memory_gb: float | None = option(
        None, "memory limit of plans (default: the memory of the GPU)", parse=positive_float
    )
    strategy: str = option(
        "auto", "whose plan is explained, traced and saved", choices=(*STRATEGY_NAMES, *OF_HF)
    )

    @property
    def hardware(self) -> str:
        """The cluster, or its default."""
        return self.cluster or ("p4de" if self.hf is None else "dgx-h100")

    def check_model(self) -> None:
        """Raise UserError for options of several kinds of models at once."""
        given = [name for name in ("module", "hf") if getattr(self, name) is not None]
        only_hf = [field.name for field in fields(HfFlags) if field.name != "hf"]
        foreign = [*(_MODEL_OPTIONS if given else ()), *(_NOT_OF_HF if self.hf else only_hf)]
        conflicting = [name for name in foreign if getattr(self, name) != getattr(type(self), name)]
        others = [*given[1:], *conflicting]
        if others:
            names = [f"--{name.replace('_', '-')}" for name in (*given[:1], others[0])]
            expected, do = "only options that belong together", "see lancet plan --help"
            if given[:1] == ["module"]:
                expected = "only one of them, because your function defines its model"
                do = "set it in your function"
            raise UserError("options", got=" and ".join(names), expected=expected, do=do)

    def setting(self) -> Setting | OwnStep:
        """The setting to simulate. Raises: UserError for options that do not apply to a user's own step."""
        from lancet_kernels.predict.own_step import OwnStep
        from lancet_kernels.predict.simulate import Setting

        if self.module is not None:
            return OwnStep(self.module, self.hardware, self.gpus)
        dtype = self.dtype
        if dtype is None:
            peak = load_cluster(self.hardware).peak_tflops
            dtype = "bfloat16" if peak.get("bfloat16", 0.0) > peak["float32"] else "float32"
        return Setting(
            model=self.model,
            cluster=self.hardware,
            gpus=self.gpus,
            gate=self.gate,
            batch=self.batch,
            experts_per_gpu=self.experts_per_gpu,
            top_k=self.top_k,
            capacity_factor=self.capacity_factor,
            dtype=_SHORT_DTYPES.get(dtype, dtype),
        )


def add_parser(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "plan",
        help="plan a training step for a cluster, without having one",
        description="Plan the training step of a model, or of a module of your own, for a cluster, by "
        "simulation: no GPU, no ranks, no memory for its tensors.",
    )
    add_options(command, PlanOptions)
    command.add_argument("--timeline", metavar="FILE", help="draw all strategies on one time axis (.png)")
    command.add_argument(
        "--trace", metavar="FILE", help="write the strategy's timeline for ui.perfetto.dev (.json)"
    )
    command.add_argument("--save", metavar="FILE", help="write the strategy's plan (.json)")
    command.add_argument("--json", action="store_true", help="print the figures as JSON")
    command.set_defaults(run=run)


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Plan, print the result, and write the requested files. -> exit code."""
    # Imported here, because it imports torch's tracer.
    from lancet_kernels.predict.simulate import simulate_setting

    options: PlanOptions = to_options(PlanOptions, arguments)
    options.check_model()
    if options.hf is not None:
        return run_hf(options, options.hardware, options.gpus, options.strategy, arguments)
    check_name("--strategy", options.strategy, STRATEGY_NAMES, do=f"{', '.join(OF_HF)} are for --hf")
    start = time.perf_counter()
    simulated = simulate_setting(options.setting(), options.memory_gb, options.partition())
    if options.strategy in simulated.impossible:
        raise simulated.impossible[options.strategy]
    total = time.perf_counter() - start - simulated.capture_seconds
    written = _write_files(simulated, options.strategy, arguments)
    limit = options.memory_gb or simulated.setting.hardware.memory_gb
    if arguments.json:
        figures = _report(simulated, options.strategy, limit)
        print(json_text(figures | {"total_planning_seconds": total, "files": written}))
    else:
        print(_text(simulated, options.strategy, limit, written))
    return 0


def _report(simulated: Simulated, strategy: str, limit: float) -> dict[str, object]:
    """The figures as JSON values; times are simulated, planning seconds are measured here."""
    from lancet_kernels.predict.simulate import ASSUMPTIONS

    setting, plans = simulated.setting, simulated.plans
    predicted = {name: plan.report.predicted for name, plan in plans.items()}
    baseline = min(predicted[name].iteration_ms for name in ("none", "tutel"))
    return {
        "simulated": True,
        **setting.facts(),
        "memory_limit_gb": limit,
        "instructions": len(simulated.program),
        "capture_seconds": simulated.capture_seconds,
        "planning_seconds": dict(simulated.seconds),
        "iteration_ms": {name: p.iteration_ms for name, p in predicted.items()},
        "lower_bound_ms": {name: p.lower_bound_ms for name, p in predicted.items()},
        "exposed_ms": {name: p.exposed_ms for name, p in predicted.items()},
        "peak_memory_gb": {name: p.peak_memory_gb for name, p in predicted.items()},
        "fits_memory": {name: p.peak_memory_gb <= limit for name, p in predicted.items()},
        "speedup_vs_best_baseline": baseline / predicted[strategy].iteration_ms,
        "chosen": plans[strategy].report.chosen or strategy,
        "impossible": {name: str(error) for name, error in simulated.impossible.items()},
        "strategy": strategy,
        "plan_fingerprint": plans[strategy].fingerprint,
        "planning_options": dict(plans[strategy].report.options),
        "assumptions": [*ASSUMPTIONS, *setting.assumptions],
    }


def _text(simulated: Simulated, strategy: str, limit: float, written: dict[str, str]) -> str:
    plan = simulated.plans[strategy]
    lines = [f"Simulated, nothing was run: {simulated.setting.describe()}", "", plan.explain(), ""]
    if plan.report.predicted.peak_memory_gb > limit:
        lines.append(f"Does not fit: {plan.report.predicted.peak_memory_gb:.1f} GB of {limit:.1f} GB.")
    planned = simulated.seconds[strategy]
    lines.append(f"Captured in {simulated.capture_seconds:.2f} s, planned in {planned:.2f} s.")
    lines += [f"{what} written to {path}" for what, path in written.items()]
    return "\n".join(lines)


def _write_files(simulated: Simulated, strategy: str, arguments: argparse.Namespace) -> dict[str, str]:
    """Write every requested file. -> kind of file -> path."""
    if arguments.save:
        simulated.plans[strategy].save(arguments.save)
    if arguments.trace:
        from lancet_kernels.schedules.time.timeline import save_trace

        with file_errors(arguments.trace):
            events = simulated.timelines[strategy].events
            save_trace(events, arguments.trace, simulated.weight_gradients)
    if arguments.timeline:
        from lancet_kernels.schedules.time.timeline import save_picture

        rows = {name: timeline.events for name, timeline in simulated.timelines.items()}
        # A ValueError: an unknown picture format.
        with file_errors(arguments.timeline, (OSError, ValueError)):
            save_picture(
                rows,
                arguments.timeline,
                weight_gradients=simulated.weight_gradients,
                title=f"Simulated: {simulated.setting.describe()}",
            )
    files = {"plan": arguments.save, "trace": arguments.trace, "timeline": arguments.timeline}
    return {kind: path for kind, path in files.items() if path}
