"""Finds the best configuration of a layer's fused launches by timing, and stores it (`kernels.config`).

Every candidate is compiled, on all ranks at once, and timed in turn with the others; the median of the
slowest rank counts, and rank 0 chooses for all ranks. Each winner is saved at once, so a run that was killed
continues where it stopped. Tuning needs a GPU: times of the interpreter mean nothing.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import partial
from typing import Any

import torch
import triton

from lancet_kernels.errors import CommunicationError
from lancet_kernels.kernels.config import (
    Entry,
    GemmConfig,
    OverlapConfig,
    Shape,
    TunedCache,
    device_name,
    key_of,
)
from lancet_kernels.kernels.overlap import warming_up
from lancet_kernels.measure.fused_pass import FusedPasses, Workload
from lancet_kernels.ops.comm.groups import from_first_rank, group_name, over_ranks
from lancet_kernels.timing import Clock

# config -> a run of forward and backward, compiled on all ranks.
Runs = Callable[[OverlapConfig], Callable[[], object]]

# Tiles of the plain kernel, by bytes of an element: (block_m, block_n, block_k, warps, stages).
_TILES = {
    2: (
        (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 128, 64, 4, 4),
        (128, 64, 64, 8, 4),
        (64, 128, 64, 4, 4),
        (64, 64, 32, 8, 4),
    ),
    4: ((64, 64, 16, 8, 3), (64, 32, 16, 4, 3), (128, 32, 16, 8, 2), (64, 32, 32, 8, 2)),
}
# How long a rank may compile a configuration after the others.
COMPILING_S = 600.0
# Multiprocessors of the A100, the H100 and the B200, by architecture.
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}


@dataclass(frozen=True)
class Place:
    """The GPU of this machine (`device`), or an architecture for a dry run (device None).

    Attributes: name: of the device in the cache's keys. arch: 90 for sm_90. sms: multiprocessors.
    """

    device: torch.device | None
    name: str
    arch: int
    sms: int

    @staticmethod
    def here(device: torch.device) -> Place:
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        return Place(device, *device_name(device), sms)

    @staticmethod
    def elsewhere(arch: int) -> Place:
        return Place(None, f"sm_{arch}", arch, MULTIPROCESSORS[arch])


@dataclass(frozen=True)
class Task:
    """The fused launches of a layer."""

    workload: Workload
    dtype: torch.dtype

    @property
    def shape(self) -> Shape:
        w = self.workload
        return w.width, w.hidden, w.activation, 1

    def key(self, device: str) -> str:
        return key_of(self.shape, str(self.dtype).removeprefix("torch."), device)


def candidates(task: Task, place: Place) -> list[OverlapConfig]:
    """The default first, then changes of one property of each kernel at a time: put step, tile.

    All combinations would be several hundred configurations, which take too long to compile.
    """
    w = task.workload
    sizes = w.width, w.hidden, task.dtype, place.arch, place.sms
    default, plain = OverlapConfig.for_gpu(*sizes), OverlapConfig.for_gpu(*sizes, portable=True)
    listed = [default]
    if default.bodies == "gluon":
        listed += [replace(default, put_block=2048), replace(default, put_rows=8, put_block=512)]
        listed.append(replace(default, gemm=replace(default.gemm, num_stages=3)))
    accumulators = 2 if w.activation == "swiglu" else 1
    tiles = [GemmConfig(*tile) for tile in _TILES[task.dtype.itemsize]]
    changes: list[dict[str, Any]] = [{}, {"put_rows": 4, "put_block": 1024}]
    changes += [{"gemm": tile} for tile in tiles if tile.is_valid(task.dtype, place.arch, accumulators)]
    return list(dict.fromkeys([*listed, *(replace(plain, **change) for change in changes)]))


@dataclass
class Candidate:
    """A configuration. ms: its median time. dropped: the reason if it has none."""

    config: OverlapConfig
    ms: float | None = None
    dropped: str | None = None

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass
class Outcome:
    """The result of a task. candidates: the default first.

    status: "tuned", "known" (it was in the cache), "left" (not done in time), "failed", "dry-run".
    """

    task: Task
    key: str
    status: str
    candidates: list[Candidate] = field(default_factory=list)
    winner: Candidate | None = None
    cached: Entry | None = None


def tune(
    tasks: Sequence[Task],
    place: Place,
    cache: TunedCache,
    *,
    most: int | None = None,
    minutes: float | None = None,
    force: bool = False,
    dry_run: bool = False,
    on_progress: Callable[[int, str], None] | None = None,
    rounds: int = 15,
    save: bool = True,
    clock: Clock | None = None,
    runs_of: Callable[[Task, torch.device], Runs] | None = None,
) -> list[Outcome]:
    """Tune all tasks that are not in the cache. Collective; all ranks must pass the same tasks.

    Args:
        most: candidates per task; None: all. minutes: start no task after that; None for no limit.
        force: also tune tasks that are in the cache. on_progress: called with (tasks done, current task).
        save: whether this rank writes its cache; one rank per machine should.
        clock: measures times on place.device; None: a `Clock`. runs_of: None: passes of `FusedPasses`.

    Without a GPU only dry_run=True works.
    """
    deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
    progress = on_progress or (lambda done, text: None)
    status = "dry-run" if dry_run else "left"
    outcomes = [
        Outcome(task, task.key(place.name), status, [Candidate(c) for c in candidates(task, place)[:most]])
        for task in tasks
    ]
    for number, outcome in enumerate(outcomes):
        progress(number, outcome.key)
        # Inside the loop, because another process may have tuned it meanwhile.
        entry = None if force else _from_first(cache.entries()).get(outcome.key)
        # An entry of another compiler may be outdated.
        if entry is not None and entry.triton == triton.__version__:
            outcome.status, outcome.cached = "known", entry
        elif not dry_run and _from_first(time.monotonic() < deadline):
            assert place.device is not None
            clock = clock or Clock(place.device)
            _choose(outcome, clock, rounds, (runs_of or _passes)(outcome.task, place.device))
            if outcome.status == "tuned" and save:
                cache.put([_entry(outcome, place)])
    progress(sum(o.status != "left" for o in outcomes), "")
    return outcomes


def _passes(task: Task, device: torch.device) -> Runs:
    passes = FusedPasses(task.workload, task.dtype, device)

    def run_of(config: OverlapConfig) -> Callable[[], object]:
        run = partial(passes.forward_backward, config)
        with warming_up():
            run()
        passes.memory.barrier(COMPILING_S)
        return run

    return run_of


def _choose(outcome: Outcome, clock: Clock, rounds: int, runs_of: Runs) -> None:
    """Time the candidates: those that run get the median of the slowest rank, the others a reason."""
    runs: dict[int, Callable[[], object]] = {}
    for number, candidate in enumerate(outcome.candidates):
        try:
            run = runs_of(candidate.config)
            run()
            if clock.device.type == "cuda":
                torch.cuda.synchronize(clock.device)
            runs[number] = run
        except CommunicationError:
            raise
        except (RuntimeError, triton.runtime.errors.OutOfResources, ValueError) as error:
            candidate.dropped = f"does not run: {str(error).splitlines()[0]}"
    numbers = range(len(outcome.candidates))
    able = _slowest([0.0 if number in runs else math.inf for number in numbers])
    runs = {number: run for number, run in runs.items() if able[number] == 0.0}
    times_of = clock.rounds(runs, rounds, warmup=2)
    medians = {number: statistics.median(times) for number, times in times_of.items()}
    slowest = _slowest([medians.get(number, math.inf) for number in numbers])
    for candidate, ms in zip(outcome.candidates, slowest, strict=True):
        if math.isfinite(ms):
            candidate.ms = ms
        else:
            candidate.dropped = candidate.dropped or "does not run on another rank"
    # Among equals the first wins, and the default is first.
    best = min(numbers, key=slowest.__getitem__)
    outcome.status = "failed"
    if math.isfinite(slowest[best]):
        outcome.status, outcome.winner = "tuned", outcome.candidates[_from_first(best)]


def _entry(outcome: Outcome, place: Place) -> Entry:
    task, winner, default = outcome.task, outcome.winner, outcome.candidates[0]
    assert winner is not None  # "tuned"
    assert winner.ms is not None
    return Entry(
        shape=task.shape,
        dtype=str(task.dtype).removeprefix("torch."),
        device=place.name,
        config=winner.config,
        milliseconds=winner.ms,
        # A default that does not run has no time.
        default_milliseconds=winner.ms if default.ms is None else default.ms,
        triton=triton.__version__,
        date=date.today().isoformat(),
    )


def _from_first(value: Any) -> Any:
    """Rank 0's value, on every rank."""
    return from_first_rank(value, group_name(None), "what rank 0 decided")


def _slowest(times: list[float]) -> list[float]:
    """The largest of each over the ranks; infinity where one rank could not run it."""
    return over_ranks(torch.tensor(times, dtype=torch.float64), group_name(None), "max").tolist()
