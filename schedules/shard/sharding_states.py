"""States and transitions of a search of shardings: borders in the graph, forms held across them, one more
block.

HiDup, section 4.1. A *border* has blocks that ran behind it; a state is the tensors that cross it, each with
the forms in which there are copies of it. A transition runs one more block in one of its signatures: it says
what has to be communicated for that, how the block's parameters rest, and which state is behind it.

Where a border is the only one behind its blocks, the graph falls apart into segments, one after
another. Segments of repeated layers have the same structure: all but the names is alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from lancet_kernels.graph.costs.costs import Cost
from lancet_kernels.graph.program import Instruction, Program, TensorSpec
from lancet_kernels.graph.rules.rules import WHOLE, Form
from lancet_kernels.schedules.shard.blocks import (
    ADJOINT,
    MESSAGE_KINDS,
    Block,
    BlockSignature,
    blocks_of,
    collective,
    forms_of,
    held_bytes,
    saved_outputs,
)
from lancet_kernels.schedules.shard.sharding_strategy import COPIES, STATE_COPIES, Communication, Label


class Held(NamedTuple):
    """A tensor that crosses a border: the forms there are of it, and whether the open stage made it."""

    tensor: int
    forms: tuple[Form, ...]
    is_new: bool


State = tuple[Held, ...]
"""Sorted by tensor."""
States = dict[State, list[Label]]
Grow = Callable[[int, States, dict[int, States]], None]
"""(blocks behind a border, states there, for each block that may come next the states behind it): adds to
these what follows from the former."""


def renamed(state: State, names: Mapping[int, int] | Sequence[int]) -> State:
    """The state with other numbers of its tensors."""
    return tuple(sorted(item._replace(tensor=names[item.tensor]) for item in state))


@dataclass(frozen=True)
class Restriction:
    """A smaller space, for baselines: what may rest how, and which collectives may be used.

    parameter: (name, form at rest) -> allowed? collectives: of activations. signature: may a block run so?
    """

    parameter: Callable[[str, Form], bool] = lambda name, form: True
    collectives: frozenset[str] = frozenset(ADJOINT)
    signature: Callable[[Block, BlockSignature], bool] = lambda block, signature: True


class ParameterOption(NamedTuple):
    """Forms of a block's parameters at rest, communication for them, and bytes of copies for it."""

    rests: tuple[tuple[str, Form], ...]
    communication: tuple[Communication, ...]
    bytes: float


class Transition(NamedTuple):
    """A block in one of its signatures. communication: of activations first, then of parameters. bytes: held
    in addition."""

    state: State
    signature: BlockSignature
    rests: tuple[tuple[str, Form], ...]
    communication: tuple[Communication, ...]
    comm_ms: float
    comm_backward_ms: float
    bytes: float


@dataclass(frozen=True)
class Segment:
    """Blocks between two borders, each the only one behind its blocks.

    borders: by how many blocks are behind them, as bit masks; the first and the last are one each.
    tensors: all that its blocks name, in the order in which they do. structure: equal for segments that
    differ in names alone.
    """

    borders: list[list[int]]
    blocks: tuple[int, ...]
    tensors: tuple[int, ...]
    structure: int


class StateSpace:
    """All strategies of a Program on `ranks` ranks (`Restriction`: some of them).

    Args: least_sliced_bytes: parameters that are smaller rest whole, unless they are read in slices.
    """

    def __init__(
        self,
        program: Program,
        ranks: int,
        cost: Cost,
        *,
        restriction: Restriction | None = None,
        least_sliced_bytes: int = 0,
    ) -> None:
        self.program, self.ranks, self.restriction = program, ranks, restriction or Restriction()
        self.cost = cost
        self.blocks = blocks_of(program, ranks, cost)
        self.least_sliced_bytes = least_sliced_bytes
        self.name = dict(enumerate(dict.fromkeys(t for block in self.blocks for t in block.tensors)))
        self.number = {t: n for n, t in self.name.items()}
        self._home = {t: b for b, block in enumerate(self.blocks) for t in block.makes}
        self._readers: dict[str, int] = {}
        for b, block in enumerate(self.blocks):
            for t in (*block.reads, *block.parameters):
                self._readers[t] = self._readers.get(t, 0) | 1 << b
        self.before = [
            sum(1 << self._home[t] for t in set(block.reads) if t in self._home) for block in self.blocks
        ]
        self._trained = self._with_gradients()
        self._saved = {t for i in program.instructions for t in saved_outputs(i)}
        self.options, self._communication = cache(self._options), cache(self._conversion)
        self._structures: dict[tuple, int] = {}

    def borders(self, most: int) -> list[list[int]] | None:
        """All borders, by how many blocks are behind them (breadth-first, section 4.2); None where there are
        more than `most`."""
        levels, total = [[0]], 1
        for _ in self.blocks:
            level = {
                done | 1 << b
                for done in levels[-1]
                for b, before in enumerate(self.before)
                if not done >> b & 1 and not before & ~done
            }
            total += len(level)
            if total > most:
                return None
            levels.append(sorted(level))
        return levels

    def segments(self, levels: list[list[int]]) -> list[Segment]:
        """The graph between borders that are the only ones of their level."""
        single = [n for n, level in enumerate(levels) if len(level) == 1]
        return [self._segment(levels[begin : end + 1]) for begin, end in pairwise(single)]

    def _segment(self, borders: list[list[int]]) -> Segment:
        inside = borders[-1][0] & ~borders[0][0]
        blocks = tuple(b for b in range(len(self.blocks)) if inside >> b & 1)
        tensors = tuple(dict.fromkeys(self.number[t] for b in blocks for t in self.blocks[b].tensors))
        key = self._structure(blocks, tensors)
        return Segment(borders, blocks, tensors, self._structures.setdefault(key, len(self._structures)))

    def _structure(self, blocks: tuple[int, ...], tensors: tuple[int, ...]) -> tuple:
        position = {n: p for p, n in enumerate(tensors)}
        inside = sum(1 << b for b in blocks)
        block_keys, tensor_keys = [], []
        for b in blocks:
            block = self.blocks[b]
            ends = block.reads, block.parameters, block.makes
            block_keys.append(
                (
                    # Blocks of the same structure share their signatures.
                    id(block.signatures),
                    *(tuple(position[self.number[t]] for t in end) for end in ends),
                    tuple(n for n, other in enumerate(blocks) if self.before[b] >> other & 1),
                    tuple(self._allowed(b, s) for s in range(len(block.signatures))),
                )
            )
        for n in tensors:
            t = self.name[n]
            spec, readers = self.program.tensors[t], self._readers.get(t, 0)
            prices = tuple(self._ms(name, spec) for name in sorted(self.restriction.collectives))
            kinds = t in self._trained, t in self._saved, bool(readers & ~inside)
            tensor_keys.append((spec.shape, spec.dtype, *kinds, prices))
        return tuple(block_keys), tuple(tensor_keys)

    def _allowed(self, b: int, s: int) -> tuple | None:
        """A signature without the choices that restrictions or costs exclude."""
        if not self.restriction.signature(self.blocks[b], self.blocks[b].signatures[s]):
            return None
        return tuple(
            (tuple(form for _, form in o.rests), tuple((c.ms, c.backward_ms) for c in o.communication))
            for o in self.options(b, s)
        )

    def walk(self, segment: Segment, states: States, grow: Grow) -> States:
        """The states behind a segment, from border to border."""
        frontier = {segment.borders[0][0]: states}
        for level in segment.borders[1:]:
            following: dict[int, States] = {}
            allowed = set(level)
            for done, current in frontier.items():
                after = {
                    b: done | 1 << b
                    for b in segment.blocks
                    if not done >> b & 1 and not self.before[b] & ~done
                }
                targets = {b: following.setdefault(n, {}) for b, n in after.items() if n in allowed}
                grow(done, current, targets)
            frontier = following
        return frontier.get(segment.borders[-1][0], {})

    def transitions(self, done: int, state: State, b: int) -> Iterator[Transition]:
        """Every way to run block b behind a border."""
        after = done | 1 << b
        held = {item.tensor: item for item in state}
        block = self.blocks[b]
        for s, signature in enumerate(block.signatures):
            if not self.restriction.signature(block, signature):
                continue
            for option in self.options(b, s):
                transition = self._transition(after, held, b, signature, option)
                if transition is not None:
                    yield transition

    def _transition(
        self,
        after: int,
        held: dict[int, Held],
        b: int,
        signature: BlockSignature,
        option: ParameterOption,
    ) -> Transition | None:
        block = self.blocks[b]
        following = dict(held)
        communication: list[Communication] = []
        more_bytes = COPIES * signature.bytes + option.bytes
        for t, wanted in zip(block.reads, signature.reads, strict=True):
            item = following.get(self.number[t])
            if item is None:  # of the batch: whole, and a slice costs nothing
                if wanted not in forms_of(self.program.tensors[t], self.ranks):
                    return None
                continue
            if wanted in item.forms or (wanted.is_cut and WHOLE in item.forms):
                continue
            if item.is_new:
                return None
            ways = (self._communication(t, form, wanted) for form in item.forms)
            best = min(filter(None, ways), key=lambda c: c.ms + c.backward_ms, default=None)
            if best is None:
                return None
            communication.append(best)
            if t in self._saved:
                more_bytes += COPIES * held_bytes(self.program.tensors[t], wanted, self.ranks)
            forms = (WHOLE,) if wanted == WHOLE else tuple(sorted({*item.forms, wanted}, key=str))
            following[item.tensor] = item._replace(forms=forms)
        for t, form in option.rests:
            n = self.number[t]
            rest = following.get(n)
            if rest is not None and rest.forms != (form,):
                return None
            if rest is None:
                more_bytes += STATE_COPIES * held_bytes(self.program.tensors[t], form, self.ranks)
            following[n] = Held(n, (form,), False)
        for t, form in zip(block.makes, signature.makes, strict=True):
            following[self.number[t]] = Held(self.number[t], (form,), True)
        alive = (item for n, item in following.items() if self._readers.get(self.name[n], 0) & ~after)
        # The gradient of a weight with several readers is summed once.
        communication += [
            c for c in option.communication if c.source != c.target or self.number[c.tensor] not in held
        ]
        return Transition(
            tuple(sorted(alive)),
            signature,
            option.rests,
            tuple(communication),
            sum(c.ms for c in communication),
            sum(c.backward_ms for c in communication),
            more_bytes,
        )

    def _ms(self, name: str, spec: TensorSpec) -> float:
        """The time of one collective on a tensor. Args: spec: of the whole tensor; the cost of an all-to-all
        depends on the bytes of a rank's slice, that of all others on the bytes of the whole."""
        if self.ranks == 1:
            return 0.0
        size = spec.content_bytes / (self.ranks if name == "all_to_all" else 1)
        message = Instruction(
            f"{name} of {spec.name}",
            f"sharding.{name}",
            kind=MESSAGE_KINDS[name],
            bytes=size,
            attributes={"collective": name},
        )
        return self.cost(message, {})

    def _conversion(self, tensor: str, source: Form, target: Form) -> Communication | None:
        name, spec = collective(source, target), self.program.tensors[tensor]
        if name is None or name not in self.restriction.collectives:
            return None
        backward = self._ms(ADJOINT[name], spec) if tensor in self._trained else 0.0
        return Communication(tensor, source, target, name, self._ms(name, spec), backward)

    def _options(self, b: int, s: int) -> list[ParameterOption]:
        """How the parameters that a block reads whole in its signature s may rest: all whole (all-reduce of
        the gradient), or as many as possible in slices (all-gather; reduce-scatter of the gradient). That is
        done once for both microbatches: half of it counts for each. Backward reads what was gathered, so it
        is kept."""
        block, signature = self.blocks[b], self.blocks[b].signatures[s]
        choices: list[ParameterOption] = []
        for sliced_at_rest in (False, True):
            rests: list[tuple[str, Form]] = []
            communication: list[Communication] = []
            copies = 0.0
            for t, rest in zip(block.parameters, signature.parameters, strict=True):
                spec = self.program.tensors[t]
                slices = forms_of(spec, self.ranks)[1:]
                is_large = spec.content_bytes >= self.least_sliced_bytes
                if rest == WHOLE and sliced_at_rest and slices and is_large:
                    rest = slices[0]
                    copies += spec.content_bytes
                    gather, scatter = (
                        self._ms(name, spec) / COPIES for name in ("all_gather", "reduce_scatter")
                    )
                    backward = scatter if t in self._trained else 0.0
                    communication.append(Communication(t, rest, WHOLE, "all_gather", gather, backward))
                elif rest == WHOLE and t in self._trained and self.ranks > 1:
                    total = self._ms("all_reduce", spec) / COPIES
                    communication.append(Communication(t, WHOLE, WHOLE, "all_reduce", 0.0, total))
                rests.append((t, rest))
            choices.append(ParameterOption(tuple(rests), tuple(communication), copies))
        allowed = self.restriction.parameter
        return [o for o in dict.fromkeys(choices) if all(allowed(t, form) for t, form in o.rests)]

    def _with_gradients(self) -> set[str]:
        """Float parameters, and everything that depends on one and is float."""
        tensors = self.program.tensors
        trained = {t for t in self.program.parameters if "float" in tensors[t].dtype}
        for i in self.program.instructions:
            if not trained.isdisjoint(i.inputs):
                trained |= {t for t in i.outputs if "float" in tensors[t].dtype}
        return trained
