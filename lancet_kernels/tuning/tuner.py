"""Finds the best configuration of each kernel, shape by shape, and remembers it (`kernels.tuning`).

For a task, in this order:

    1. candidates, the heuristic default first
    2. the launch model sorts them; what is clearly slower, or a twin, is pruned before anything is compiled
    3. what is left is compiled for the architecture; what spills or exceeds a limit is pruned untimed
    4. on a GPU: medians of what is left, in turn, the slowest rank counting; rank 0's choice is everyone's
       without one: the launch model again, now with the registers and shared memory that the compiler found

Of a winner for fused launches the cost function is measured besides (`tune_cost`), on a GPU only.

Without a GPU nothing is timed: the interpreter's times say nothing. Such entries are labelled "modelled"; one
that was measured always goes before them. A winner is saved at once: a run that is killed goes on where it
was.
"""

from __future__ import annotations

import json
import math
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from typing import Any

import torch
import triton

from lancet_kernels.errors import CommunicationError
from lancet_kernels.kernels import compile_pool
from lancet_kernels.kernels.compile import SHARED_LIMIT
from lancet_kernels.kernels.launch_model import Facts, Hardware
from lancet_kernels.kernels.specimen import Specimen
from lancet_kernels.kernels.tuned_entry import MEASURED, MODELLED, Entry, config_fields
from lancet_kernels.kernels.tuning import PACKAGE_TABLE, TunedCache
from lancet_kernels.measuring.timing import Clock
from lancet_kernels.tuning.place import Place
from lancet_kernels.tuning.tune_cost import CostOutcome, cost_of_winner, planned_launches
from lancet_kernels.tuning.tune_ranks import Ranks
from lancet_kernels.tuning.tune_tasks import Task

# The model is trusted to tell twice the time from once, not 5 % from 10 %.
PRUNE_ABOVE = 1.5
# So a modelled winner replaces the default only if the model sees this much less time.
MODELLED_GAIN = 0.25


@dataclass
class Candidate:
    """A configuration on its way: what the model says, and why it was pruned, if it was."""

    config: Any
    model_ms: float
    reason: str | None = None
    facts: Facts | None = None
    ms: float | None = None

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"config": config_fields(self.config), "model_ms": self.model_ms}
        if self.facts is not None:
            found |= {"registers": self.facts.registers, "shared_bytes": self.facts.shared_bytes}
        if self.ms is not None:
            found["ms"] = self.ms
        return found | ({"pruned": self.reason} if self.reason else {})


@dataclass
class Outcome:
    """A task's end.

    Attributes:
        status: "tuned", "known" (the cache has it), "left" (time was up), "failed", "dry-run".
        cost: of the winner's fused launches; None for other kinds, and where there is no winner.
    """

    task: Task
    key: str
    status: str
    candidates: list[Candidate] = field(default_factory=list)
    winner: Candidate | None = None
    known: Entry | None = None
    cost: CostOutcome | None = None

    @property
    def kept(self) -> list[Candidate]:
        return [c for c in self.candidates if c.reason is None]

    @property
    def default(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None

    @property
    def config(self) -> Any:
        """The winner's configuration, now or before; in a dry run the default's."""
        if self.known is not None:
            return self.known.configuration()
        found = self.default if self.status == "dry-run" else self.winner
        return None if found is None else found.config


def rank_candidates(task: Task, hardware: Hardware, keep: int) -> list[Candidate]:
    """Every candidate with the model's time, the default first; all but the best `keep` have a reason.

    The default is never pruned here. Of candidates that differ in the group order alone, one is kept; and no
    kind of tile takes more than a few places, since a model that is wrong about it is so about all of them.
    """
    tunable = task.tunable
    found = [
        Candidate(c, tunable.model_ms(task, c, hardware, None)) for c in tunable.candidates(task, hardware)
    ]
    default, best = found[0], min(c.model_ms for c in found)
    seen, places = {_twin(default.config): default}, keep - 1
    families = Counter([_family(default.config)])
    few = max(2, keep // 4)
    usual = getattr(default.config, "group_m", None)
    by_time = sorted(found[1:], key=lambda c: (c.model_ms, getattr(c.config, "group_m", None) != usual))
    for candidate in by_time:
        twin = seen.setdefault(_twin(candidate.config), candidate)
        if candidate.model_ms > PRUNE_ABOVE * best:
            candidate.reason = f"model: {candidate.model_ms / best:.2f} times the best"
        elif twin is not candidate:
            candidate.reason = "model: the same tile with another group order is kept"
        elif families[_family(candidate.config)] >= few:
            candidate.reason = f"model: {few} with the same tile are kept"
        elif places <= 0:
            candidate.reason = f"model: not among the best {keep}"
        else:
            places -= 1
            families[_family(candidate.config)] += 1
    return found


def _twin(config: Any) -> str:
    fields = config_fields(config)
    fields.pop("group_m", None)
    return json.dumps(fields, sort_keys=True)


def _family(config: Any) -> object:
    tile = getattr(config, "gemm", config)
    sides = getattr(tile, "block_m", None), getattr(tile, "block_n", None)
    # Configurations without a tile of a GEMM are each a family.
    return config if sides == (None, None) else (sides, getattr(config, "split", None))


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
    """Tune what the cache does not have. Collective where ranks are together; all must give the same tasks.

    Args:
        keep: candidates per task that are compiled. minutes: None for no limit.
        force: also what the cache has. on_progress: (tasks done, what is going on).
        save: does this rank write its cache? One per machine should.
        clock: what times on place.device; None: a `Clock`.
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
    # Nothing to compile: nothing to start for it.
    workers = workers if todo and ranks.first else 0
    with _Compiler(todo, place.hardware.arch, workers) as compiler:
        for outcome in todo:
            done = sum(o.status != "left" for o in outcomes)
            say(done, outcome.key)
            if not force:
                # Another process may have been here meanwhile.
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
    """Those of fused launches, as far as they have a configuration whose cost can be asked for."""
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
        # A modelled one does not spare the measurement; one of another compiler may not hold.
        enough = entry.how == MEASURED or place.how == MODELLED
        if outcome.key in shipped or (enough and entry.triton == triton.__version__):
            outcome.status, outcome.known = "known", entry


def _agree_on_facts(outcome: Outcome, ranks: Ranks) -> None:
    if ranks.together:
        found = ranks.from_first([(c.reason, c.facts) for c in outcome.candidates])
        for candidate, (reason, facts) in zip(outcome.candidates, found, strict=True):
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
    """The candidates that ran, with the median of the slowest rank; the others get a reason."""
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
    taken = clock.rounds(runs, rounds, warmup=2)
    medians = {number: statistics.median(times) for number, times in taken.items()}
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
    # A default that did not run has no time of its own.
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


class _Compiler:
    """Compiles the specimens of all tasks in their order, in the background, each specimen once."""

    def __init__(self, outcomes: Sequence[Outcome], arch: int, workers: int) -> None:
        self._arch = arch
        self._specimens = {
            id(candidate): outcome.task.tunable.specimens(outcome.task, candidate.config, arch)
            for outcome in outcomes
            for candidate in outcome.kept
        }
        self._chosen: dict[str, Specimen] = {}
        for specimens in self._specimens.values():
            for specimen in specimens:
                self._chosen.setdefault(_identity(specimen), specimen)
        self._rows: dict[str, compile_pool.Row] = {}
        self._changed = threading.Condition()
        self._stopped = False
        self._failure: BaseException | None = None
        # Where nothing is known about an architecture's limits nothing is compiled for it.
        self._works = workers > 0 and arch in SHARED_LIMIT
        self._workers = workers
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> _Compiler:
        if self._works:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True

    def _work(self) -> None:
        chosen = [(None, specimen) for specimen in self._chosen.values()]
        try:
            compile_pool.compile_all(chosen, self._arch, workers=self._workers, on_done=self._done)
        except _Stop:
            pass
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _done(self, row: compile_pool.Row) -> None:
        with self._changed:
            self._rows[_identity(row.specimen)] = row
            self._changed.notify_all()
        if self._stopped:
            raise _Stop

    def judge(self, outcome: Outcome, deadline: float, say: Callable[[str], None]) -> bool:
        """Give the kept candidates their facts, or a reason. -> False if the time is up before that."""
        if not self._works:
            return time.monotonic() < deadline
        kept = outcome.kept
        for number, candidate in enumerate(kept):
            say(f"compiling {number + 1}/{len(kept)} of {outcome.key}")
            rows = [self._row(specimen, deadline) for specimen in self._specimens[id(candidate)]]
            if None in rows:
                return False
            compiled = [row for row in rows if row is not None]
            problems = [problem for row in compiled for problem in row.problems]
            if problems:
                candidate.reason = "compiler: " + "; ".join(dict.fromkeys(problems))
            else:
                kernels = [row.compiled for row in compiled if row.compiled is not None]
                candidate.facts = Facts(
                    max(kernel.registers for kernel in kernels),
                    max(kernel.shared_bytes for kernel in kernels),
                )
        return True

    def _row(self, specimen: Specimen, deadline: float) -> compile_pool.Row | None:
        key = _identity(specimen)
        with self._changed:
            while key not in self._rows:
                if self._failure is not None:
                    raise self._failure
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                # Not for ever: Ctrl-C must get through.
                self._changed.wait(min(left, 1.0))
            return self._rows[key]


class _Stop(Exception):
    """Nobody waits for the rest."""


def _identity(specimen: Specimen) -> str:
    what = (
        specimen.name, specimen.signature, specimen.constexprs, specimen.aligned, specimen.num_warps,
        specimen.num_stages, specimen.nvshmem, specimen.options,
    )  # fmt: skip
    return json.dumps(what, sort_keys=True)
