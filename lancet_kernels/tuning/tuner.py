"""Finds the best configuration of each kernel and shape, and stores it (`kernels.tuning`).

For each task:

    1. list the candidates, the heuristic default first
    2. sort them by the launch model; prune those that are clearly slower, or nearly equal to another one
    3. compile the others for the architecture; prune those that spill or exceed a limit
    4. on a GPU: time them in turn; the median of the slowest rank counts, and rank 0 chooses for all ranks
       without one: use the launch model again, with the registers and shared memory of the compiled kernels

For the winner of fused launches the cost function is measured, too (`tune_cost`), on a GPU only.

Without a GPU nothing is timed, because times of the interpreter mean nothing. Such entries are labelled
"modelled"; a measured one is always preferred. Each winner is saved at once, so a run that was killed
continues where it stopped.
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

from lancet_kernels.errors import CommunicationError
from lancet_kernels.kernels.tuned_entry import MEASURED, MODELLED, Entry, config_fields
from lancet_kernels.kernels.tuning import PACKAGE_TABLE, TunedCache
from lancet_kernels.measuring.timing import Clock
from lancet_kernels.tuning.background_compiler import BackgroundCompiler
from lancet_kernels.tuning.candidates import Candidate, Outcome, rank_candidates
from lancet_kernels.tuning.place import Place
from lancet_kernels.tuning.tune_cost import CostOutcome, cost_of_winner, planned_launches
from lancet_kernels.tuning.tune_ranks import Ranks
from lancet_kernels.tuning.tune_tasks import Task

# The model is accurate enough for factors of two, not for 5 %: a modelled winner replaces the default only if
# its modelled time is smaller by this fraction.
MODELLED_GAIN = 0.25


def tune(
    tasks: Sequence[Task],
    place: Place,
    cache: TunedCache,
    *,
    keep: int = 8,
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
        keep: candidates per task that are compiled. minutes: None for no limit.
        force: also tune tasks that are in the cache. on_progress: called with (tasks done, current task).
        save: whether this rank writes its cache; one rank per machine should.
        clock: measures times on place.device; None: a `Clock`.
    """
    ranks = Ranks()
    deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
    say = on_progress or (lambda done, text: None)
    outcomes = [Outcome(task, task.key(place.name), "left") for task in tasks]
    _mark_known(outcomes, place, cache, force, ranks)
    todo = [outcome for outcome in outcomes if outcome.status != "known"]
    for outcome in todo:
        outcome.candidates = rank_candidates(outcome.task, place.hardware, keep)
        if dry_run:
            outcome.status = "dry-run"
    if dry_run:
        for outcome in _fused(outcomes):
            outcome.cost = CostOutcome("dry-run", planned_launches(outcome.task, outcome.config, ranks.world))
        return outcomes
    clock = None if place.device is None else clock or Clock(place.device)
    # Start no compiler processes if there is nothing to compile.
    workers = workers if todo and ranks.first else 0
    with BackgroundCompiler(todo, place.hardware.arch, workers) as compiler:
        for outcome in todo:
            done = sum(o.status != "left" for o in outcomes)
            say(done, outcome.key)
            if not force:
                # Another process may have tuned it meanwhile.
                _mark_known([outcome], place, cache, force, ranks)
            if outcome.status == "known":
                continue
            judged = compiler.judge(outcome, deadline, partial(say, done))
            if not ranks.from_first(judged):
                break
            _agree_on_facts(outcome, ranks)
            _choose(outcome, place, clock, ranks, rounds)
            if outcome.status == "tuned" and save:
                cache.put([_entry(outcome, place)])
    for outcome in _fused(outcomes):
        say(sum(o.status != "left" for o in outcomes), f"cost of {outcome.key}")
        outcome.cost = cost_of_winner(
            outcome.task, outcome.config, place, cache, ranks, clock,
            rounds=rounds, force=force, in_time=time.monotonic() < deadline, save=save,
        )  # fmt: skip
    say(sum(o.status != "left" for o in outcomes), "")
    return outcomes


def _fused(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The tasks of fused launches that have a configuration whose cost can be measured."""
    return [o for o in outcomes if o.task.kind == "overlap" and o.config is not None]


def _mark_known(outcomes: list[Outcome], place: Place, cache: TunedCache, force: bool, ranks: Ranks) -> None:
    if force:
        return
    shipped = TunedCache(PACKAGE_TABLE).entries() if place.how == MEASURED else {}
    entries = ranks.from_first({**cache.entries(), **shipped})
    for outcome in outcomes:
        entry = entries.get(outcome.key)
        if entry is None:
            continue
        # A modelled entry does not replace a measurement; an entry of another compiler may be outdated.
        enough = entry.how == MEASURED or place.how == MODELLED
        if outcome.key in shipped or (enough and entry.triton == triton.__version__):
            outcome.status, outcome.known = "known", entry


def _agree_on_facts(outcome: Outcome, ranks: Ranks) -> None:
    if ranks.together:
        facts_of_first = ranks.from_first([(c.reason, c.facts) for c in outcome.candidates])
        for candidate, (reason, facts) in zip(outcome.candidates, facts_of_first, strict=True):
            candidate.reason, candidate.facts = reason, facts


def _choose(outcome: Outcome, place: Place, clock: Clock | None, ranks: Ranks, rounds: int) -> None:
    task, kept = outcome.task, outcome.kept
    for candidate in kept:
        candidate.model_ms = task.tunable.model_ms(task, candidate.config, place.hardware, candidate.facts)
    if clock is not None:
        kept = _measure(task, kept, clock, ranks, rounds)
    if not kept:
        outcome.status = "failed"
        return
    cost = (lambda c: c.model_ms) if place.device is None else (lambda c: c.ms)
    # min() takes the first of equals, and the default is first.
    best = min(kept, key=cost)
    default = outcome.default
    needed = MODELLED_GAIN if place.device is None else 0.0
    if default in kept and cost(best) > (1 - needed) * cost(default):
        best = default
    outcome.winner = outcome.candidates[ranks.from_first(outcome.candidates.index(best))]
    outcome.status = "tuned"


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
    cost = (lambda c: c.model_ms) if place.device is None else (lambda c: c.ms)
    # A default that does not run has no time.
    of_default = cost(default) if cost(default) is not None else cost(winner)
    return Entry(
        kind=task.kind,
        shape=task.shape,
        dtype=str(task.dtype).removeprefix("torch."),
        device=place.name,
        config=config_fields(winner.config),
        how=place.how,
        milliseconds=cost(winner),
        default_milliseconds=of_default,
        triton=triton.__version__,
        date=date.today().isoformat(),
    )
