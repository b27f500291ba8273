"""Programs made up for tests: from a few words, at random, and a tiny MoE training step."""

from dataclasses import dataclass
from functools import lru_cache

from hypothesis import strategies as st
from torch import fx

from lancet_kernels.graph.costs.costs import Cost, Tensors, durations
from lancet_kernels.graph.program import Instruction, Kind, Phase, Program, TensorSpec
from lancet_kernels.layer.gpt2_moe import ModelConfig
from lancet_kernels.predict.simulate import captured_program
from lancet_kernels.schedules.order.best_order import OrderSearch
from lancet_kernels.schedules.order.ordering import greedy_order
from lancet_kernels.schedules.plan import Plan
from lancet_kernels.schedules.rewrite.cut import GraphCutter
from lancet_kernels.schedules.strategies import Planner, PlanningOptions

KINDS = {"c": Kind.COMPUTE, "a": Kind.ALL_TO_ALL, "r": Kind.ALL_REDUCE}
PHASES = {"f": Phase.FORWARD, "b": Phase.BACKWARD, "o": Phase.OPTIMIZER}


def program(*lines: str, bytes: int = 100, outputs: tuple[str, ...] = ()) -> Program:
    """`"name kind phase milliseconds inputs..."` per instruction; each makes one tensor of its name.

    Example: `program("A c f 2", "X a f 3 A", "C c f 1 X")`.
    """
    instructions = []
    tensors = {"in": TensorSpec("in", (1,), "int8", 0)}
    for line in lines:
        name, kind, phase, ms, *inputs = line.split()
        tensors[name] = TensorSpec(name, (bytes,), "int8")
        instructions.append(
            Instruction(
                name,
                "made.up",
                tuple(inputs) or ("in",),
                (name,),
                KINDS[kind],
                PHASES[phase],
                milliseconds=float(ms),
            )
        )
    return Program("made", tuple(instructions), tensors, ("in",), outputs)


@st.composite
def random_programs(draw, most: int = 24, all_reduces: bool = True) -> Program:
    """Random DAGs: a forward part, a backward part, sometimes an optimizer; whole milliseconds."""
    length = draw(st.integers(2, most))
    forward = draw(st.integers(0, length))
    kinds = "ccccaar" if all_reduces else "ccca"
    lines = []
    for i in range(length):
        phase = "f" if i < forward else draw(st.sampled_from("bbbo"))
        kind = "c" if phase == "o" else draw(st.sampled_from(kinds))
        ms = draw(st.integers(0, 9))
        earlier = [f"t{j}" for j in range(i)]
        inputs = draw(st.lists(st.sampled_from(earlier), max_size=3, unique=True)) if earlier else []
        lines.append(f"t{i} {kind} {phase} {ms} {' '.join(inputs)}")
    return program(*lines, bytes=draw(st.integers(1, 1000)))


def backward_of_layers(layers: int, all_to_all_ms: float, gradients_ms: list[float]) -> Program:
    """A backward pass in small: per layer a dense dX with its weight gradients, and an MoE layer."""
    lines = ["loss c f 1"]
    upstream = "loss"
    for n in range(layers):
        lines.append(f"d{n} c b 2 {upstream}")
        for k, ms in enumerate(gradients_ms):
            lines.append(f"dw{n}_{k} c b {ms} {upstream}")
        lines.append(f"dx{n} c b 2 d{n}")
        lines.append(f"a{n} a b {all_to_all_ms} dx{n}")
        lines.append(f"ex{n} c b 1 a{n}")
        lines.append(f"exw{n} c b {gradients_ms[0]} a{n}")
        lines.append(f"b{n} a b {all_to_all_ms} ex{n}")
        upstream = f"b{n}"
    lines.append(f"end c b 2 {upstream}")
    return program(*lines)


@lru_cache(maxsize=16)
def tiny_step(*, gate: str = "switch", gpus: int = 2, batch: int = 8, layers: int = 2) -> Program:
    """A training step of a tiny model, captured on a fake rank; layers 1, 3, ... have experts."""
    config = ModelConfig("tiny", layers, 64, 4, 32, vocab=512, num_experts=2 * gpus, gate=gate)
    _, step = captured_program(config, gpus, batch)
    return step


def nth(p: Program, op: str, n: int = 0) -> str:
    """Name of the n-th instruction of an op."""
    return [i.name for i in p.instructions if i.op == op][n]


@dataclass(frozen=True)
class GivenCosts:
    """Costs for programs whose instructions all carry `milliseconds`; each part costs `overhead_ms` more."""

    overhead_ms: float = 0.0

    def __call__(self, instruction: Instruction, tensors: Tensors) -> float:
        if instruction.milliseconds is not None:
            return instruction.milliseconds
        if instruction.attributes.get("whole_milliseconds"):
            parts = instruction.attributes["parts"]
            return instruction.attributes["whole_milliseconds"] / parts + self.overhead_ms
        return 0.0


given = GivenCosts()


def make_plan(
    program: Program,
    cost: Cost,
    strategy: str = "lancet",
    options: PlanningOptions | None = None,
    module: fx.GraphModule | None = None,
) -> Plan:
    """The plan of one strategy; that cuts nothing if the Program has no graph."""
    cut = None if module is None else GraphCutter(module, program, cost)
    return Planner(program, cost, options, cut).plan(strategy)


def list_schedule(program: Program, cost: Cost) -> Program:
    """The program in its best order."""
    return program.reordered(OrderSearch(program, cost).best().order)


def schedule_weight_gradients(program: Program, cost: Cost) -> Program:
    """The program in the order of Algorithm 1."""
    return program.reordered(greedy_order(program, durations(program, cost)))
