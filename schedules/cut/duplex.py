"""Two copies of a step, one of which computes while the other communicates: on halves of the batch (duplex),
or the backward of one microbatch and the forward of the next (pairs).

HiDup, section 3. A duplex is a `PartitionRange` over the whole Program, forward and backward. The inputs are
cut along the batch; the rule table then gives the form of every other tensor, from the first instruction to
the last. Partial results (weight gradients, sums of losses) are added once, before their first reader.
Capacity passing (`used` of the gate) goes from copy to copy, so routing and drops are those of the whole
batch.

Instructions that no rule can cut run once, on whole operands. A fused launch of an MoE layer becomes one
launch for each copy, forward and backward.

Of a pair, neither reads what the other computes, so each hides the communication of the other, and no matrix
is cut in two.

    microbatches 1 .. M       forward 1 | backward 1 with forward 2 | ... | backward M

Megatron's 1F1B overlap and DualPipe hand-write the same. Routing is that of M separate calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.captured_graph import module_of, state_name
from lancet_kernels.graph.from_fx import GENERATOR, program_from_fx
from lancet_kernels.graph.meta import GRADIENTS_OF, IN_BACKWARD, UNIT
from lancet_kernels.graph.ops import is_gate, rule_for
from lancet_kernels.graph.program import Instruction, Kind, Phase, Program
from lancet_kernels.graph.rules.rules import CARRIED, PARTIAL, WHOLE, Form, Rule, cut_along, sliced
from lancet_kernels.schedules.cut.ranges import PartitionRange

COPIES = 2
"""The number of copies in the paper."""
STRATEGY = "strategy duplex"


def duplex(program: Program, copies: int = COPIES) -> PartitionRange:
    """A training step as `copies` copies, each on a part of the batch. If `copies` does not divide the batch,
    the sizes of the parts differ by one.

    Raises: UserError if the step has no all-to-all, too small a batch, a gate that needs the whole batch,
    random numbers that depend on the cut, or an all-to-all that no rule can cut.
    """
    if not program.positions(Kind.ALL_TO_ALL) and not any(map(_is_launch, program.instructions)):
        raise _refuse("a step without all-to-alls", "communication to hide", "use strategy none")
    return copies_of_batch(program, copies)


def copies_of_batch(program: Program, copies: int = COPIES) -> PartitionRange:
    """The same for any Program, whatever it communicates. Raises: as `duplex`."""
    best = _best([_Forms(program, inputs) for inputs in _batch_inputs(program)])
    if best.run_whole and len(best.inputs) > 1:
        # An input that is as long as the batch by chance (positions, say) is better left whole.
        fewer = ([t for t in best.inputs if t != left_out] for left_out in best.inputs)
        best = _best([best, *(_Forms(program, inputs) for inputs in fewer)])
    if best.refused:
        raise best.refused
    if not best.in_parts:
        raise _refuse("a step in which nothing can be cut along the batch", "ops with rules", "use one copy")
    batch = program.tensors[best.inputs[0]].shape[0]
    if batch < copies:
        raise _refuse(f"a batch of {batch}", f"at least {copies}", "use strategy lancet, or a larger batch")
    first, last = (program.instructions[best.in_parts[n]].name for n in (0, -1))
    return PartitionRange(first, last, copies, best.forms)


def _batch_inputs(program: Program) -> list[list[str]]:
    """Inputs whose first dimension may be the batch, grouped by its size: all but parameters, tangents, and
    the states of the random generator and the optimizer."""
    by_size: dict[int, list[str]] = {}
    for t in program.inputs:
        readers = (program.instructions[i].phase for i in program.consumers[t])
        is_state = t in program.parameter_set or t == GENERATOR or set(readers) == {Phase.OPTIMIZER}
        if program.tensors[t].shape and not is_state and not t.startswith("tangents"):
            by_size.setdefault(program.tensors[t].shape[0], []).append(t)
    if not by_size:
        raise _refuse("a step without inputs", "a batch to cut", "give the batch as an input of the module")
    return list(by_size.values())


def _best(candidates: list[_Forms]) -> _Forms:
    """The assignment with the fewest instructions that read reassembled tensors; among equals, the one that
    cuts most instructions."""
    return max(candidates, key=lambda forms: (not forms.refused, -len(forms.run_whole), len(forms.in_parts)))


class _Forms:
    """The forms of all tensors that follow from the rules if these inputs are cut along their first
    dimension.

    in_parts: positions that run part by part. run_whole: positions that read cut tensors, but have no rule to
    cut them. refused: the first reason why the step cannot be duplexed.
    """

    def __init__(self, program: Program, inputs: Sequence[str]) -> None:
        self.program, self.inputs = program, inputs
        self.in_parts: list[int] = []
        self.run_whole: list[int] = []
        self.refused: UserError | None = None
        self._batch = (program.tensors[inputs[0]].shape[0] if inputs else 1) or 1  # 1 for an empty batch
        self._read_whole: set[str] = set()
        self._read: set[str] = set()
        self.forms = {t: cut_along(0) for t in inputs}
        for i, instruction in enumerate(program.instructions):
            # A gate that reads no activation (the random gate) also routes part by part.
            if any(map(self._is_in_parts, instruction.inputs)) or is_gate(instruction):
                self._visit(i, instruction)
        uncut = set(program.positions(Kind.ALL_TO_ALL)) - set(self.in_parts)
        if uncut:
            self.refused = self.refused or _why_refused(program.instructions[min(uncut)])
        # Inputs that no part reads stay whole.
        unread = self.forms.keys() - program.producer.keys() - self._read
        self.forms = {t: form for t, form in self.forms.items() if t not in unread}

    def _is_in_parts(self, tensor: str) -> bool:
        form = self.forms.get(tensor, WHOLE)
        return form.is_made_in_parts and form != PARTIAL

    def _visit(self, i: int, instruction: Instruction) -> None:
        rule = rule_for(instruction)
        way = self._best_way(instruction, rule) if rule else None
        if way is None:
            self.run_whole.append(i)
            self.refused = self.refused or _why_refused(instruction)
            return
        self.in_parts.append(i)
        for t, form in zip(instruction.inputs, way, strict=False):
            if form.is_cut and not self._is_in_parts(t):
                is_computed = t in self.program.producer
                self.forms[t] = sliced(form.dimension or 0) if is_computed else form
            elif form == WHOLE:
                self._read_whole.add(t)
            self._read.add(t)
        for t, form in zip(instruction.outputs, way[len(instruction.inputs) :], strict=True):
            self.forms[t] = form

    def _best_way(self, instruction: Instruction, rule: Rule) -> tuple[Form, ...] | None:
        """Among the ways to cut the instruction that fit the forms of its operands, the one that slices the
        fewest whole operands."""
        tensors = self.program.tensors
        ways = rule.assignments(instruction, tensors, only_experts=False, contractions=True)
        fitting = [way for way in ways if self._fits(instruction, way)]
        return min(
            fitting,
            key=lambda way: sum(
                form.is_cut and not self._is_in_parts(t)
                for t, form in zip(instruction.inputs, way, strict=False)
            ),
            default=None,
        )

    def _fits(self, instruction: Instruction, way: tuple[Form, ...]) -> bool:
        shapes = (self.program.tensors[t].shape for t in (*instruction.inputs, *instruction.outputs))
        lines_up = all(
            form.dimension is None or shape[form.dimension] % self._batch == 0
            for shape, form in zip(shapes, way, strict=True)
        )
        return lines_up and all(map(self._accepts, instruction.inputs, way))

    def _accepts(self, tensor: str, required: Form) -> bool:
        """Can a part read the tensor in the form that a rule requires?"""
        form = self.forms.get(tensor, WHOLE)
        if tensor in self.program.parameter_set or form == PARTIAL:
            return required == WHOLE
        if form == CARRIED and required == WHOLE:
            # Has it no meaning outside its part (an unused seed), or is it passed from part to part?
            rule = rule_for(self.program.instructions[self.program.producer[tensor]])
            return rule is not None and not rule.carries
        if form.is_made_in_parts and tensor in self.program.producer:
            return required == form
        if tensor in self.inputs:
            return required == form
        if form.is_cut:  # whole, and already sliced for an earlier reader
            return required == form.of_reader
        return required == WHOLE or (required.is_cut and tensor not in self._read_whole)


def _why_refused(instruction: Instruction) -> UserError | None:
    """Why a step cannot be duplexed in which this instruction is not cut; None: it can run once."""
    name, op = instruction.name, instruction.op
    if instruction.attributes.get("partitionable") is False:
        got = f"{name}, gate {instruction.attributes.get('spec')!r}, which needs the whole batch"
        do = "use strategy lancet: it cuts after the gate"
        return _refuse(got, "gates that can route part of a batch", do)
    if GENERATOR in instruction.mutates:
        got = f"{name} ({op}), whose random numbers depend on the cut"
        do = "use lancet_kernels.Dropout, or strategy lancet"
        return _refuse(got, "random numbers keyed by token", do)
    if _is_launch(instruction):
        got = f"{name}, a fused launch that cannot be cut along the batch"
        return _refuse(got, "MoE layers on streams", "use backend='torch' for it")
    if instruction.kind is Kind.ALL_TO_ALL:
        got = f"{name} ({op}), which cannot be cut along the batch"
        return _refuse(got, "the all-to-alls of an MoELayer", "use strategy lancet-dw")
    return None


def _is_launch(instruction: Instruction) -> bool:
    """Is it a fused launch of an MoE layer, which communicates, too?"""
    return instruction.op.startswith("lancet.fused_experts")


def _refuse(got: str, expected: str, do: str) -> UserError:
    return UserError(STRATEGY, got=got, expected=expected, do=do)


@dataclass
class Pair:
    """A pair as a graph. Its outputs are those of the backward, then those of the forward.

    Attributes:
        backward_inputs, forward_inputs: names of its placeholders, by name in the half. Parameters and
            buffers that both read are one placeholder.
        original: by name of a node, its name in its half.
    """

    module: fx.GraphModule
    backward_inputs: dict[str, str]
    forward_inputs: dict[str, str]
    original: dict[str, str]


def pair_of(forward: fx.GraphModule, backward: fx.GraphModule) -> Pair:
    """The pair of the two halves of a joint graph (`split_joint`), the backward first."""
    pair = Pair(module_of(forward, fx.Graph()), {}, {}, {})
    graph = pair.module.graph
    state: dict[str, fx.Node] = {}
    results = []
    halves = (backward, pair.backward_inputs, "earlier"), (forward, pair.forward_inputs, "later")
    for half, inputs, microbatch in halves:
        copies: dict[fx.Node, fx.Node] = {}
        for node in half.graph.find_nodes(op="placeholder"):
            # A joint graph's placeholder of a parameter or buffer; saved, it has the same name.
            if node.name in state:
                copies[node] = state[node.name]
            else:
                copies[node] = graph.node_copy(node)
                copies[node].target = copies[node].name  # both halves may read an input
                if state_name(node) is not None:
                    state[node.name] = copies[node]
            inputs[node.name] = copies[node].name
        for node in half.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            copies[node] = graph.node_copy(node, copies.__getitem__)
            pair.original[copies[node].name] = node.name
            # Of one phase, so that they can mix; each half gathers parameters for itself.
            IN_BACKWARD.set(copies[node], True)
            if UNIT.on(node):
                UNIT.set(copies[node], ((microbatch, UNIT.of(node)[0]), UNIT.of(node)[1]))
        results += fx.map_arg(list(half.graph.output_node().args[0]), copies.__getitem__)
    graph.output(results)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in graph.find_nodes(op="placeholder"):
        first.prepend(node)
    graph.lint()
    pair.module.recompile()
    return pair


def program_of_pair(pair: Pair, step: Program) -> Program:
    """The Program of a pair, with the times and bytes of the step's instructions; its gradients are not
    summed."""
    program = program_from_fx(pair.module)
    unsummed = {node.name for node in pair.module.graph.nodes if GRADIENTS_OF.on(node)}
    instructions = []
    for instruction in program.instructions:
        single = step.instructions[step.index[pair.original[instruction.name]]]
        milliseconds = 0.0 if instruction.name in unsummed else single.milliseconds
        link = {"link": single.attributes["link"]} if "link" in single.attributes else {}
        attributes = {**instruction.attributes, **link}
        instructions.append(
            replace(instruction, milliseconds=milliseconds, bytes=single.bytes, attributes=attributes)
        )
    return replace(program, instructions=tuple(instructions))
