"""Finds the best configuration of each kernel and shape by timing, and stores it (`kernels.tuning`).

For each task:

    1. list the candidates of its kind of kernel, at most 20, the heuristic default first
    2. compile them in the background; drop those that spill or exceed a limit
    3. time the others in turn; the median of the slowest rank counts, and rank 0 chooses for all ranks

Each winner is saved at once, so a run that was killed continues where it stopped.

Without a GPU nothing can be tuned, because times of the interpreter mean nothing.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial

import torch
import triton

from lancet_kernels.errors import CommunicationError, UserError
from lancet_kernels.kernels.tuned_entry import MEASURED, Entry, config_fields
from lancet_kernels.kernels.tuning import PACKAGE_TABLE, TunedCache
from lancet_kernels.measuring.timing import Clock
from lancet_kernels.tuning.background_compiler import BackgroundCompiler
from lancet_kernels.tuning.candidates import MOST_CANDIDATES, Candidate, Outcome, candidates_of
from lancet_kernels.tuning.place import Place
from lancet_kernels.tuning.tune_ranks import Ranks
from lancet_kernels.tuning.tune_tasks import Task


def check_has_gpu(place: Place) -> None:
    """Raise UserError if there is no GPU to time on."""
    if place.device is None:
        raise UserError(
            "lancet tune",
            got="no GPU",
            expected="a GPU to time kernels on",
            do="`lancet tune --dry-run` lists what would be timed, "
            f"`lancet kernels --arch {place.name}` compiles every kernel",
        )


def tune(
    tasks: Sequence[Task],
    place: Place,
    cache: TunedCache,
    *,
    most: int = MOST_CANDIDATES,
    minutes: float | None = None,
    workers: int = 2,
    force: bool = False,
    dry_run: bool = False,
    on_progress: Callable[[int, str], None] | None = None,
    rounds: int = 15,
    save: bool = True,
    clock: Clock | None = None,
) -> list[Outcome]:
    """Tune all tasks that are not in the cache. Collective; all ranks must pass the same tasks.

    Args:
        most: candidates per task. minutes: None for no limit.
        force: also tune tasks that are in the cache. on_progress: called with (tasks done, current task).
        save: whether this rank writes its cache; one rank per machine should.
        clock: measures times on place.device; None: a `Clock`.

    Raises UserError without a GPU, unless it is a dry run.
    """
    ranks = Ranks()
    deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
    say = on_progress or (lambda done, text: None)
    outcomes = [Outcome(task, task.key(place.name), "left") for task in tasks]
    _mark_cached(outcomes, cache, force, ranks)
    todo = [outcome for outcome in outcomes if outcome.status != "known"]
    for outcome in todo:
        outcome.candidates = candidates_of(outcome.task, place, most)
        if dry_run:
            outcome.status = "dry-run"
    if dry_run:
        return outcomes
    check_has_gpu(place)
    assert place.device is not None
    clock = clock or Clock(place.device)
    # Start no compiler processes if there is nothing to compile.
    workers = workers if todo and ranks.first else 0
    with BackgroundCompiler(todo, place.arch, workers) as compiler:
        for outcome in todo:
            done = sum(o.status != "left" for o in outcomes)
            say(done, outcome.key)
            # Another process may have tuned it meanwhile.
            _mark_cached([outcome], cache, force, ranks)
            if outcome.status == "known":
                continue
            judged = compiler.judge(outcome, deadline, partial(say, done))
            if not ranks.from_first(judged):
                break
            _agree_on_reasons(outcome, ranks)
            _choose(outcome, clock, ranks, rounds)
            if outcome.status == "tuned" and save:
                cache.put([_entry(outcome, place)])
    say(sum(o.status != "left" for o in outcomes), "")
    return outcomes


def _mark_cached(outcomes: list[Outcome], cache: TunedCache, force: bool, ranks: Ranks) -> None:
    if force:
        return
    shipped = TunedCache(PACKAGE_TABLE).entries()
    entries = ranks.from_first({**cache.entries(), **shipped})
    for outcome in outcomes:
        entry = entries.get(outcome.key)
        # An entry of another compiler may be outdated.
        if entry is not None and (outcome.key in shipped or entry.triton == triton.__version__):
            outcome.status, outcome.cached = "known", entry


def _agree_on_reasons(outcome: Outcome, ranks: Ranks) -> None:
    reasons = ranks.from_first([candidate.reason for candidate in outcome.candidates])
    for candidate, reason in zip(outcome.candidates, reasons, strict=True):
        candidate.reason = reason


def _choose(outcome: Outcome, clock: Clock, ranks: Ranks, rounds: int) -> None:
    kept = _measure(outcome.task, outcome.kept, clock, ranks, rounds)
    if not kept:
        outcome.status = "failed"
        return
    # min() takes the first of equals, and the default is first.
    best = outcome.candidates.index(min(kept, key=_ms))
    outcome.winner = outcome.candidates[ranks.from_first(best)]
    outcome.status = "tuned"


def _ms(candidate: Candidate) -> float:
    return math.inf if candidate.ms is None else candidate.ms


def _measure(task: Task, kept: list[Candidate], clock: Clock, ranks: Ranks, rounds: int) -> list[Candidate]:
    """Time the candidates. -> those that ran, with the median of the slowest rank; the others get a
    reason."""
    device = clock.device
    make = task.tunable.runner(task, device)
    runs: dict[int, Callable[[], object]] = {}
    failures = {}
    for number, candidate in enumerate(kept):
        run = make(candidate.config)
        try:
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            runs[number] = run
        except (RuntimeError, triton.runtime.errors.OutOfResources, ValueError) as error:
            if isinstance(error, CommunicationError):
                raise
            failures[number] = f"does not run: {str(error).splitlines()[0]}"
    able = ranks.slowest([0.0 if number in runs else math.inf for number in range(len(kept))])
    runs = {number: run for number, run in runs.items() if able[number] == 0.0}
    times_of = clock.rounds(runs, rounds, warmup=2)
    medians = {number: statistics.median(times) for number, times in times_of.items()}
    slowest = ranks.slowest([medians.get(number, math.inf) for number in range(len(kept))])
    for number, candidate in enumerate(kept):
        if math.isfinite(slowest[number]):
            candidate.ms = slowest[number]
        else:
            candidate.reason = failures.get(number, "does not run on another rank")
    return [candidate for candidate in kept if candidate.reason is None]


def _entry(outcome: Outcome, place: Place) -> Entry:
    task, winner, default = outcome.task, outcome.winner, outcome.default
    assert winner is not None  # "tuned"
    assert winner.ms is not None
    assert default is not None
    return Entry(
        kind=task.kind,
        shape=task.shape,
        dtype=str(task.dtype).removeprefix("torch."),
        device=place.name,
        config=config_fields(winner.config),
        how=MEASURED,
        milliseconds=winner.ms,
        # A default that does not run has no time.
        default_milliseconds=winner.ms if default.ms is None else default.ms,
        triton=triton.__version__,
        date=date.today().isoformat(),
    )
