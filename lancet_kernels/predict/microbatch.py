"""One microbatch of a question's step at a certain depth: the captured step as kernels, with costs, resident
memory and the optimizer; and pairs of microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from lancet_kernels.graph.capture.captured_graph import copy_of, state_name
from lancet_kernels.graph.costs.costs import LAUNCHES, on_links
from lancet_kernels.graph.from_fx import GATHERS
from lancet_kernels.graph.meta import UNIT
from lancet_kernels.graph.program import (
    Instruction,
    Kind,
    Phase,
    Program,
    TensorSpec,
    original_name,
)
from lancet_kernels.layer.model_layers import expert_parameters
from lancet_kernels.optimization.step import ModelStep
from lancet_kernels.predict.kernels import Kernels
from lancet_kernels.predict.question import STATE_BYTES, Question
from lancet_kernels.predict.recomputation import layer_of
from lancet_kernels.schedules.cut.duplex import Pair, pair_of, program_of_pair
from lancet_kernels.schedules.cut.ranges import PartitionRange
from lancet_kernels.schedules.order.ordering import sums_gradients, weight_gradients
from lancet_kernels.schedules.rewrite.walk import UNPLANNED, split
from lancet_kernels.schedules.strategies import Planner, PlanningOptions
from lancet_kernels.schedules.time.peak_memory import Storages, alive_bytes

WEIGHT_BYTES, COPY_BYTES = 2, 4
"""Bytes for each number: a bfloat16 weight, and the optimizer's float32 copy of it."""

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
HOST_WAITS = "host_waits"
"""Attribute of a pair's message: whether the host waits before it for the sizes of received rows."""
_KEPT = "kept_by_the_forward"


@dataclass(frozen=True)
class Share:
    """A rank's experts, or all its other parameters.

    numbers: of elements. shards: of parameters and gradients; states: shards of the optimizer's states.
    gradient_bytes, state_bytes: of one element.
    """

    numbers: float
    shards: int
    states: int
    gradient_bytes: int
    state_bytes: int

    @classmethod
    def of(cls, question: Question, numbers: float, is_expert: bool) -> Share:
        replicas = question.replicas(is_expert)
        shards = replicas if question.sharding == "full" else 1
        states = 1 if question.sharding == "none" else replicas
        return cls(numbers, shards, states, *STATE_BYTES[question.states])

    @property
    def resident_bytes(self) -> dict[str, float]:
        return {
            PARAMETERS: self.numbers * WEIGHT_BYTES / self.shards,
            GRADIENTS: self.numbers * self.gradient_bytes / self.shards,
            OPTIMIZER: self.numbers * self.state_bytes / self.states,
        }

    @property
    def optimizer_bytes(self) -> float:
        """Memory traffic of an optimizer step.

        For each element of the shard: states are read and written; the gradient is read for its norm, read
        and written to clip it, read for the update; the float32 copy is read again to write the weight. Each
        gradient of the rank is read and written to divide it by the number of ranks, and cleared.
        """
        update = 2 * self.state_bytes + 4 * self.gradient_bytes + COPY_BYTES + WEIGHT_BYTES
        return self.numbers * (update / self.states + 3 * self.gradient_bytes / self.shards)


@dataclass(frozen=True, eq=False)
class Microbatch:
    """A microbatch whose step has costs. numbers: of elements in this rank's parameters of experts, and in
    all others."""

    question: Question
    step: ModelStep
    kernels: Kernels
    numbers: tuple[int, int]

    @classmethod
    def of(cls, question: Question, step: ModelStep) -> Microbatch:
        """The microbatch of a captured step. Args: step: without costs."""
        cost, program = question.cost, step.program
        if question.sharding == "optimizer":
            program = _without_copies(program, step)
        kernels = Kernels(cost.carrier, cost.top_k, busiest=question.load.memory, eager=question.eager)
        program, kernels = kernels.of(_with_tied_once(program, step))
        experts = set(expert_parameters(step.model))
        in_experts = sum(p.numel() for p in experts)
        numbers = in_experts, sum(p.numel() for p in step.model.parameters()) - in_experts
        timed = _with_optimizer(_shared(program, step, question), question, numbers)
        timed = on_links(timed, cost.communication)
        return cls(question, replace(step, timed=timed, cost=cost), kernels, numbers)

    @property
    def program(self) -> Program:
        return self.step.program

    @property
    def flops(self) -> float:
        """FLOPs without recomputation."""
        return sum(i.flops for i in self.program.instructions if original_name(i.name) is None)

    def cut(self, ranges: Sequence[PartitionRange]) -> Program:
        """The Program with ranges cut."""
        if not ranges:
            return self.program
        program = self.kernels.in_memory(self.step.cutter(ranges))
        inputs = {t: self.program.tensors[t] for t in program.inputs}
        return replace(program, tensors={**program.tensors, **inputs})

    @cached_property
    def last_forward(self) -> int:
        """The position of the forward's last instruction."""
        return max(n for n, i in enumerate(self.program.instructions) if i.phase is Phase.FORWARD)

    @cached_property
    def kept_bytes(self) -> int:
        """Memory at the end of the forward."""
        return alive_bytes(Storages(self.program), range(len(self.program)))[self.last_forward]

    def planner(self, limit_gb: float) -> Planner:
        return Planner(self.program, self.step.cost, PlanningOptions(memory_limit_gb=limit_gb), self.cut)

    @cached_property
    def layers(self) -> dict[str, str]:
        """The layer of each instruction by name; "": none."""
        return {node.name: layer_of(node) for node in self.step.module.graph.nodes}

    @cached_property
    def pair(self) -> PairOfMicrobatches:
        return PairOfMicrobatches.of(self)


def _with_tied_once(program: Program, step: ModelStep) -> Program:
    """The Program in which a parameter with several names, each an input of the graph, takes memory once."""
    first: dict[Tensor, str] = {}
    for name, parameter in step.model.named_parameters(remove_duplicate=False):
        first.setdefault(parameter, name)
    names = set(first.values())
    placeholders = step.module.graph.find_nodes(op="placeholder")
    again = [n.name for n in placeholders if n.name in program.parameter_set and state_name(n) not in names]
    sizes = {t: replace(program.tensors[t], bytes=0) for t in again}
    return replace(program, tensors={**program.tensors, **sizes})


def _without_copies(program: Program, step: ModelStep) -> Program:
    """The Program without copies of parameters and gradients into one buffer per unit, which a sharded
    optimizer has anyway."""
    inserted = {node.name for node in step.module.graph.nodes if "partitioner_tag" not in node.meta}
    return replace(
        program,
        instructions=tuple(
            replace(i, op="lancet_prediction.flat", bytes=0.0)
            if i.name in inserted and i.kind is Kind.COMPUTE
            else i
            for i in program.instructions
        ),
    )


def _shared(program: Program, step: ModelStep, question: Question) -> Program:
    """The Program of one microbatch. Sums have the dtype of gradients; all microbatches share them, and the
    gather after a sharded optimizer's step, unless FSDP sums each microbatch's. Their results take no further
    memory beside gradients and parameters."""
    sums = step.sums_of_gradients
    units = {node.name for node in step.module.graph.nodes if UNIT.on(node)}
    tensors, instructions = dict(program.tensors), []
    for i in program.instructions:
        if i.name in sums or GATHERS in i.attributes:
            is_shared = question.sharding != "full"
            if is_shared and i.name in sums:
                i = replace(i, bytes=i.bytes * STATE_BYTES[question.states][0] / WEIGHT_BYTES)
            if is_shared and question.accumulate > 1:
                ms = question.cost(i, program.tensors) / question.accumulate
                i = replace(i, milliseconds=ms, microbatches=question.accumulate)
        if i.name in sums or (question.sharding == "optimizer" and i.name in units):
            tensors |= {t: replace(tensors[t], bytes=0) for t in i.outputs}
        instructions.append(i)
    return replace(program, instructions=tuple(instructions), tensors=tensors, outputs=program.outputs[:1])


def with_sums_waited_for(program: Program) -> Program:
    """The Program for its memory, in which the input of a sum of gradients is freed at once, as fully_shard
    does within a layer or two; a message would hold it until the optimizer reads the result."""
    instructions = (replace(i, kind=Kind.COMPUTE) if sums_gradients(i) else i for i in program.instructions)
    return replace(program, instructions=tuple(instructions))


def _with_optimizer(program: Program, question: Question, numbers: tuple[int, int]) -> Program:
    """The Program with resident memory, and with the step of the optimizer after the last sums."""
    own = [Share.of(question, n, is_expert) for n, is_expert in zip(numbers, (True, False), strict=True)]
    resident = {
        kind: int(sum(share.resident_bytes[kind] for share in own)) for kind in (GRADIENTS, OPTIMIZER)
    }
    tensors = dict(program.tensors)
    if question.sharding == "optimizer":
        # Ranks keep whole parameters, of which the graph has only shards.
        tensors |= {t: replace(tensors[t], bytes=0) for t in program.parameters}
        resident[PARAMETERS] = int(sum(share.resident_bytes[PARAMETERS] for share in own))
    kept = {kind: TensorSpec(kind, (), bytes=size) for kind, size in resident.items()}
    last = [i for i in program.instructions if i.phase is Phase.BACKWARD and i.outputs][-1]
    read = dict.fromkeys(t for i in (*filter(sums_gradients, program.instructions), last) for t in i.outputs)
    adam = Instruction(
        "optimizer", "lancet_prediction.adam", (OPTIMIZER, *read), (), phase=Phase.OPTIMIZER,
        bytes=sum(share.optimizer_bytes for share in own) / question.accumulate,
        microbatches=question.accumulate,
    )  # fmt: skip
    return replace(
        program,
        instructions=(*program.instructions, adam),
        tensors={**tensors, **kept},
        inputs=(*program.inputs, *kept),
    )


@dataclass(frozen=True, eq=False)
class PairOfMicrobatches:
    """The backward of a microbatch and the forward of the next, which sum no gradients.

    program: with times; its first instruction gives the tensors that the first forward saved. original: the
    name in one microbatch by that in the pair. layers: by original name; "": none.
    """

    program: Program
    alone: Program
    original: Mapping[str, str]
    layers: Mapping[str, str]

    @classmethod
    def of(cls, alone: Microbatch) -> PairOfMicrobatches:
        step, single = alone.step, alone.program
        halves = split(replace(step, module=copy_of(step.module)), UNPLANNED).halves
        pair = pair_of(*halves)
        ms = [0.0 if i.microbatches > 1 else step.cost(i, single.tensors) for i in single.instructions]
        timed = tuple(replace(i, milliseconds=t) for i, t in zip(single.instructions, ms, strict=True))
        program = program_of_pair(pair, replace(single, instructions=timed))
        original = {instruction.name: pair.original[instruction.name] for instruction in program.instructions}
        program = _as_kernels(program, single, {**pair.original, **_inverse(pair)})
        state = {*single.parameters, *pair.forward_inputs.values()}
        kept = tuple(t for t in program.inputs if t not in state)
        resident = {t: single.tensors[t] for t in (PARAMETERS, GRADIENTS, OPTIMIZER) if t in single.tensors}
        # Its outputs, unlike inputs of the Program, are freed after their last read.
        first = Instruction(_KEPT, "lancet_prediction.kept", (), kept, phase=Phase.BACKWARD)
        program = replace(
            program,
            instructions=(first, *program.instructions),
            tensors={**program.tensors, **resident},
            inputs=(*(t for t in program.inputs if t in state), *resident),
            parameters=tuple(t for t in program.inputs if t in single.parameter_set),
        )
        return cls(program, single, original, alone.layers)

    @cached_property
    def weight_gradients(self) -> list[int]:
        """Positions of the backward's weight gradients."""
        gradients = {self.alone.instructions[i].name for i in weight_gradients(self.alone)}
        return [n for n, i in enumerate(self.program.instructions) if self.original.get(i.name) in gradients]

    @cached_property
    def blocks(self) -> tuple[list[list[int]], list[list[int]]]:
        """Positions of the backward's and of the forward's blocks: the embedding, every layer, the head."""
        halves: dict[Phase, list[tuple[int, str]]] = {Phase.BACKWARD: [], Phase.FORWARD: []}
        for n, i in enumerate(self.program.instructions):
            if name := self.original.get(i.name):
                whole = self.alone.instructions[self.alone.index[name]]
                # Views, constants and casts may be outside their layer.
                marks = whole.flops or whole.kind is Kind.ALL_TO_ALL
                halves[whole.phase].append((n, self.layers[name] if marks else ""))
        return _blocks(halves[Phase.BACKWARD]), _blocks(halves[Phase.FORWARD])


def waits_for_sizes(instruction: Instruction) -> bool:
    """Whether the host waits for the sizes of received rows: in the forward; the backward knows them."""
    if HOST_WAITS in instruction.attributes:
        return bool(instruction.attributes[HOST_WAITS])
    to_experts = bool(instruction.attributes.get("to_experts"))
    return instruction.kind is Kind.ALL_TO_ALL and instruction.phase is Phase.FORWARD and to_experts


def _blocks(positions: Sequence[tuple[int, str]]) -> list[list[int]]:
    """Positions in their order, cut where a new layer begins and after the last one."""
    last = max((k for k, (_, layer) in enumerate(positions) if layer), default=-1)
    blocks: list[list[int]] = [[]]
    earlier = {""}
    for k, (position, layer) in enumerate(positions):
        if layer not in earlier or k == last + 1:
            blocks.append([])
            earlier.add(layer)
        blocks[-1].append(position)
    return blocks if last + 1 < len(positions) else [*blocks, []]


def _inverse(pair: Pair) -> dict[str, str]:
    """The name of each of the pair's placeholders in its half."""
    halves = (pair.backward_inputs, pair.forward_inputs)
    return {own: name for inputs in halves for name, own in inputs.items()}


def _as_kernels(program: Program, single: Program, original: Mapping[str, str]) -> Program:
    """A pair's Program with the memory and launches of the same instructions of one microbatch."""

    def in_single(tensor: str) -> TensorSpec | None:
        node, dot, element = tensor.partition(".")
        return single.tensors.get(f"{original.get(node, node)}{dot}{element}")

    sizes = {t: same.bytes for t in program.tensors if (same := in_single(t)) is not None}
    instructions = []
    for i in program.instructions:
        whole = single.instructions[single.index[original[i.name]]]
        marks: dict[str, object] = {HOST_WAITS: waits_for_sizes(whole)}
        if LAUNCHES in whole.attributes:
            marks[LAUNCHES] = whole.attributes[LAUNCHES]
        instructions.append(replace(i, attributes={**i.attributes, **marks}))
    tensors = {t: replace(spec, bytes=sizes.get(t, spec.bytes)) for t, spec in program.tensors.items()}
    return replace(program, instructions=tuple(instructions), tensors=tensors)
