"""Small forward Programs for the search of shardings: at random, and every strategy there is for one."""

from __future__ import annotations

from hypothesis import strategies as st

from lancet_kernels.graph.program import Instruction, Kind, Phase, Program, TensorSpec
from lancet_kernels.schedules.shard.sharding_strategy import ShardingStrategy

UNARY = ("aten.relu", "aten.gelu", "aten.neg")


def given(instruction: Instruction, tensors: object) -> float:
    """Computation: what the instruction says, shared out to the parts. Messages: 1 + bytes / 4."""
    if instruction.milliseconds is not None:
        return instruction.milliseconds
    if instruction.kind.is_communication:
        return 1 + instruction.bytes / 4
    whole = instruction.attributes["whole_milliseconds"]
    return whole / instruction.attributes.get("parts", 1)


@st.composite
def graphs(draw, most: int = 8, least: int = 1, is_chain: bool = False, flops: float = 0.0) -> Program:
    """DAGs of products with a weight, sums of two tensors, softmaxes and functions of one; x [4, 4] at first.
    One result: the last tensor. Args: flops: of each op; with some, each is a block of its own."""
    shape = (4, 4)
    tensors = {"x": TensorSpec("x", shape)}
    instructions: list[Instruction] = []
    inputs, parameters, made = ["x"], [], ["x"]

    def add(op: str, *reads: str, **attributes: object) -> None:
        name = f"t{len(instructions)}"
        ms = draw(st.sampled_from((0, 3, 8, 15, 22, 40)))
        tensors[name] = TensorSpec(name, shape)
        instructions.append(
            Instruction(
                f"i{name}", op, reads, (name,), flops=flops, milliseconds=float(ms), attributes=attributes
            )
        )
        made.append(name)

    for _ in range(draw(st.integers(least, most))):
        source = made[-1] if is_chain else draw(st.sampled_from(made))
        kind = draw(st.sampled_from(("mm", "mm", *(() if is_chain else ("add",)), "unary", "softmax")))
        if kind == "mm":
            weight = f"w{len(parameters)}"
            tensors[weight] = TensorSpec(weight, shape)
            parameters.append(weight)
            inputs.append(weight)
            add("aten.mm", source, weight)
        elif kind == "add" and len(made) > 1:
            other = draw(st.sampled_from([t for t in made if t != source]))
            add("aten.add", source, other)
        elif kind == "softmax":
            add("aten._softmax", source, dim=draw(st.integers(0, 1)))
        else:
            add(draw(st.sampled_from(UNARY)), source)
    return Program("random", tuple(instructions), tensors, tuple(inputs), (made[-1],), tuple(parameters))


def duplexed(strategy: ShardingStrategy) -> Program:
    """Both microbatches in the order of section 4.1, stage by stage, as a Program that can be simulated: the
    communication step of one beside the computation step of the other, forward and then backward."""
    tensors = {"batch": TensorSpec("batch", (1,), "int8", 0)}
    instructions: list[Instruction] = []
    last: dict[int, str] = {1: "batch", 2: "batch"}

    def add(copy: int, stage: int, comm: bool, phase: Phase) -> None:
        of = strategy.stages[stage]
        times = (of.comm_ms, of.comp_ms), (of.comm_backward_ms, of.comp_backward_ms)
        ms = times[phase is Phase.BACKWARD][not comm]
        step = "communication" if comm else "computation"
        name = f"{phase.value} {step} {stage} of microbatch {copy}"
        tensors[name] = TensorSpec(name, (1,), "int8", 0)
        instructions.append(
            Instruction(
                name,
                f"sharding.{step}",
                (last[copy],),
                (name,),
                Kind.OTHER_COMMUNICATION if comm else Kind.COMPUTE,
                phase,
                milliseconds=ms,
            )
        )
        last[copy] = name

    n = len(strategy.stages)
    for stage in range(n):
        add(1, stage, True, Phase.FORWARD)
        if stage:
            add(2, stage - 1, False, Phase.FORWARD)
        add(2, stage, True, Phase.FORWARD)
        add(1, stage, False, Phase.FORWARD)
    add(2, n - 1, False, Phase.FORWARD)
    add(1, n - 1, False, Phase.BACKWARD)
    for stage in reversed(range(n)):
        add(1, stage, True, Phase.BACKWARD)
        add(2, stage, False, Phase.BACKWARD)
        add(2, stage, True, Phase.BACKWARD)
        if stage:
            add(1, stage - 1, False, Phase.BACKWARD)
    return Program(f"{strategy.program}, duplexed", tuple(instructions), tensors, ("batch",))
