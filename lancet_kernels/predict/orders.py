"""Orders of a chain of microbatches: what runs beside what.

none, lancet-dw       `schedules.Planner` plans one microbatch; all run in this order, one after the other
microbatches          the best order of a backward with the next microbatch's forward (`order.best_order`)
megatron, megatron-dw baselines: such pairs in Megatron's fixed order, without and with delayed weight
                      gradients (`order.megatron`)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from lancet_kernels.graph.program.program import Instruction, Phase, Program
from lancet_kernels.predict.parts import ModelParts
from lancet_kernels.predict.question import Question
from lancet_kernels.predict.step import ModelStep, chained
from lancet_kernels.schedules import MICROBATCHES
from lancet_kernels.schedules.order.best_order import best_order
from lancet_kernels.schedules.order.megatron import paired_order, with_delayed_weight_gradients
from lancet_kernels.schedules.strategies import Planner, PlanningOptions

PLANNED = ("none", "lancet-dw")
MEGATRON, MEGATRON_DELAYED = "megatron", "megatron-dw"
PAIRED = (MICROBATCHES, MEGATRON, MEGATRON_DELAYED)
_KEPT = "m0.kept"


@dataclass(frozen=True)
class Order:
    """positions: of the step's Program, in order of issue. blocking: names of messages that computation waits
    for."""

    positions: tuple[int, ...]
    blocking: frozenset[str] = frozenset()


class Orders:
    """The orders of a question's chains. Args: parts: as from `step.prepared`."""

    def __init__(self, parts: ModelParts, question: Question) -> None:
        self._parts, self._question = parts, question

    @cached_property
    def _planner(self) -> Planner:
        """Plans one microbatch."""
        program = chained(self._parts, self._question, 1).program
        limit = PlanningOptions(memory_limit_gb=self._question.hardware.memory_gb)
        return Planner(program, self._question.cost, limit)

    @cached_property
    def _pair(self) -> tuple[str, ...]:
        """The best order of the backward of microbatch 0 with the forward of microbatch 1."""
        program = pair_of(chained(self._parts, self._question, 2))
        limit = self._question.hardware.memory_gb * 1e9
        best = best_order(program, self._question.cost, memory_limit_bytes=limit, search=True)
        names = (program.instructions[i].name for i in best.order)
        return tuple(name for name in names if name != _KEPT)

    def of(self, strategy: str, step: ModelStep, ms: Sequence[float]) -> Order:
        """The order of a chain. Args: strategy: of `PLANNED` or `PAIRED`. ms: durations by position."""
        program = step.program
        if strategy in PLANNED:
            plan = self._planner.plan(strategy)
            all_of_them = range(step.microbatches)
            names = (name for m in all_of_them for name in _shifted(plan.order, m))
            blocking = (name for m in all_of_them for name in _shifted(plan.blocking, m))
            return Order(_positions(program, names), frozenset(blocking))
        if strategy == MICROBATCHES:
            return Order(_positions(program, self._in_pairs(step.microbatches)))
        positions = paired_order(program, step.blocks, step.ends)
        if strategy == MEGATRON_DELAYED:
            positions = with_delayed_weight_gradients(program, ms, positions)
        return Order(tuple(positions))

    def _in_pairs(self, microbatches: int) -> Iterator[str]:
        """The first forward and the last backward are as planned alone."""
        program, last = self._planner.program, microbatches - 1
        alone = self._planner.plan("lancet-dw").order
        is_forward = {i.name: i.phase is Phase.FORWARD for i in program.instructions}
        yield from (name for name in alone if is_forward[name])
        for m in range(last):
            yield from _shifted(self._pair, m)
        yield from _shifted((name for name in alone if not is_forward[name]), last)


def pair_of(step: ModelStep) -> Program:
    """The backward of the first of two microbatches with the forward of the second. What the first forward
    kept for the backward is there at the beginning, and is freed as soon as nothing more reads it."""
    program, chosen = step.program, ((0, Phase.BACKWARD), (1, Phase.FORWARD))
    positions = dict.fromkeys(i for b in step.blocks if (b.microbatch, b.phase) in chosen for i in b.alone)
    # Of one phase, so that they can mix.
    pair = [replace(program.instructions[i], phase=Phase.BACKWARD) for i in positions]
    inside = {instruction.name for instruction in pair}
    pair = [i if i.after in inside else replace(i, after="") for i in pair]
    computed = {t for i in pair for t in i.outputs}
    outside = dict.fromkeys(t for i in pair for t in i.inputs if t not in computed)
    kept = tuple(t for t in outside if t in program.producer)
    first = Instruction(_KEPT, "lancet_prediction.kept", (), kept, phase=Phase.BACKWARD)
    results = {t for t in computed if any(i not in positions for i in program.consumers[t])}
    return Program(
        program.name,
        (first, *pair),
        {
            t: spec
            for t, spec in program.tensors.items()
            if t in computed or t in outside or t in program.inputs
        },
        program.inputs,
        tuple(t for t in program.tensors if t in results),
    )


def _shifted(names: Iterable[str], by: int) -> Iterator[str]:
    """The same names so many microbatches later. Example: m0.p3.mm, by 2: m2.p3.mm. What is in none (the
    optimizer) keeps its name."""
    for name in names:
        first, _, rest = name.partition(".")
        yield f"m{int(first[1:]) + by}.{rest}" if first[1:].isdigit() else name


def _positions(program: Program, names: Iterable[str]) -> tuple[int, ...]:
    """Positions of the names that the Program has: only the last microbatch sums gradients, say. What is in
    no microbatch is named for each of them, and runs last."""
    last = dict.fromkeys(reversed([name for name in names if name in program.index]))
    return tuple(program.index[name] for name in reversed(last))
