"""torchtitan's order on one layer that a hand can check, and on a captured step."""

from lancet_kernels.graph.capture.trace import layers_of
from lancet_kernels.graph.program import Kind, Program
from lancet_kernels.predict.simulate import Setting
from lancet_kernels.schedules.cut.duplex import duplex
from lancet_kernels.schedules.order.graph_trainer import order_by_layers
from tests.schedules.small_programs import program


def layer(*lines: str) -> Program:
    """Each line for both halves: `"A c f"` is `A_part0` and `A_part1`, of a millisecond."""
    both = []
    for half in (0, 1):
        for line in lines:
            name, kind, phase, *inputs = line.split()
            needed = " ".join(f"{t}_part{half}" for t in inputs)
            both.append(f"{name}_part{half} {kind} {phase} 1 {needed}")
    return program(*both)


def names(p: Program) -> str:
    """Example: `A0 d0`."""
    layers = {i.name.split("_")[0]: "0" for i in p.instructions}
    return " ".join(p.instructions[i].name.replace("_part", "") for i in order_by_layers(p, layers))


def test_forward_of_a_layer():
    p = layer("A c f", "d a f A", "s c f A", "E c f d", "c a f E", "T c f c s")
    assert names(p) == "A0 d0 A1 d1 s0 s1 E0 c0 E1 c1 T0 T1"


def test_backward_of_a_layer():
    """The other half first; weight gradients behind the second pair, when their rows are there."""
    p = layer("g c b", "c a b g", "W c b c", "X c b c", "d a b X", "Y c b d")
    assert names(p) == "g1 c1 g0 c0 X1 d1 X0 d0 W1 W0 Y1 Y0"


def test_captured_step_has_a_valid_order():
    step = Setting("gpt2-s-moe", "p4de", 16, layers=4).priced
    p = step.cutter((duplex(step.program),))
    layers = {name: ".".join(path.split(".")[:2]) for name, path in layers_of(step.module.graph).items()}
    order = order_by_layers(p, layers)
    exchanges = [i for i in order if p.instructions[i].kind is Kind.ALL_TO_ALL]
    assert p.reordered(order), "what an instruction needs comes before it"
    assert [p.instructions[i].name[-1] for i in exchanges] == [*"01" * 4, *"10" * 4]
