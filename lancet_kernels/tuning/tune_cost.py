"""Time of fused launches by bytes, tile work, and programs that put: points for `kernels.fused_cost`.

The configuration that won at a shape is timed with T, T/2 and T/4 tokens, all in turn, round after round:

    fused        forward; backward; backward with a filler (a weight gradient [D, D] of another layer); each
                 for several numbers of programs that put
    puts alone   with as many programs, and with the whole grid
    GEMMs alone  with the remaining programs, and with the whole grid

A fused point is a whole pass, including the kernels before and after its launch; puts and GEMMs are single
launches. Times are medians, of the slowest rank. On a CPU (the interpreter) the points only prove that this
code runs; they are labelled so, and `kernels.measured_cost` never uses them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any

import torch
import triton

from lancet_kernels import symmetric
from lancet_kernels.errors import CommunicationError
from lancet_kernels.fused_pass import TIMEOUT_S, FusedPasses
from lancet_kernels.kernels.cost_entry import INTERPRETER, CostEntry, LayerKind
from lancet_kernels.kernels.fused_cost import DIRECTIONS, CostPoint, LaunchWork
from lancet_kernels.kernels.held_back import held_back
from lancet_kernels.kernels.measured_cost import MeasuredCost
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
COMM_SHARES = (16, 8, 4)  # one of this many programs puts
WARMUP = 2

Launch = tuple[str, LaunchWork]
"""A direction, and the work of a launch."""
TimeIt = Callable[[Callable[[], object]], float]


@dataclass
class CostOutcome:
    """The result of measuring the cost function of a shape.

    Attributes:
        status: "measured", "known" (it was in the cache), "left" (not done in time), "failed", "dry-run", or
        "no
            GPU" (nothing is timed). launches: the number of different launches. text: the quality of the fit,
            or the reason for the failure.
    """

    status: str
    launches: int
    text: str = ""
    entry: CostEntry | None = field(default=None, repr=False)


@dataclass(frozen=True)
class CostSize:
    """The launches to time at one number of tokens.

    Attributes: rows: that this rank puts. ranks: how many there are.
    """

    workload: Workload
    itemsize: int
    config: OverlapConfig
    rows: int
    ranks: int

    def launches(self) -> list[Launch]:
        """Each once."""
        launches = [
            (direction, self.fused(direction, mix)) for mix in self.mixes() for direction in DIRECTIONS
        ]
        launches += [("backward", self.fused("backward", mix, riding=True)) for mix in self.mixes()]
        for putting, computing in self.grids():
            for direction in DIRECTIONS:
                launches += [(direction, self.puts(putting)), (direction, self.gemms(direction, computing))]
        return list(dict.fromkeys(launches))

    def mixes(self) -> list[OverlapConfig]:
        """The configuration with several numbers of programs that put."""
        programs = self.config.programs
        counts = {self.config.comm_programs, *(max(1, programs // share) for share in COMM_SHARES)}
        return [replace(self.config, comm_programs=count) for count in sorted(counts)]

    def grids(self) -> list[tuple[int, int]]:
        """(programs that put alone, programs that compute alone)."""
        programs = self.config.programs
        shares = [(mix.comm_programs, max(1, programs - mix.comm_programs)) for mix in self.mixes()]
        return list(dict.fromkeys([*shares, (programs, programs)]))

    def fused(self, direction: str, config: OverlapConfig, riding: bool = False) -> LaunchWork:
        w = self.workload
        rider = 2.0 * w.tokens * w.width**2 if riding else 0.0
        return LaunchWork.of_pass(
            direction, self.rows, w.width, w.hidden, w.activation, self.itemsize, self.ranks,
            independent_flops=rider, programs=config.programs, comm_programs=config.comm_programs,
        )  # fmt: skip

    def puts(self, programs: int) -> LaunchWork:
        return LaunchWork(
            float(self.rows * self.workload.width * self.itemsize), 0.0, 0.0, programs, programs
        )

    def gemms(self, direction: str, programs: int) -> LaunchWork:
        flops = self.fused(direction, self.config).expert_flops
        return LaunchWork(0.0, flops, 0.0, programs, min(programs, self.config.comm_programs))


def sizes_of(workload: Workload) -> list[Workload]:
    """The workload with the numbers of tokens that are timed, the most first."""
    tokens = dict.fromkeys(max(1, workload.tokens // share) for share in TOKEN_SHARES)
    return [replace(workload, tokens=count) for count in tokens]


def planned_launches(task: Task, config: OverlapConfig, ranks: int) -> int:
    """The number of different launches that would be timed."""
    sizes = [
        CostSize(w, task.dtype.itemsize, config, w.tokens * w.choices, ranks) for w in sizes_of(task.workload)
    ]
    return sum(len(size.launches()) for size in sizes)


def cost_of_winner(
    task: Task,
    config: OverlapConfig,
    place: Place,
    cache: TunedCache,
    ranks: Ranks,
    clock: Clock | None,
    *,
    rounds: int,
    force: bool,
    in_time: bool,
    save: bool,
) -> CostOutcome:
    """Measure the cost of fused launches with this configuration, unless the cache has it. Collective.

    Args: clock: None without a device to measure on. in_time: False: the next run shall do it.
    """
    launches = planned_launches(task, config, ranks.world)
    if clock is None:
        return CostOutcome("no GPU", launches)
    kind = _kind_of(task, ranks.world)
    cached = ranks.from_first(None if force else cache.costs().get(kind.key(_device(place, clock))))
    if cached is not None and (cached.config, cached.triton) == (config_fields(config), triton.__version__):
        return CostOutcome("known", len(cached.points), _how_good(cached), cached)
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
        cache.put([], [entry])
    return CostOutcome("measured", len(points), _how_good(entry), entry)


def _kind_of(task: Task, ranks: int) -> LayerKind:
    w = task.workload
    return LayerKind(w.width, w.hidden, w.activation, str(task.dtype).removeprefix("torch."), ranks)


def _device(place: Place, clock: Clock) -> str:
    """The device that the times belong to: never a GPU if they were measured on a CPU."""
    return place.name if clock.device.type == "cuda" else INTERPRETER


def _how_good(entry: CostEntry) -> str:
    try:
        return str(MeasuredCost(entry.fit(), entry))
    except ValueError as error:
        return f"no function fits: {error}"


def measure_points(
    workload: Workload, dtype: torch.dtype, config: OverlapConfig, clock: Clock, ranks: Ranks, rounds: int
) -> list[CostPoint]:
    """Time all launches of a workload. Collective. Raises: CommunicationError if a rank does not take
    part."""

    def time_it(work: Callable[[], object]) -> float:
        ranks.meet(clock.device)
        return clock.once(work)

    with symmetric.create(None, clock.device, TIMEOUT_S) as memory:
        timed = []
        for size in sizes_of(workload):
            passes = FusedPasses(size, dtype, clock.device, memory, f"{size.tokens} tokens, ")
            rows = int(passes.routing.count.sum())
            timed.append((passes, CostSize(size, dtype.itemsize, config, rows, ranks.world)))
        times_of: dict[Launch, list[float]] = {}
        for number in range(WARMUP + rounds):
            for passes, cost_size in timed:
                for launch, ms in _one_round(passes, cost_size, time_it):
                    if number >= WARMUP:
                        times_of.setdefault(launch, []).append(ms)
        if clock.device.type == "cuda":
            torch.cuda.synchronize(clock.device)
        for passes, _ in timed:
            for exchange in passes.exchanges(config):
                exchange.check()
    # Ranks put different numbers of rows; the points have those of rank 0.
    launches = ranks.from_first(list(times_of))
    medians = ranks.slowest([statistics.median(times) for times in times_of.values()])
    return [CostPoint(direction, work, ms) for (direction, work), ms in zip(launches, medians, strict=True)]


def _one_round(passes: FusedPasses, size: CostSize, time_it: TimeIt) -> Iterator[tuple[Launch, float]]:
    gradient = passes.x.new_empty(passes.workload.width, passes.workload.width)
    for config in size.mixes():
        yield from _fused(passes, size, config, [], time_it)
        yield from _fused(passes, size, config, [DenseGemm("tn", passes.x, passes.dy, gradient)], time_it)
    for putting, computing in size.grids():
        yield from _apart(passes, size, putting, computing, time_it)


def _fused(
    passes: FusedPasses, size: CostSize, config: OverlapConfig, riders: list[DenseGemm], time_it: TimeIt
) -> Iterator[tuple[Launch, float]]:
    """A whole pass."""
    begun: list[Any] = []
    ms = time_it(lambda: begun.append(passes.begin(config)))
    yield ("forward", size.fused("forward", config)), ms
    ms = time_it(lambda: passes.backward(config, begun[0][1], riders))
    yield ("backward", size.fused("backward", config, riding=bool(riders))), ms


def _apart(
    passes: FusedPasses, size: CostSize, putting: int, computing: int, time_it: TimeIt
) -> Iterator[tuple[Launch, float]]:
    """A pass whose puts and GEMMs are separate launches, with grids of these sizes."""
    with held_back() as launches:
        _, saved = passes.begin(size.config)
    yield from _stages("forward", launches, size, putting, computing, time_it)
    # This releases banks before the launches that read them. It is safe, because no rank puts into them
    # before the next pass, and ranks meet with idle devices before that.
    with held_back() as launches:
        passes.backward(size.config, saved)
    yield from _stages("backward", launches, size, putting, computing, time_it)


def _stages(
    direction: str, launches: list, size: CostSize, putting: int, computing: int, time_it: TimeIt
) -> Iterator[tuple[Launch, float]]:
    def launch(stages: str, programs: int | None = None) -> None:
        for held in launches:
            held(stages, programs)

    yield (direction, size.puts(putting)), time_it(lambda: launch("put", putting))
    gemms = "in out wgrad"
    yield (direction, size.gemms(direction, computing)), time_it(lambda: launch(gemms, computing))
    launch("reduce dweight")
