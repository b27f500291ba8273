"""Which series of stages runs a forward graph on many ranks fastest, two microbatches in turns?

HiDup, section 4.2 (figure 4). A state is a cut of the graph with the forms in which the tensors that cross it
are held. A stage is a communication step, then a computation step; while one copy of the model computes, the
other communicates; costs are those of `schedules.sharding_costs`.

Stages grow block by block: a label holds the costs of a strategy whose last stage is still open, and may be
closed in front of any block. A tensor made in the open stage cannot be communicated before that is closed.
Of strategies in the same state the dominated ones are dropped (theorem 1). What each can still lose
against the other is bounded: max is 1-Lipschitz, so a strategy also goes when it is ahead in overlap by
less than it is behind in time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs import Cost
from lancet_kernels.graph.forms import WHOLE, Form
from lancet_kernels.graph.program import Program
from lancet_kernels.schedules.blocks import Block, BlockSignature, blocks_of
from lancet_kernels.schedules.conversions import CollectiveCosts, collective, forms_of, held_bytes
from lancet_kernels.schedules.sharding_costs import (
    BACKWARD,
    COPIES,
    EPSILON,
    STATE_COPIES,
    Conversion,
    Label,
    Step,
    dominates,
)

MOST_OF_A_STATE = 6


class Held(NamedTuple):
    """A tensor that crosses a cut: the forms there are of it, and whether the open stage made it."""

    tensor: int
    forms: tuple[Form, ...]
    is_new: bool


State = tuple[Held, ...]
"""Sorted by tensor."""


@dataclass(frozen=True)
class Restriction:
    """A smaller space, for baselines: what may rest how, and which collectives may be used.

    parameter: (name, form at rest) -> allowed? collectives: of activations. signature: may a block run so?
    """

    parameter: Callable[[str, Form], bool] = lambda name, form: True
    collectives: frozenset[str] = frozenset(("all_gather", "all_to_all", "all_reduce", "reduce_scatter"))
    signature: Callable[[Block, BlockSignature], bool] = lambda block, signature: True


@dataclass
class Searched:
    """The best label, and how the search went.

    is_exact: nothing but strategies dominated (within the tolerance) was dropped. bound_ms: no strategy is
    faster. labels: strategies looked at. cuts: of the graph.
    kept: the labels of every closed state, by the blocks behind its cut (only if asked for).
    """

    best: Label
    blocks: list[Block]
    is_exact: bool
    bound_ms: float
    labels: int
    cuts: int
    kept: dict[tuple[int, State], list[Label]] = field(default_factory=dict)


class Search:
    """Figure 4, over cuts in the order of how many blocks lie behind them.

    Args:
        program: the forward of one microbatch, for one device.
        most_labels: kept behind each cut, the fastest so far (None: all, and the result is the optimum).
        most_cuts: with more, only those along the Program's order are looked at.
        memory_bytes: what a device has.
        tolerance: share of the computation by which the result may be slower than the optimum: strategies
            are also dropped that are ahead by less than their part of it.
        least_sliced_bytes: parameters that are smaller rest whole, unless they are read in slices.
    """

    def __init__(
        self,
        program: Program,
        ranks: int,
        cost: Cost,
        *,
        restriction: Restriction | None = None,
        grouped: bool = True,
        most_labels: int | None = None,
        most_cuts: int = 20_000,
        memory_bytes: float | None = None,
        keep_states: bool = False,
        tolerance: float = 0.0,
        least_sliced_bytes: int = 0,
    ) -> None:
        self.program, self.ranks, self.restriction = program, ranks, restriction or Restriction()
        self.costs = CollectiveCosts(cost, ranks)
        self.blocks = blocks_of(program, ranks, cost, grouped=grouped)
        self.most_labels, self.most_cuts, self.keep_states = most_labels, most_cuts, keep_states
        self.memory_bytes = memory_bytes
        self.with_memory = memory_bytes is not None
        self.least_sliced_bytes = least_sliced_bytes
        # A strategy is compared at most twice for each block: when it grows, and when it is closed.
        self.tolerance_ms = tolerance * self.computation_ms / (2 * len(self.blocks) or 1)
        self._number: dict[str, int] = {}
        for block in self.blocks:
            for t in (*block.reads, *block.parameters, *block.makes):
                self._number.setdefault(t, len(self._number))
        self._name = {n: t for t, n in self._number.items()}
        self._home = {t: b for b, block in enumerate(self.blocks) for t in block.makes}
        self._readers: dict[str, int] = {}
        for b, block in enumerate(self.blocks):
            for t in (*block.reads, *block.parameters):
                self._readers[t] = self._readers.get(t, 0) | 1 << b
        self._before = [
            sum(1 << self._home[t] for t in set(block.reads) if t in self._home) for block in self.blocks
        ]
        self._trained = self._with_gradients()
        self._options: dict[tuple[int, int], list[_Option]] = {}
        self._converted: dict[tuple[str, Form, Form], tuple[float, float] | None] = {}
        self._labels = 0

    @property
    def computation_ms(self) -> float:
        """Every block in its fastest signature, both microbatches, forward and backward: no strategy needs
        less."""
        fastest = sum(min(s.ms for s in block.signatures) for block in self.blocks)
        return COPIES * (1 + BACKWARD) * fastest

    def run(self) -> Searched:
        """The best complete strategy. Raises: UserError where none keeps to the memory limit."""
        if not self.blocks:
            raise UserError(
                "program for a search of shardings", got="no instruction", expected="a model", do="give one"
            )
        levels = self._cuts()
        is_exact = levels is not None
        if levels is None:
            done = 0
            levels = [[0]]
            for b in range(len(self.blocks)):
                done |= 1 << b
                levels.append([done])
        allowed = {cut for level in levels for cut in level}
        first = Label(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, None, None)
        frontier: dict[int, dict[State, list[Label]]] = {0: {(): [first]}}
        kept: dict[tuple[int, State], list[Label]] = {}
        for _ in self.blocks:
            following: dict[int, dict[State, list[Label]]] = {}
            for done, states in frontier.items():
                is_exact &= not self._prune(states)
                closed = self._closed(states)
                if self.keep_states:
                    kept |= {(done, state): labels for state, labels in closed.items()}
                for b in range(len(self.blocks)):
                    after = done | 1 << b
                    if done >> b & 1 or self._before[b] & ~done or after not in allowed:
                        continue
                    target = following.setdefault(after, {})
                    for new_stage, of in ((False, states), (True, closed)):
                        for state, labels in of.items():
                            for new_state, label in self._grow(after, state, labels, b, new_stage):
                                self._insert(target, new_state, label)
            frontier = following
        complete = [label for states in frontier.values() for labels in states.values() for label in labels]
        if not complete:
            raise UserError(
                f"sharding of {self.program.name} on {self.ranks} ranks",
                got=f"no strategy within {(self.memory_bytes or 0) / 1e9:.3g} GB a device",
                expected="memory for the smallest one",
                do="use more devices, or a smaller batch",
            )
        best = min(complete, key=lambda label: label.psi)
        bound = max(self.computation_ms, best.psi - 2 * len(self.blocks) * self.tolerance_ms)
        if not is_exact:
            bound = self.computation_ms
        return Searched(best, self.blocks, is_exact, bound, self._labels, sum(map(len, levels)), kept)

    def _cuts(self) -> list[list[int]] | None:
        """All cuts, by how many blocks are done (breadth-first, section 4.2); None: too many."""
        levels, total = [[0]], 1
        for _ in self.blocks:
            level = {
                done | 1 << b
                for done in levels[-1]
                for b, before in enumerate(self._before)
                if not done >> b & 1 and not before & ~done
            }
            total += len(level)
            if total > self.most_cuts:
                return None
            levels.append(sorted(level))
        return levels

    def _prune(self, states: dict[State, list[Label]]) -> bool:
        """Keep the `most_labels` fastest of a cut, of each state at most `MOST_OF_A_STATE`: otherwise the
        many ways to hide the same messages crowd out other forms. -> was any dropped?"""
        count = sum(map(len, states.values()))
        if self.most_labels is None or count <= self.most_labels:
            return False
        for state, labels in states.items():
            states[state] = sorted(labels, key=lambda label: label.psi)[:MOST_OF_A_STATE]
        ranked = sorted(label.psi for labels in states.values() for label in labels)
        limit = ranked[min(self.most_labels, len(ranked)) - 1]
        for state in list(states):
            states[state] = [label for label in states[state] if label.psi <= limit]
            if not states[state]:
                del states[state]
        return True

    def _insert(self, states: dict[State, list[Label]], state: State, label: Label) -> None:
        self._labels += 1
        if self.memory_bytes is not None and label.bytes > self.memory_bytes:
            return
        labels = states.setdefault(state, [])
        tolerance = max(EPSILON, self.tolerance_ms)
        if any(dominates(other, label, self.with_memory, tolerance) for other in labels):
            return
        labels[:] = [other for other in labels if not dominates(label, other, self.with_memory)]
        labels.append(label)

    def _closed(self, states: dict[State, list[Label]]) -> dict[State, list[Label]]:
        """The same strategies with their last stage closed: the P of figure 4, without dominated ones."""
        closed: dict[State, list[Label]] = {}
        for state, labels in states.items():
            old = tuple(item._replace(is_new=False) for item in state)
            for label in labels:
                if label.step is not None:
                    self._insert(closed, old, label.closed())
        return closed

    def _grow(
        self, after: int, state: State, labels: list[Label], b: int, new_stage: bool
    ) -> Iterator[tuple[State, Label]]:
        """Every label behind block b, in the open stage or as the first block of a new one."""
        held = {item.tensor: item for item in state}
        for s, signature in enumerate(self.blocks[b].signatures):
            if not self.restriction.signature(self.blocks[b], signature):
                continue
            for option in self._options_of(b, s):
                grown = self._state_behind(after, held, b, signature, option)
                if grown is None:
                    continue
                new_state, conversions, more_bytes = grown
                conversions += option.conversions
                comm = sum(c.ms for c in conversions)
                comm_b = sum(c.backward_ms for c in conversions)
                step = Step(new_stage, b, signature, option.rests, conversions)
                for label in labels:
                    yield new_state, label.grown(comm, comm_b, signature.ms, more_bytes, step)

    def _state_behind(
        self,
        after: int,
        held: dict[int, Held],
        b: int,
        signature: BlockSignature,
        option: _Option,
    ) -> tuple[State, tuple[Conversion, ...], float] | None:
        """The state behind a block, what is communicated for it, and the bytes that come in addition."""
        block = self.blocks[b]
        following = dict(held)
        conversions: list[Conversion] = []
        more_bytes = COPIES * signature.bytes
        for t, wanted in zip(block.reads, signature.reads, strict=True):
            item = following.get(self._number[t])
            if item is None:  # of the batch: whole, and a slice costs nothing
                if wanted not in forms_of(self.program.tensors[t], self.ranks):
                    return None
                continue
            if wanted in item.forms or (wanted.is_cut and WHOLE in item.forms):
                continue
            if item.is_new:
                return None
            best = self._cheapest(t, item.forms, wanted)
            if best is None:
                return None
            conversions.append(best)
            more_bytes += COPIES * held_bytes(self.program.tensors[t], wanted, self.ranks)
            forms = (WHOLE,) if wanted == WHOLE else tuple(sorted({*item.forms, wanted}, key=str))
            following[item.tensor] = item._replace(forms=forms)
        for t, form in option.rests:
            n = self._number[t]
            rest = following.get(n)
            if rest is not None and rest.forms != (form,):
                return None
            if rest is None:
                more_bytes += STATE_COPIES * held_bytes(self.program.tensors[t], form, self.ranks)
            following[n] = Held(n, (form,), False)
        for t, form in zip(block.makes, signature.makes, strict=True):
            following[self._number[t]] = Held(self._number[t], (form,), True)
        alive = (item for n, item in following.items() if self._readers.get(self._name[n], 0) & ~after)
        return tuple(sorted(alive)), tuple(conversions), more_bytes

    def _cheapest(self, tensor: str, forms: tuple[Form, ...], wanted: Form) -> Conversion | None:
        found: list[Conversion] = []
        for source in forms:
            key = tensor, source, wanted
            if key not in self._converted:
                name = collective(source, wanted)
                allowed = name in self.restriction.collectives
                spec = self.program.tensors[tensor]
                self._converted[key] = self.costs.both_ways(source, wanted, spec) if allowed else None
            times = self._converted[key]
            if times is not None:
                backward = times[1] if tensor in self._trained else 0.0
                found.append(Conversion(tensor, source, wanted, times[0], backward))
        return min(found, key=lambda c: c.ms + c.backward_ms, default=None)

    def _options_of(self, b: int, s: int) -> list[_Option]:
        if (b, s) not in self._options:
            block, signature = self.blocks[b], self.blocks[b].signatures[s]
            self._options[b, s] = [
                option
                for option in self._parameter_options(block, signature)
                if all(self.restriction.parameter(t, form) for t, form in option.rests)
            ]
        return self._options[b, s]

    def _parameter_options(self, block: Block, signature: BlockSignature) -> list[_Option]:
        """How a block's parameters may rest. Those it reads whole rest all whole (their gradients are summed
        by an all-reduce), or as many as possible in slices (all-gather; reduce-scatter of the gradient). That
        is done once for both microbatches: half of it counts for each."""
        choices: list[_Option] = []
        for sliced_at_rest in (False, True):
            rests: list[tuple[str, Form]] = []
            conversions: list[Conversion] = []
            for t, form in zip(block.parameters, signature.parameters, strict=True):
                spec = self.program.tensors[t]
                rest = form
                slices = forms_of(spec, self.ranks)[1:]
                is_large = spec.content_bytes >= self.least_sliced_bytes
                if form == WHOLE and sliced_at_rest and slices and is_large:
                    rest = slices[0]
                    gather = self.costs.milliseconds("all_gather", spec) / COPIES
                    scatter = self.costs.milliseconds("reduce_scatter", spec) / COPIES
                    conversions.append(
                        Conversion(t, rest, WHOLE, gather, scatter if t in self._trained else 0.0)
                    )
                elif form == WHOLE and t in self._trained and self.ranks > 1:
                    total = self.costs.milliseconds("all_reduce", spec) / COPIES
                    conversions.append(Conversion(t, WHOLE, WHOLE, 0.0, total))
                rests.append((t, rest))
            choices.append(_Option(tuple(rests), tuple(conversions)))
        return list(dict.fromkeys(choices))

    def _with_gradients(self) -> set[str]:
        """Float parameters, and everything that depends on one and is float."""
        tensors = self.program.tensors
        trained = {t for t in self.program.parameters if "float" in tensors[t].dtype}
        for i in self.program.instructions:
            if not trained.isdisjoint(i.inputs):
                trained |= {t for t in i.outputs if "float" in tensors[t].dtype}
        return trained


class _Option(NamedTuple):
    """How a block's parameters rest, and what is communicated for them."""

    rests: tuple[tuple[str, Form], ...]
    conversions: tuple[Conversion, ...]
