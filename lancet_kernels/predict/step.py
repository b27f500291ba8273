"""The parts of a model repeated to full depth: the Program of a chain of microbatches on one rank.

Each microbatch runs the parts forward and then backward. Parameters are gathered before a part and gradients
summed after it, as FSDP2 does: one message for each part, sent one part ahead. Without sharding, gradients
are summed once, behind the last microbatch. The optimizer ends the Program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lancet_kernels.graph.costs.clusters import Dispatcher
from lancet_kernels.graph.costs.kernel_costs import RECEIVED_ROWS
from lancet_kernels.graph.from_fx import GATHERS
from lancet_kernels.graph.program.program import Instruction, Kind, Phase, Program, TensorSpec
from lancet_kernels.predict import attention
from lancet_kernels.predict.fusion import fused
from lancet_kernels.predict.parts import ModelParts, Part
from lancet_kernels.predict.question import Question
from lancet_kernels.predict.saved import with_recomputation
from lancet_kernels.schedules.order.megatron import Block

WEIGHT_BYTES, GRADIENT_BYTES, STATE_BYTES = 2, 4, 12
"""Bytes for each number: a bfloat16 weight, a float32 gradient, Adam's float32 copy and two moments."""
STATE_TRAFFIC = 2 * STATE_BYTES + 4 * GRADIENT_BYTES + GRADIENT_BYTES + WEIGHT_BYTES
"""Bytes that an optimizer step moves for each number of a rank's shard: states read and written; the gradient
read for its norm, read and written to clip it, read for the update; the float32 copy read again to write the
weight."""
GRADIENT_TRAFFIC = 3 * GRADIENT_BYTES
"""Bytes for each gradient of a rank: read and written to divide it by the number of ranks; cleared."""

_RECEIVED = "_received"

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"


@dataclass(frozen=True)
class ModelStep:
    """A chain of microbatches. blocks: of the parts. ends: positions behind all blocks."""

    program: Program
    microbatches: int
    blocks: list[Block]
    ends: list[int]


def prepared(parts: ModelParts, policy: str) -> ModelParts:
    """The parts with recomputation and fused element-wise ops. Args: policy: of `saved`."""
    return replace(
        parts,
        embedding=prepared_part(parts.embedding, "none"),
        kinds=tuple(prepared_part(part, policy) for part in parts.kinds),
        head=prepared_part(parts.head, "none"),
    )


def prepared_part(part: Part, policy: str) -> Part:
    """A part with recomputation, fused element-wise ops and received rows. Args: policy: of `saved`."""
    recomputed = with_recomputation(with_shapes(part), policy)
    return replace(recomputed, program=fused(with_received_rows(recomputed.program)))


def with_shapes(part: Part) -> Part:
    """The part with the sizes of matrix products as the attribute `gemm`, and with routing weights applied
    inside the experts: their gradient then reads what the activation keeps, not the rows that came back."""
    program = part.program

    def one(i: Instruction) -> Instruction:
        if i.op == "lancet.combine_dweight":
            gradient, _, rows = i.inputs
            return replace(
                i, inputs=(gradient, rows), bytes=float(program.tensors[i.outputs[0]].content_bytes)
            )
        if not i.flops or i.op in (attention.OP, attention.OP_BACKWARD):
            return i
        return replace(i, attributes={**i.attributes, "gemm": _gemm(i, program)})

    return replace(part, program=replace(program, instructions=tuple(map(one, program.instructions))))


def _gemm(i: Instruction, program: Program) -> tuple[float, float, float, float]:
    """(groups, m, n, k) of a product [groups, m, k] x [groups, k, n]; rows per group are a mean."""
    shape: tuple[float, ...] = program.tensors[i.outputs[0]].shape
    if i.op in ("lancet.grouped_gemm", "lancet.grouped_gemm_dx"):
        groups = program.tensors[i.inputs[2]].shape[0]
        shape = groups, shape[0] / groups, shape[1]
    count, m, n = shape if len(shape) == 3 else (1, *shape)
    return count, m, n, i.flops / (2.0 * count * m * n)


def with_received_rows(program: Program) -> Program:
    """The Program with received rows sorted by expert before the experts, and back after them."""
    instructions: list[Instruction] = []
    tensors = dict(program.tensors)
    for i in program.instructions:
        if i.kind is not Kind.ALL_TO_ALL:
            instructions.append(i)
            continue
        to_experts = i.attributes.get("to_experts")
        inner = f"{i.name}{_RECEIVED if to_experts else '_sorted'}"
        tensors[inner] = replace(tensors[i.outputs[0] if to_experts else i.inputs[0]], name=inner)
        read, written = ((inner,), i.outputs) if to_experts else (i.inputs[:1], (inner,))
        permute = Instruction(
            f"{i.name}_permute", RECEIVED_ROWS, read, written, phase=i.phase, bytes=2 * i.bytes
        )
        if to_experts:
            instructions += [replace(i, outputs=(inner,)), permute]
        else:
            instructions += [permute, replace(i, inputs=(inner, *i.inputs[1:]))]
    return replace(program, instructions=tuple(instructions), tensors=tensors)


def kept_tensors(program: Program) -> set[str]:
    """The tensors of a part's forward that its backward reads."""
    forward = {t for i in program.instructions if i.phase is Phase.FORWARD for t in i.outputs}
    return {t for i in program.instructions if i.phase is not Phase.FORWARD for t in i.inputs if t in forward}


def with_buffers(part: Part, carrier: Dispatcher, top_k: int) -> Part:
    """The part with the memory that a dispatcher's buffers take. One that sends tokens reads them where they
    lie, brings each back once, and, if it sorts rows while it receives them, has no second copy of these."""
    if carrier.sends == "rows":
        return part
    program, tensors = part.program, dict(part.program.tensors)
    for i in program.instructions:
        smaller: dict[str, int] = {}
        if i.op == "lancet.dispatch":
            smaller = dict.fromkeys(i.outputs, 0)
        elif i.kind is Kind.ALL_TO_ALL and not i.attributes["to_experts"]:
            smaller = {t: tensors[t].content_bytes // top_k for t in i.outputs}
        elif i.op == RECEIVED_ROWS and not carrier.receive_passes:
            one = i.inputs[0] if i.inputs[0].endswith(_RECEIVED) else i.outputs[0]
            smaller = {one: 0}
        for t, size in smaller.items():
            tensors[t] = replace(tensors[t], bytes=size)
    return replace(part, program=replace(program, tensors=tensors))


@dataclass
class _Builder:
    """Collects the instructions of a chain."""

    question: Question
    chain: Sequence[Part]
    microbatches: int
    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    gathered: dict[tuple[int, bool, str], str] = field(default_factory=dict)

    def message(
        self, name: str, share: Share, collective: str, inputs: tuple[str, ...], phase: Phase, size: float,
        result_bytes: int = 0, after: str = "",
    ) -> int:  # fmt: skip
        """Gathers or sums a share."""
        self.tensors[name] = TensorSpec(name, (), bytes=result_bytes)
        kind = Kind.ALL_REDUCE if collective == "all_reduce" else Kind.OTHER_COMMUNICATION
        group = "replica" if share.is_expert and self.question.expert_ranks > 1 else "world"
        attributes: dict[str, object] = {"collective": collective, "group": group}
        if collective == "all_gather":
            attributes[GATHERS] = True
        return self.add(
            Instruction(
                name, f"lancet_prediction.{collective}", inputs, (name,), kind, phase, bytes=float(size),
                attributes=attributes, after=after,
            )
        )  # fmt: skip

    def add(self, instruction: Instruction) -> int:
        self.instructions.append(instruction)
        return len(self.instructions) - 1


def chained(parts: ModelParts, question: Question, microbatches: int) -> ModelStep:
    """The Program of `microbatches` microbatches and the optimizer. Args: parts: as from `prepared`."""
    carrier, top_k = question.cost.carrier, question.cost.top_k
    buffered = replace(parts, kinds=tuple(with_buffers(kind, carrier, top_k) for kind in parts.kinds))
    chain = buffered.chain
    b = _Builder(question, chain, microbatches)
    for p, part in enumerate(chain):
        for share in shares(part, question):
            for what, size in share.resident_bytes.items():
                name = f"{what} p{p} {share.kind}"
                b.tensors[name] = TensorSpec(name, (), bytes=int(size))
                b.inputs.append(name)
    for m in range(microbatches):
        for p in range(len(chain)):
            _block(b, m, p, Phase.FORWARD)
        for p in reversed(range(len(chain))):
            _block(b, m, p, Phase.BACKWARD)
    ends = _optimizer(b)
    program = Program(
        f"{parts.name}, {microbatches} microbatches", tuple(b.instructions), b.tensors, tuple(b.inputs)
    )
    return ModelStep(program, microbatches, b.blocks, ends)


@dataclass(frozen=True)
class Share:
    """What a rank has of a part's parameters: those of its experts, or all others.

    replicas: how many ranks hold the same ones. shards: into how many parameters and gradients are cut;
    states: the optimizer's states.
    """

    is_expert: bool
    numbers: int
    replicas: int
    shards: int
    states: int

    @property
    def kind(self) -> str:
        return _kind(self.is_expert)

    @property
    def resident_bytes(self) -> dict[str, float]:
        """By what it is: of parameters, gradients, the optimizer's states."""
        return {
            PARAMETERS: self.numbers * WEIGHT_BYTES / self.shards,
            GRADIENTS: self.numbers * GRADIENT_BYTES / self.shards,
            OPTIMIZER: self.numbers * STATE_BYTES / self.states,
        }


def _kind(is_expert: bool) -> str:
    return "experts" if is_expert else "dense"


def numbers(part: Part, is_expert: bool) -> int:
    """How many numbers a rank has of a part's parameters: of those of its experts, or of all others."""
    return sum(p.numbers for p in part.parameters.values() if p.is_expert is is_expert)


def shares(part: Part, question: Question) -> list[Share]:
    """The shares of a part that has any such parameters."""
    result = []
    for is_expert in (False, True):
        if count := numbers(part, is_expert):
            replicas = question.replicas(is_expert)
            shards = replicas if question.sharding == "full" else 1
            states = 1 if question.sharding == "none" else replicas
            result.append(Share(is_expert, count, replicas, shards, states))
    return result


def _block(b: _Builder, m: int, p: int, phase: Phase) -> None:
    """The instructions of a part in one microbatch and phase, with the gathers of the next part before them
    and the sums of their gradients behind."""
    part, prefix = b.chain[p], f"m{m}.p{p}."
    wanted = [p] if phase is Phase.FORWARD and p == 0 else []
    wanted.append(p + (1 if phase is Phase.FORWARD else -1))
    ahead = [i for q in wanted if 0 <= q < len(b.chain) for i in _gathers(b, m, q, phase)]
    names = _names(b, m, p, phase)
    positions = []
    for i in part.program.instructions:
        if i.phase is not phase:
            continue
        inputs = dict.fromkeys(filter(None, (names.get(t, f"{prefix}{t}") for t in i.inputs)))
        outputs = tuple(f"{prefix}{t}" for t in i.outputs)
        for t, own in zip(i.outputs, outputs, strict=True):
            b.tensors[own] = replace(part.program.tensors[t], name=own, alias_of=None)
        own_name = f"{prefix}{i.name}"
        positions.append(b.add(replace(i, name=own_name, inputs=tuple(inputs), outputs=outputs, after="")))
    behind = _sums(b, m, p) if phase is Phase.BACKWARD else []
    b.blocks.append(Block(m, phase, positions, ahead, behind))


def _names(b: _Builder, m: int, p: int, phase: Phase) -> dict[str, str]:
    """The tensors of the chain that the inputs of a part's Program stand for; "": none."""
    part = b.chain[p]
    names = dict.fromkeys(part.program.inputs, "")
    for t, parameter in part.parameters.items():
        owner = p if parameter.numbers else 0  # the head may share the embedding's
        whole = f"{PARAMETERS} p{owner} {_kind(parameter.is_expert)}"
        # The head's parameters stay gathered from its forward to its backward, which follows at once.
        gathered = [
            b.gathered.get((owner, parameter.is_expert, one)) for one in (phase.value, Phase.FORWARD.value)
        ]
        names[t] = next(filter(None, gathered), whole)
    if p > 0 and part.takes:
        names[part.takes] = f"m{m}.p{p - 1}.{b.chain[p - 1].gives}"
    if p + 1 < len(b.chain) and part.gets:
        names[part.gets] = f"m{m}.p{p + 1}.{b.chain[p + 1].returns}"
    return names


def _gathers(b: _Builder, m: int, p: int, phase: Phase) -> list[int]:
    """All-gathers of a part's parameters; of sharded optimizers in the first forward only."""
    sharding = b.question.sharding
    once = sharding == "optimizer" and m == 0 and phase is Phase.FORWARD
    if sharding != "full" and not once:
        return []
    positions = []
    for share in _shared(b, p):
        name, size = f"m{m}.p{p}.all_gather_{share.kind}_{phase.value}", share.numbers * WEIGHT_BYTES
        b.gathered[p, share.is_expert, phase.value] = name
        source = (f"{PARAMETERS} p{p} {share.kind}",)
        # A sharded optimizer's result arrives in the parameters themselves.
        kept = 0 if once else size
        positions.append(b.message(name, share, "all_gather", source, phase, size, kept, _last_of(b, phase)))
    return positions


def _shared(b: _Builder, p: int) -> list[Share]:
    """The shares of a part that other ranks hold, too."""
    return [share for share in shares(b.chain[p], b.question) if share.replicas > 1]


def _last_of(b: _Builder, phase: Phase) -> str:
    """The last instruction of the same phase: a gather is not sent before the part before it begins."""
    last = b.blocks[-1] if b.blocks else None
    if last is None or last.phase is not phase or not last.positions:
        return ""
    return b.instructions[last.positions[-1]].name


def _sums(b: _Builder, m: int, p: int) -> list[int]:
    """The sum of a part's gradients over the ranks that hold the same parameters."""
    sharding, last = b.question.sharding, m == b.microbatches - 1
    if sharding != "full" and not last:
        return []
    collective = "all_reduce" if sharding == "none" else "reduce_scatter"
    # FSDP sums what this microbatch computed, in bfloat16; otherwise the float32 sum of all microbatches.
    each = WEIGHT_BYTES if sharding == "full" else GRADIENT_BYTES
    positions = []
    for share in _shared(b, p):
        gradients = dict.fromkeys(
            f"m{m}.p{p}.{parameter.gradient}"
            for parameter in b.chain[p].parameters.values()
            if parameter.is_expert is share.is_expert and parameter.gradient
        )
        name, size = f"m{m}.p{p}.{collective}_{share.kind}", share.numbers * each
        positions.append(b.message(name, share, collective, tuple(gradients), Phase.BACKWARD, size))
    return positions


def _optimizer(b: _Builder) -> list[int]:
    """One instruction for each part: Adam on what this rank holds of its states."""
    positions = []
    for p, part in enumerate(b.chain):
        moved, read = 0.0, []
        for share in shares(part, b.question):
            moved += share.numbers * STATE_TRAFFIC / share.states
            moved += share.numbers * GRADIENT_TRAFFIC / share.shards
            last = f"m{b.microbatches - 1}.p{p}."
            sums = [f"{last}{collective}_{share.kind}" for collective in ("all_reduce", "reduce_scatter")]
            read += [f"{OPTIMIZER} p{p} {share.kind}", *(t for t in sums if t in b.tensors)]
        if moved:
            name, op = f"optimizer.p{p}", "lancet_prediction.adam"
            positions.append(
                b.add(Instruction(name, op, tuple(read), (), phase=Phase.OPTIMIZER, bytes=moved))
            )
    return positions
