"""The fastest series of stages for a forward graph on many ranks, two microbatches in turns.

HiDup, section 4.2 (figure 4). States are those of `schedules.shard.sharding_states`, stages and costs those
of `schedules.shard.sharding_strategy`.

Stages grow block by block: a label holds the costs of a strategy whose last stage is still open, and may be
closed in front of any block. A tensor made in the open stage cannot be communicated before that is closed.
Of strategies in the same state the dominated ones are dropped (theorem 1). What each can still lose
against the other is bounded: max is 1-Lipschitz, so a strategy also goes when it is ahead in overlap by
less than it is behind in time.

What follows from a set of labels depends on their differences alone, so it is worked out once for each
structure of a segment and set of differences: in a row of equal layers these soon repeat.
"""

from __future__ import annotations

from typing import NamedTuple

from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs.costs import Cost, source_of
from lancet_kernels.graph.program import Program, fingerprint
from lancet_kernels.graph.rules.rules import Form
from lancet_kernels.schedules.shard.sharding_states import (
    Restriction,
    Segment,
    State,
    States,
    StateSpace,
    Transition,
    renamed,
)
from lancet_kernels.schedules.shard.sharding_strategy import (
    BACKWARD,
    COPIES,
    EPSILON,
    Label,
    ShardingStage,
    ShardingStrategy,
    dominates,
)

MOST_OF_A_STATE = 12
PRICES_OF_MEMORY = (0.0, 0.3, 1.0, 3.0)
MOST_BORDERS = 20_000
"""With more, only those along the Program's order are looked at."""
DIGITS = 6
"""Decimals of a millisecond in which labels are compared for being alike."""


class BlockChoice(NamedTuple):
    """One block and how it runs; `new_stage` when it is the first of one."""

    new_stage: bool
    block: int
    transition: Transition


class Passage(NamedTuple):
    """A segment passed as `pattern` passes the segment `like`, of the same structure."""

    pattern: Label
    like: Segment
    segment: Segment


Passed = dict[State, list[tuple[Label, Label]]]
"""Labels at the end of a segment by state (tensors by position), each with the label that entered it."""


class Search:
    """Figure 4, over borders in the order of how many blocks lie behind them.

    Args:
        most_labels: kept behind each border, the fastest so far (None: all, and the result is the optimum).
        memory_bytes: what a device has.
        tolerance: share of the computation by which the result may be slower than the optimum: strategies
            are also dropped that are ahead by less than their part of it.
        overlaps_backward: False counts computation and communication of the backward one after the other,
            as the searcher does that the paper's authors published.
        price: milliseconds that are added for every byte a strategy holds, so that smaller ones win.
    """

    def __init__(
        self,
        space: StateSpace,
        *,
        most_labels: int | None = None,
        memory_bytes: float | None = None,
        tolerance: float = 0.0,
        overlaps_backward: bool = True,
        price: float = 0.0,
    ) -> None:
        self.space, self.blocks = space, space.blocks
        self.most_labels, self.memory_bytes = most_labels, memory_bytes
        self.with_memory = memory_bytes is not None
        self.overlaps_backward, self.price = overlaps_backward, price
        # A strategy is compared at most twice for each block: when it grows, and when it is closed.
        self.tolerance_ms = tolerance * self.computation_ms / (2 * len(self.blocks) or 1)
        # Milliseconds a byte: as if all of a device cost so many times the computation.
        self._prices = [0.0]
        if memory_bytes is not None:
            self._prices = [share * self.computation_ms / memory_bytes for share in PRICES_OF_MEMORY]
        self._labels = 0
        self._patterns: dict[tuple, tuple[Segment, Passed]] = {}

    @property
    def computation_ms(self) -> float:
        """Every block in its fastest signature, both microbatches, forward and backward: no strategy needs
        less."""
        fastest = sum(min(s.ms for s in block.signatures) for block in self.blocks)
        return COPIES * (1 + BACKWARD) * fastest

    def run(self, name: str) -> ShardingStrategy:
        """The best complete strategy. Raises: UserError where none keeps to the memory limit."""
        program = self.space.program
        # Where there are more, only those along the Program's order.
        levels = self.space.borders(MOST_BORDERS) or [[(1 << b) - 1] for b in range(len(self.blocks) + 1)]
        segments = self.space.segments(levels)
        states: States = {(): [Label(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, None, None)]}
        for segment in segments:
            if not states:
                break
            # Memory is a limit on the sum, not on differences.
            if self.with_memory:
                states = self.space.walk(segment, states, self._grow)
            else:
                states = self._pass(segment, states)
        complete = [label for labels in states.values() for label in labels]
        if not complete:
            raise UserError(
                f"sharding of {program.name} on {self.space.ranks} ranks",
                got=f"no strategy within {(self.memory_bytes or 0) / 1e9:.3g} GB a device",
                expected="one that fits",
                do="use more devices, or a smaller batch",
            )
        best = min(complete, key=lambda label: label.psi)
        stages, parameters = self._stages(self._steps(best))
        return ShardingStrategy(
            name,
            program.name,
            fingerprint(program),
            self.space.ranks,
            stages,
            parameters,
            best.psi - self.price * best.bytes,
            best.bytes,
            source_of(self.space.cost),
            self._labels,
            sum(map(len, levels)),
            {t: program.tensors[t].shape for t in parameters},
        )

    def _stages(self, steps: list[BlockChoice]) -> tuple[tuple[ShardingStage, ...], dict[str, Form]]:
        """The stages, and the forms in which parameters rest."""
        by_stage: list[list[BlockChoice]] = []
        for step in steps:
            if step.new_stage or not by_stage:
                by_stage.append([])
            by_stage[-1].append(step)
        stages = []
        for choices in by_stage:
            communication = tuple(c for step in choices for c in step.transition.communication)
            computation: dict[str, tuple[Form, ...]] = {}
            for step in choices:
                names = self.blocks[step.block].instructions
                computation |= zip(names, step.transition.signature.ways, strict=True)
            comm, comm_b = sum(c.ms for c in communication), sum(c.backward_ms for c in communication)
            comp = sum(step.transition.signature.ms for step in choices)
            stages.append(ShardingStage(communication, computation, comm, comm_b, comp))
        return tuple(stages), {t: form for step in steps for t, form in step.transition.rests}

    def _pass(self, segment: Segment, states: States) -> States:
        """The states behind a segment; searched only if the differences are new."""
        # Tensors that cross a segment and are not named in it come last; all states hold the same.
        names = tuple(dict.fromkeys((*segment.tensors, *(item.tensor for item in next(iter(states))))))
        position = {t: p for p, t in enumerate(names)}
        low = min(label.front for labels in states.values() for label in labels)
        # As the segment is entered: times as differences, and as step the label's number.
        entering: list[Label] = []
        relative: States = {}
        for state in sorted(states, key=lambda s: _state_key(renamed(s, position))):
            relative[state] = []
            for label in sorted(states[state], key=lambda label: label[:6]):
                as_entered = label._replace(front=label.front - low, before=None, step=len(entering))
                relative[state].append(as_entered)
                entering.append(label)
        differences = tuple(
            (renamed(state, position), *(tuple(round(ms, DIGITS) for ms in label[:6]) for label in labels))
            for state, labels in relative.items()
        )
        key = segment.structure, differences
        if key not in self._patterns:
            behind = self.space.walk(segment, relative, self._grow)
            pairs = {
                renamed(state, position): [(label, _entry(label)) for label in labels]
                for state, labels in behind.items()
            }
            self._patterns[key] = segment, pairs
        like, passed = self._patterns[key]
        return {
            renamed(state, names): [
                Label(
                    label.front + low,
                    *label[1:6],
                    label.bytes - entry.bytes + entering[entry.step].bytes,
                    entering[entry.step],
                    Passage(label, like, segment),
                )
                for label, entry in pairs
            ]
            for state, pairs in passed.items()
        }

    def _grow(self, done: int, states: States, targets: dict[int, States]) -> None:
        """Figure 4: insert every label behind each block, in the open stage or as the first of a new one."""
        self._prune(states)
        closed = self._closed(states)
        for b, target in targets.items():
            for new_stage, sources in ((False, states), (True, closed)):
                for state, labels in sources.items():
                    for t in self.space.transitions(done, state, b):
                        step = BlockChoice(new_stage, b, t)
                        comm_b, exposed = t.comm_backward_ms, 0.0
                        if not self.overlaps_backward:
                            comm_b, exposed = 0.0, COPIES * comm_b
                        exposed += self.price * t.bytes
                        for label in labels:
                            grown = label.grown(t.comm_ms, comm_b, t.signature.ms, t.bytes, step, exposed)
                            self._insert(target, t.state, grown)

    def _prune(self, states: States) -> None:
        """Keep the `most_labels` fastest of a border, of each state at most `MOST_OF_A_STATE`: otherwise the
        many ways to hide the same messages crowd out other forms. With a memory limit the fastest at several
        prices of memory, and the smallest of each state, so that one that fits is never lost."""
        total = sum(map(len, states.values()))
        if self.most_labels is None or total <= self.most_labels:
            return
        kept: dict[State, dict[int, Label]] = {state: {} for state in states}
        for price in self._prices:
            ranked: dict[State, list[tuple[float, Label]]] = {}
            for state, labels in states.items():
                priced = [(label.psi + price * label.bytes, label) for label in labels]
                ranked[state] = sorted(priced, key=lambda pair: pair[0])[:MOST_OF_A_STATE]
            times = sorted(ms for pairs in ranked.values() for ms, _ in pairs)
            limit = times[min(self.most_labels // len(self._prices), len(times) - 1)]
            for state, pairs in ranked.items():
                kept[state] |= {id(label): label for ms, label in pairs if ms <= limit}
        for state in list(states):
            if self.with_memory:
                smallest = min(states[state], key=lambda label: label.bytes)
                kept[state][id(smallest)] = smallest
            states[state] = list(kept[state].values())
            if not states[state]:
                del states[state]

    def _insert(self, states: States, state: State, label: Label) -> None:
        self._labels += 1
        if self.memory_bytes is not None and label.bytes > self.memory_bytes:
            return
        labels = states.setdefault(state, [])
        tolerance = max(EPSILON, self.tolerance_ms)
        if any(dominates(other, label, self.with_memory, tolerance) for other in labels):
            return
        labels[:] = [other for other in labels if not dominates(label, other, self.with_memory)]
        labels.append(label)

    def _closed(self, states: States) -> States:
        """The same strategies with their last stage closed: the P of figure 4, without dominated ones."""
        closed: States = {}
        for state, labels in states.items():
            # The next stage can communicate all of it.
            old = tuple(item._replace(is_new=False) for item in state)
            for label in labels:
                if label.step is not None:
                    self._insert(closed, old, label.closed())
        return closed

    def _steps(self, label: Label | None) -> list[BlockChoice]:
        """The steps of a strategy up to a label."""
        steps: list[BlockChoice] = []
        while label is not None and label.step is not None and not isinstance(label.step, int):
            if isinstance(label.step, Passage):
                steps += reversed(self._steps_of(label.step))
            else:
                steps.append(label.step)
            label = label.before
        return steps[::-1]

    def _steps_of(self, passage: Passage) -> list[BlockChoice]:
        """The steps through a segment, with its own names. `state` stays that of the pattern: nobody reads
        it."""
        like, segment = passage.like, passage.segment
        name = self.space.name
        own = {name[a]: name[b] for a, b in zip(like.tensors, segment.tensors, strict=True)}
        block = dict(zip(like.blocks, segment.blocks, strict=True))
        return [
            step._replace(
                block=block[step.block],
                transition=step.transition._replace(
                    rests=tuple((own[t], form) for t, form in step.transition.rests),
                    communication=tuple(
                        c._replace(tensor=own[c.tensor]) for c in step.transition.communication
                    ),
                ),
            )
            for step in self._steps(passage.pattern)
        ]


def _entry(label: Label) -> Label:
    """The label that entered the segment."""
    while not isinstance(label.step, int):
        assert label.before is not None
        label = label.before
    return label


def _state_key(state: State) -> list[tuple[int, str, bool]]:
    return [(item.tensor, " ".join(map(str, item.forms)), item.is_new) for item in state]


MOST_LABELS = 200
"""Strategies kept behind each border in a large graph; those of small graphs are all kept."""
TOLERANCE = 0.01
LEAST_SLICED_BYTES = 1 << 16
PRICES = (0.1, 0.3, 0.45, 0.65, 1.0)
"""Prices of memory: such a share of the fastest strategy's time for all that a device may hold."""
SMALL = 8
"""Instructions of a graph that is searched without any of these."""


def search_sharding(
    program: Program,
    ranks: int,
    cost: Cost,
    *,
    memory_gb: float | None = None,
    restriction: Restriction | None = None,
    name: str = "hidup",
    most_labels: int | None = None,
    overlaps_backward: bool = True,
) -> ShardingStrategy:
    """The fastest strategy for the forward Program of a microbatch (section 4.2).

    Args:
        program: the forward of a model for one device, on one microbatch of the batch of all ranks together.
        ranks: how many ranks share every tensor. cost: prices instructions and collectives.
        memory_gb: of a device; strategies that need more are dropped. It is looked at only where the
            fastest strategy of all needs more.
        most_labels: strategies kept behind each border; None: all of a small graph, `MOST_LABELS` of others.
        overlaps_backward: see `Search`.
    Raises: UserError: no strategy within the memory.
    """
    is_small = len(program) <= SMALL
    least_sliced_bytes = 0 if is_small else LEAST_SLICED_BYTES
    space = StateSpace(program, ranks, cost, restriction=restriction, least_sliced_bytes=least_sliced_bytes)

    def searched(memory_bytes: float | None = None, price: float = 0.0) -> ShardingStrategy:
        return Search(
            space,
            memory_bytes=memory_bytes,
            most_labels=most_labels or (None if is_small else MOST_LABELS),
            tolerance=0.0 if is_small else TOLERANCE,
            overlaps_backward=overlaps_backward,
            price=price,
        ).run(name)

    fastest = searched()
    # What was divided by 1e9 may come back a little smaller.
    limit = None if memory_gb is None else memory_gb * 1e9 * (1 + 1e-12)
    if limit is None or fastest.memory_bytes <= limit:
        return fastest
    # Those that fit at some price of memory, beside the search that keeps to the limit on its way.
    candidates = [searched(limit)]
    if not is_small:
        candidates += [searched(price=share * fastest.predicted_ms / limit) for share in PRICES]
    fitting = [candidate for candidate in candidates if candidate.memory_bytes <= limit]
    return min(fitting, key=lambda candidate: candidate.predicted_ms)
