"""Measures fused launches by rows and riders, for the planner (`graph.cost_entry`).

The winning configuration of a shape is timed with T, T/2 and T/4 tokens, in turns: forward, backward, and
backward with one and with four riders. A rider is a weight gradient [D, D] over T tokens of another layer;
the projections of an attention layer are four. That makes twelve launches per shape.

Each point is the median time of a whole pass, with everything before and after its launch; of several ranks
the slowest. Points from a CPU (the interpreter) are labelled as such, and the planner never uses them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from typing import Any

import torch
import triton

from lancet_kernels import symmetric
from lancet_kernels.errors import CommunicationError
from lancet_kernels.fused_pass import TIMEOUT_S, FusedPasses
from lancet_kernels.graph.cost_entry import INTERPRETER, CostEntry, CostPoint, LayerKind
from lancet_kernels.graph.measured_launches import MeasuredLaunches
from lancet_kernels.kernels.overlap_config import OverlapConfig
from lancet_kernels.kernels.overlap_data import DenseGemm
from lancet_kernels.kernels.tuned_entry import MEASURED, config_fields
from lancet_kernels.kernels.tuning import TunedCache
from lancet_kernels.measuring.timing import Clock
from lancet_kernels.tuning.place import Place
from lancet_kernels.tuning.tune_ranks import Ranks
from lancet_kernels.tuning.tune_tasks import Task
from lancet_kernels.tuning.workloads import Workload

TOKEN_SHARES = (1, 2, 4)  # the workload's tokens over these
RIDERS = (0, 1, 4)
WARMUP = 2

Launch = tuple[str, int, int]
"""Direction, number of tokens, riders."""


@dataclass
class CostOutcome:
    """The result of measuring the launches of a shape.

    Attributes:
        status: "measured", "known" (it was in the cache), "left" (not done in time), "failed", "dry-run".
        launches: the number of different launches. text: a summary, or the reason for the failure.
    """

    status: str
    launches: int
    text: str = ""
    entry: CostEntry | None = field(default=None, repr=False)


def sizes_of(workload: Workload) -> list[Workload]:
    """The workload with each number of tokens to time, the largest first."""
    tokens = dict.fromkeys(max(1, workload.tokens // share) for share in TOKEN_SHARES)
    return [replace(workload, tokens=count) for count in tokens]


def launches_of(workload: Workload) -> list[Launch]:
    """All launches to time."""
    launches: list[Launch] = []
    for size in sizes_of(workload):
        launches += [("forward", size.tokens, 0), *(("backward", size.tokens, riders) for riders in RIDERS)]
    return launches


def cost_of_winner(
    task: Task,
    config: OverlapConfig,
    place: Place,
    cache: TunedCache,
    ranks: Ranks,
    clock: Clock,
    *,
    rounds: int,
    force: bool,
    in_time: bool,
    save: bool,
) -> CostOutcome:
    """Measure fused launches with this configuration, unless they are in the cache. Collective.

    Args: in_time: False: the next run shall do it.
    """
    launches, stored = len(launches_of(task.workload)), MeasuredLaunches(cache.path)
    kind = _kind_of(task, ranks.world)
    cached = ranks.from_first(None if force else stored.entries().get(kind.key(_device(place, clock))))
    if cached is not None and (cached.config, cached.triton) == (config_fields(config), triton.__version__):
        return CostOutcome("known", len(cached.points), _summary(cached), cached)
    if not ranks.from_first(in_time):
        return CostOutcome("left", launches)
    try:
        points = measure_points(task.workload, task.dtype, config, clock, ranks, rounds)
    except CommunicationError:
        raise
    except (RuntimeError, ValueError, triton.runtime.errors.OutOfResources) as error:
        return CostOutcome("failed", launches, f"does not run: {str(error).splitlines()[0]}")
    how = MEASURED if clock.device.type == "cuda" else INTERPRETER
    entry = CostEntry(
        kind, _device(place, clock), how, config_fields(config), str(task.workload), tuple(points),
        triton.__version__, date.today().isoformat(),
    )  # fmt: skip
    if save:
        stored.put([entry])
    return CostOutcome("measured", len(points), _summary(entry), entry)


def _kind_of(task: Task, ranks: int) -> LayerKind:
    w = task.workload
    return LayerKind(w.width, w.hidden, w.activation, str(task.dtype).removeprefix("torch."), ranks)


def _device(place: Place, clock: Clock) -> str:
    """The device that the times belong to: never a GPU if they were measured on a CPU."""
    return place.name if clock.device.type == "cuda" else INTERPRETER


def _summary(entry: CostEntry) -> str:
    try:
        entry.check_enough()
    except ValueError as error:
        return f"too few measurements to plan with: {error}"
    return str(entry)


def measure_points(
    workload: Workload, dtype: torch.dtype, config: OverlapConfig, clock: Clock, ranks: Ranks, rounds: int
) -> list[CostPoint]:
    """Time all launches of a workload. Collective. Raises: CommunicationError if a rank does not take
    part."""

    def time_it(work: Callable[[], Any]) -> tuple[float, Any]:
        result: list[Any] = []
        ranks.meet(clock.device)
        return clock.once(lambda: result.append(work())), result[0]

    launches = launches_of(workload)
    times_of: dict[Launch, list[float]] = {launch: [] for launch in launches}
    with symmetric.create(None, clock.device, TIMEOUT_S) as memory:
        passes = {
            size.tokens: FusedPasses(size, dtype, clock.device, memory, f"{size.tokens} tokens, ")
            for size in sizes_of(workload)
        }
        riders = _riders(passes[workload.tokens])
        for number in range(WARMUP + rounds):
            for tokens in passes:
                for launch, ms in _one_round(passes[tokens], config, riders, time_it):
                    if number >= WARMUP:
                        times_of[launch].append(ms)
        if clock.device.type == "cuda":
            torch.cuda.synchronize(clock.device)
        for timed in passes.values():
            for exchange in timed.exchanges(config):
                exchange.check()
    # Ranks put different numbers of rows; the points have those of rank 0.
    rows = ranks.from_first({tokens: int(passes[tokens].routing.count.sum()) for tokens in passes})
    medians = ranks.slowest([statistics.median(times_of[launch]) for launch in launches])
    rider_flops = 2.0 * workload.tokens * workload.width**2
    return [
        CostPoint(direction, rows[tokens], count * rider_flops, ms)
        for (direction, tokens, count), ms in zip(launches, medians, strict=True)
    ]


def _riders(passes: FusedPasses) -> list[DenseGemm]:
    width = passes.workload.width
    return [
        DenseGemm("tn", passes.x, passes.dy, passes.x.new_empty(width, width)) for _ in range(max(RIDERS))
    ]


def _one_round(
    passes: FusedPasses,
    config: OverlapConfig,
    riders: list[DenseGemm],
    time_it: Callable[[Callable[[], Any]], tuple[float, Any]],
) -> Iterator[tuple[Launch, float]]:
    tokens = passes.workload.tokens
    for count in RIDERS:
        ms, (_, saved) = time_it(partial(passes.begin, config))
        yield ("forward", tokens, 0), ms
        ms, _ = time_it(partial(passes.backward, config, saved, riders[:count]))
        yield ("backward", tokens, count), ms
