"""Megatron's order on two microbatches that a hand can check, and its delayed weight gradients."""

from lancet_kernels.graph.program import Instruction, Kind, Phase, Program, TensorSpec
from lancet_kernels.schedules.order.megatron import paired_order, with_delayed_weight_gradients
from lancet_kernels.schedules.time.simulate import run


def layer(microbatch: int, phase: Phase) -> list[Instruction]:
    """A layer with a dispatch and a combine: computation 1, message 1, 2, message 2, 3, and in the backward a
    weight gradient before each message."""
    name = f"{'F' if phase is Phase.FORWARD else 'B'}{microbatch}"
    steps, last = [], ()
    for k, kind in enumerate((Kind.COMPUTE, Kind.ALL_TO_ALL) * 2 + (Kind.COMPUTE,)):
        own = f"{name}.{k}"
        if kind is Kind.ALL_TO_ALL and phase is Phase.BACKWARD:
            steps.append(Instruction(f"{own}.dw", "mm", last, (f"{own}.dw",), phase=phase, flops=1.0))
        steps.append(Instruction(own, "op", last, (own,), kind, phase, flops=1.0))
        last = (own,)
    return steps


def pair() -> tuple[Program, list[list[int]]]:
    """The backward and the forward of one layer; everything takes a millisecond."""
    halves = [layer(0, Phase.BACKWARD), layer(1, Phase.FORWARD)]
    instructions = [instruction for half in halves for instruction in half]
    tensors = {t: TensorSpec(t, (1,)) for i in instructions for t in i.outputs}
    first = len(halves[0])
    return Program("pair", tuple(instructions), tensors), [
        list(range(first)),
        list(range(first, len(instructions))),
    ]


def test_pieces_of_a_backward_and_a_forward_take_turns():
    program, (backward, forward) = pair()
    names = [program.instructions[i].name for i in paired_order(program, [backward], [forward])]
    without_gradients = [name for name in names if not name.endswith("dw")]
    assert without_gradients == "B0.0 B0.1 F1.0 B0.2 F1.1 B0.3 F1.2 B0.4 F1.3 F1.4".split()


def test_delayed_weight_gradients_fill_what_waits():
    """A backward alone, in which nothing else is left to compute while messages travel."""
    program, (backward, forward) = pair()
    order = [*forward, *backward]
    ms = [1.0] * len(program)
    gradients = [n for n, i in enumerate(program.instructions) if i.name.endswith("dw")]
    delayed = with_delayed_weight_gradients(program, ms, order, gradients)
    assert sorted(delayed) == sorted(order)
    assert program.reordered(delayed)
    names = [program.instructions[i].name for i in delayed]
    assert names[names.index("B0.1") + 1].endswith(".dw")
    assert run(program, ms, delayed).iteration_ms < run(program, ms, order).iteration_ms
