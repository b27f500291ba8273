"""The step twice, on halves of its batch: computation of one copy beside communication of the other.

HiDup, section 3. A Duplex is a `PartitionRange` over the whole Program, forward and backward. The inputs are
cut along the batch; which form each other tensor has then follows from the rule table, from the first
instruction to the last. What copies add up (weight gradients, sums of losses) is added once, in front of what
reads it. Gates are told how many slots the copy before took, so routing and drops are the whole batch's.

What no rule can cut runs once, on whole operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lancet_kernels.errors import UserError
from lancet_kernels.graph.forms import CARRIED, PARTIAL, WHOLE, Form, cut, sliced
from lancet_kernels.graph.from_fx import GENERATOR
from lancet_kernels.graph.program import Instruction, Kind, Phase, Program
from lancet_kernels.graph.rules import Rule, rule_for
from lancet_kernels.schedules.ranges import PartitionRange

COPIES = 2
"""As many as the paper has."""
STRATEGY = "strategy duplex"


def duplex(program: Program, copies: int = COPIES) -> PartitionRange:
    """The Program of a training step as `copies` of it, each on a part of the batch. Parts of a batch that
    `copies` does not divide differ by one.

    Raises: UserError where that cannot be: no all-to-all, a batch that is too small, a gate that needs the
    whole batch, random numbers that depend on the cut, an all-to-all that no rule can cut.
    """
    if not program.positions(Kind.ALL_TO_ALL):
        raise _refuse("a step without all-to-alls", "communication to hide", "use strategy none")
    return copies_of_batch(program, copies)


def copies_of_batch(program: Program, copies: int = COPIES) -> PartitionRange:
    """The same of any Program, whatever it communicates. Raises: as `duplex`."""
    found = _best([_Forms(program, inputs) for inputs in _batch_inputs(program)])
    if found.run_whole and len(found.inputs) > 1:
        # An input that only happens to be as long as the batch (positions, say) is better left whole.
        fewer = ([t for t in found.inputs if t != left_out] for left_out in found.inputs)
        found = _best([found, *(_Forms(program, inputs) for inputs in fewer)])
    if found.refused:
        raise found.refused[0]
    if not found.cut:
        raise _refuse("a step in which nothing can be cut along the batch", "ops with rules", "use one copy")
    batch = program.tensors[found.inputs[0]].shape[0]
    if batch < copies:
        raise _refuse(f"a batch of {batch}", f"at least {copies}", "use strategy lancet, or a larger batch")
    first, last = (program.instructions[found.cut[n]].name for n in (0, -1))
    return PartitionRange(first, last, copies, found.forms)


def _batch_inputs(program: Program) -> list[list[str]]:
    """Inputs that may have the batch in front, those of each length together: no parameters, no tangents, no
    states of the random generator and the optimizer."""
    found: dict[int, list[str]] = {}
    for t in program.inputs:
        readers = (program.instructions[i].phase for i in program.consumers[t])
        is_state = t in program.parameter_set or t == GENERATOR or set(readers) == {Phase.OPTIMIZER}
        if program.tensors[t].shape and not is_state and not t.startswith("tangents"):
            found.setdefault(program.tensors[t].shape[0], []).append(t)
    if not found:
        raise _refuse("a step without inputs", "a batch to cut", "give the batch as an input of the module")
    return list(found.values())


def _best(tries: list[_Forms]) -> _Forms:
    """The one that puts together least, and of these the one that cuts most."""
    return max(tries, key=lambda forms: (not forms.refused, -len(forms.run_whole), len(forms.cut)))


@dataclass
class _Forms:
    """The form of every tensor, by the rules, when these inputs are cut along their first dimension.

    cut: positions that run in parts. run_whole: positions that no rule can cut, though they read parts.
    refused: why there is no duplex.
    """

    program: Program
    inputs: Sequence[str]
    forms: dict[str, Form] = field(init=False)
    cut: list[int] = field(init=False, default_factory=list)
    run_whole: list[int] = field(init=False, default_factory=list)
    refused: list[UserError] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        program = self.program
        self._batch = program.tensors[self.inputs[0]].shape[0] if self.inputs else 1
        self._read_whole: set[str] = set()
        self._read: set[str] = set()
        self.forms = {t: cut(0) for t in self.inputs}
        for i, instruction in enumerate(program.instructions):
            # A gate that looks at no activation (random) decides in parts all the same.
            if any(map(self._in_parts, instruction.inputs)) or _is_gate(instruction):
                self._visit(i, instruction)
        uncut = set(program.positions(Kind.ALL_TO_ALL)) - set(self.cut)
        if uncut and not self.refused:
            self._refuse_all_to_all(program.instructions[min(uncut)])
        # What no part reads is not cut.
        outside = [t for t in self.forms if t not in program.producer and t not in self._read]
        for t in outside:
            del self.forms[t]

    def _in_parts(self, tensor: str) -> bool:
        form = self.forms.get(tensor, WHOLE)
        return form.is_made_in_parts and form != PARTIAL

    def _visit(self, i: int, instruction: Instruction) -> None:
        rule = rule_for(instruction)
        way = self._best_way(instruction, rule) if rule else None
        if way is None:
            self._run_whole(i, instruction)
            return
        self.cut.append(i)
        for t, form in zip(instruction.inputs, way, strict=False):
            if form.is_cut and not self._in_parts(t):
                is_made = t in self.program.producer
                self.forms[t] = sliced(form.dimension or 0) if is_made else form
            elif form == WHOLE:
                self._read_whole.add(t)
            self._read.add(t)
        for t, form in zip(instruction.outputs, way[len(instruction.inputs) :], strict=True):
            self.forms[t] = form

    def _best_way(self, instruction: Instruction, rule: Rule) -> tuple[Form, ...] | None:
        """Of the ways to cut the instruction that fit its operands, the one that slices fewest whole ones."""
        tensors = self.program.tensors
        ways = rule.assignments(instruction, tensors, only_experts=False, contractions=True)
        fitting = [way for way in ways if self._fits(instruction, way)]
        return min(
            fitting,
            key=lambda way: sum(
                form.is_cut and not self._in_parts(t)
                for t, form in zip(instruction.inputs, way, strict=False)
            ),
            default=None,
        )

    def _fits(self, instruction: Instruction, way: tuple[Form, ...]) -> bool:
        operands = (*instruction.inputs, *instruction.outputs)
        shapes = (self.program.tensors[t].shape for t in operands)
        lines_up = all(
            form.dimension is None or shape[form.dimension] % self._batch == 0
            for shape, form in zip(shapes, way, strict=True)
        )
        return lines_up and all(map(self._accepts, instruction.inputs, way))

    def _accepts(self, tensor: str, wanted: Form) -> bool:
        """Can a part have a tensor in the form that a rule wants?"""
        form = self.forms.get(tensor, WHOLE)
        if tensor in self.program.parameter_set or form == PARTIAL:
            return wanted == WHOLE
        if form == CARRIED and wanted == WHOLE:
            return self._is_any_part(tensor)
        if form.is_made_in_parts and tensor in self.program.producer:
            return wanted == form
        if tensor in self.inputs:
            return wanted == form
        if form.is_cut:  # whole, and sliced for a reader before
            return wanted == form.of_reader
        return wanted == WHOLE or (wanted.is_cut and tensor not in self._read_whole)

    def _is_any_part(self, tensor: str) -> bool:
        """Does it mean nothing beyond its part (a seed that nobody uses), rather than being handed on?"""
        rule = rule_for(self.program.instructions[self.program.producer[tensor]])
        return rule is not None and not rule.carries

    def _run_whole(self, i: int, instruction: Instruction) -> None:
        self.run_whole.append(i)
        if instruction.attributes.get("partitionable") is False:
            spec = instruction.attributes.get("spec")
            got = f"{instruction.name}, gate {spec!r}, which needs the whole batch"
            self.refused.append(
                _refuse(
                    got, "gates that decide from part of a batch", "use strategy lancet: it cuts behind gates"
                )
            )
        elif GENERATOR in instruction.mutates:
            self.refused.append(
                _refuse(
                    f"{instruction.name} ({instruction.op}), whose random numbers depend on the cut",
                    "random numbers keyed by token",
                    "use lancet_kernels.Dropout, or strategy lancet",
                )
            )
        elif instruction.op.startswith("lancet.fused_experts"):
            got = f"{instruction.name}, a fused launch on the whole batch"
            self.refused.append(_refuse(got, "MoE layers on streams", "use backend='torch' for it"))
        elif instruction.kind is Kind.ALL_TO_ALL:
            self._refuse_all_to_all(instruction)

    def _refuse_all_to_all(self, instruction: Instruction) -> None:
        got = f"{instruction.name} ({instruction.op}), which cannot be cut along the batch"
        self.refused.append(_refuse(got, "the all-to-alls of an MoELayer", "use strategy lancet-dw"))


def _is_gate(instruction: Instruction) -> bool:
    rule = rule_for(instruction)
    return rule is not None and bool(rule.carries)


def _refuse(got: str, expected: str, do: str) -> UserError:
    return UserError(STRATEGY, got=got, expected=expected, do=do)
