"""Captured models, cut into parts, compute what they computed: loss, every gradient, every routing decision.

In fp64, one rank, skewed routing with drops: losses and gradients agree to 1e-10, experts and slots exactly.
Also what cut_range refuses, what it leaves behind, and in which order the parts run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import fx

from lancet_kernels.graph.capture.captured_graph import copy_of
from lancet_kernels.graph.costs.part_instruction import can_be_cut, is_cut
from lancet_kernels.graph.from_fx import op_name, tensor_names
from lancet_kernels.graph.program import Phase
from lancet_kernels.graph.rules.rules import IRREGULAR, PARTIAL, WHOLE, WINDOW, Forms, cut_along
from lancet_kernels.ops.moe.gates import parse_gate
from lancet_kernels.schedules.cut.ranges import AxisInference, pipeline_order
from lancet_kernels.schedules.rewrite.apply import instruction_order
from lancet_kernels.schedules.rewrite.cut import cut_range
from lancet_kernels.schedules.rewrite.cut_parts import CutError
from lancet_kernels.schedules.strategies import Planner
from tests.capturing import Step, read_only_step
from tests.graph.cut_and_reassemble import Recorder
from tests.grids import few_of
from tests.model_zoo import MODELS, Size

GATES = ("topk", "gshard")
"""One that can be cut, and one that needs the whole batch."""


def size(gate: str = "topk", dropless: bool = False) -> Size:
    return Size(
        batch=8,
        sequence=3,
        width=8,
        heads=2,
        vocab=29,
        gate=gate,
        top_k=2,
        capacity_factor=None if dropless else 1.0,
    )


def forward_ranges(step: Step) -> list[tuple[int, int]]:
    """Ranges that may be cut: around all layers where the gates can be, else from gate to gate."""
    instructions = step.program.instructions
    gates = [i for i, x in enumerate(instructions) if x.op == "lancet.gate"]
    combines = [
        i for i, x in enumerate(instructions) if x.op == "lancet.combine" and x.phase is Phase.FORWARD
    ]
    if parse_gate(instructions[gates[0]].attributes["spec"]).partitionable:
        return [(gates[0], combines[-1])]
    return [(gate + 1, combine) for gate, combine in zip(gates, combines, strict=True)]


def outcome(module: fx.GraphModule, step: Step) -> tuple[list, dict[str, torch.Tensor]]:
    """(loss and gradients, experts and slots of every gate, parts joined)."""
    recorder = Recorder(module)
    results = torch.utils._pytree.tree_leaves(recorder.run(*step.values))
    routing: dict[str, list] = {}
    for node in module.graph.nodes:
        if op_name(node) == "lancet.gate":
            expert_TK, slot_TK, *_ = recorder.values[node]
            routing.setdefault(node.name.split("_part")[0], []).append(torch.stack([expert_TK, slot_TK]))
    return results, {name: torch.cat(parts, 1) for name, parts in routing.items()}


def assert_same(found: tuple, expected: tuple) -> None:
    for a, b in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert found[1].keys() == expected[1].keys()
    assert all(torch.equal(found[1][name], expected[1][name]) for name in found[1])


def cut_copy(step: Step, ranges: list[tuple[int, int]], parts: int) -> tuple[fx.GraphModule, list[dict]]:
    module, inference, used = copy_of(step.joint), AxisInference(step.program), []
    for first, last in ranges:
        forms = inference.forms(first, last)
        assert forms, f"{step.program.instructions[first].name} to {step.program.instructions[last].name}"
        assert can_be_cut(step.program.tensors, forms, parts) or 8 % parts
        order = [
            (step.program.instructions[i].name, part)
            for i, part in pipeline_order(step.program, first, last, forms, parts)
        ]
        cut_range(module.graph, order, parts, forms)
        used.append(forms)
    module.recompile()
    return module, used


def check(step: Step, ranges: list[tuple[int, int]], parts: int) -> list[dict]:
    module, forms = cut_copy(step, ranges, parts)
    assert_same(outcome(module, step), outcome(step.joint, step))
    return forms


def dropped(step: Step) -> int:
    _, routing = outcome(step.joint, step)
    capacity = next(n.args[1] for n in step.joint.graph.nodes if op_name(n) == "lancet.kept_counts")
    return sum(int((r[1] >= capacity).sum()) for r in routing.values())


@pytest.mark.parametrize(("name", "parts"), few_of([("gpt2", 2), ("bert", 3), ("llama", 2)]))
def test_windows_of_slots(name, parts):
    """The ranges that Tutel pipelines, forward and backward."""
    step = read_only_step(name, size())
    ranges = Planner(step.program, lambda instruction, tensors: 1.0).expert_ranges
    phases = [step.program.instructions[first].phase for first, _ in ranges]
    assert phases.count(Phase.FORWARD) == 2
    assert phases.count(Phase.BACKWARD) == 2
    for forms in check(step, ranges, parts):
        assert set(forms.values()) <= {WINDOW, PARTIAL}


def test_a_single_token_has_no_parts():
    """Its dimension of size one looks like one that is broadcast."""
    step = read_only_step("gpt2", replace(size(), batch=1, sequence=1))
    ranges = forward_ranges(step)
    assert ranges
    assert not any(AxisInference(step.program).forms(*positions) for positions in ranges)


def grid() -> Iterator[tuple[str, str, bool, int]]:
    """All models with both gates, one of them dropless, in 1 to 8 parts."""
    for number, (name, gate) in enumerate(product(MODELS, GATES)):
        yield name, gate, number % 4 in (1, 2), 1 + (number + number // 8) % 8


@pytest.mark.long
@pytest.mark.parametrize(("name", "gate", "dropless", "parts"), grid())
def test_whole_grid(name, gate, dropless, parts):
    step = read_only_step(name, size(gate, dropless))
    for forms in check(step, forward_ranges(step), parts):
        assert IRREGULAR in forms.values()
    assert (dropped(step) == 0) == dropless
    experts = Planner(step.program, lambda instruction, tensors: 1.0).expert_ranges
    capacity = next(n.args[1] for n in step.joint.graph.nodes if op_name(n) == "lancet.kept_counts")
    if parts <= capacity:
        check(step, experts, parts)


SIZE = Size(batch=4, sequence=3, width=8, heads=2, vocab=29, num_experts=5, top_k=2, gate="topk")


@pytest.fixture
def step() -> Step:
    return read_only_step("gpt2", SIZE)


def first_layer(step: Step) -> tuple[tuple[str, ...], dict[str, int]]:
    """Names and forms from the first gate to the first combine."""
    (first, _) = forward_ranges(step)[0]
    last = next(
        i for i in range(first, len(step.program)) if step.program.instructions[i].op == "lancet.combine"
    )
    names = tuple(i.name for i in step.program.instructions[first : last + 1])
    return names, dict(AxisInference(step.program).forms(first, last))


def in_turn(step: Step, names: Sequence[str], parts: int, forms: Forms) -> list[tuple[str, int | None]]:
    """All parts of an instruction, then the next."""
    program = step.program
    return [
        (name, part)
        for name in names
        for part in (range(parts) if is_cut(program.instructions[program.index[name]], forms) else (None,))
    ]


def test_parts_run_in_the_order_asked_for(step):
    names, forms = first_layer(step)
    module = copy_of(step.joint)
    cut_names = [n for n in names if n not in ("kept_counts", "send_rows")]
    by_part = [(name, part) for part in range(2) for name in cut_names]
    cut_range(module.graph, [*by_part, ("kept_counts", None), ("send_rows", None)], 2, forms)
    wanted = [f"{name}_part{part}" for name, part in by_part]
    order = instruction_order(module.graph)
    assert [name for name in order if name in set(wanted)] == wanted
    assert not set(cut_names) & set(order)
    # Only what somebody reads is put together.
    assert all(node.users for node in module.graph.nodes if node.name.endswith("_whole"))


def refuses(step: Step, names: Sequence[str], parts: int, forms: Forms, why: str, order=None) -> None:
    module = copy_of(step.joint)
    with pytest.raises(CutError, match=why):
        cut_range(module.graph, order or in_turn(step, names, parts, forms), parts, forms)


def test_ranges_and_orders_that_cannot_be_are_refused(step):
    names, forms = first_layer(step)
    order = in_turn(step, names, 2, forms)
    refuses(step, names, 2, forms, "1 unknown instructions", [*order, ("nobody", None)])
    refuses(step, (), 2, forms, "unknown instructions")
    refuses(step, names, 2, forms, "every instruction once per part", order[:-1])
    refuses(step, names, 2, forms, "read before it is computed", order[::-1])
    refuses(step, names, 13, forms, "13 parts of dimensions")
    view = next(n for n in step.joint.graph.nodes if n.name == names[0]).args[0]
    refuses(step, names, 2, {**forms, view.name: cut_along(1)}, "dimensions")
    # A dispatch without its all-to-all, a combine without its dispatch.
    cut = tuple(n for n in names if not n.startswith("all_to_all"))
    refuses(step, cut, 2, forms, "outside the range")
    assert step.program.instructions[step.program.index[names[-1]]].op == "lancet.combine"
    refuses(step, (names[-1],), 2, {**forms}, "a combine without its dispatch|outside the range")


def test_only_what_hangs_together_with_an_all_to_all_is_cut(step):
    """The transposes of weights that are read behind a range could be cut, for nothing."""
    inference, program = AxisInference(step.program), step.program
    first, _ = forward_ranges(step)[0]
    for last in range(first + 4, first + 60):
        forms = inference.forms(first, last)
        if forms is None:
            continue
        for instruction in program.instructions[first : last + 1]:
            if instruction.op == "aten.t":
                assert not {*instruction.inputs, *instruction.outputs} & forms.keys()


@pytest.mark.long
@pytest.mark.parametrize("parts", [2, 3, 4, 5])
def test_what_the_planner_takes_for_possible_is_possible(step, parts):
    """can_be_cut says yes only where cut_range does not refuse: ranges from everywhere to everywhere."""
    inference = AxisInference(step.program)
    gates = [i for i, x in enumerate(step.program.instructions) if x.op == "lancet.gate"]
    forward = sum(i.phase is Phase.FORWARD for i in step.program.instructions)
    checked = 0
    for first in (gates[0] - 5, gates[0], gates[0] + 1):
        for last in range(gates[0] + 3, min(forward, gates[1] + 12), 5):
            forms = inference.forms(first, last)
            if not forms or not can_be_cut(step.program.tensors, forms, parts):
                continue
            names = tuple(i.name for i in step.program.instructions[first : last + 1])
            try:
                cut_range(copy_of(step.joint).graph, in_turn(step, names, parts, forms), parts, forms)
            except CutError as error:
                assert "exchange of counts" in str(error)  # noqa: PT017
                continue
            checked += 1
    assert checked >= (8 if 4 % parts == 0 else 0)


@pytest.mark.parametrize("gate", few_of(["topk", "random"]))
def test_statistics_stand_behind_the_last_combine_and_constants_in_front(gate):
    program = read_only_step("gpt2", replace(SIZE, gate=gate)).program
    ops = [i.op for i in program.instructions if i.phase is Phase.FORWARD]
    last = len(ops) - 1 - ops[::-1].index("lancet.combine")
    gate_at = ops.index("lancet.gate")
    assert "aten.logsumexp" not in ops[:last]
    assert "aten.arange" not in ops[gate_at:]
    assert AxisInference(program).forms(gate_at, last)


def test_axes_that_no_rule_allows_are_refused(step):
    """Refused at different stages: while parts are inserted, and while they are reassembled."""
    names, forms = first_layer(step)
    expert = next(n for n in step.joint.graph.nodes if n.name == "dispatch").args[1].args[0]
    refuses(step, names, 2, {**forms, tensor_names(expert)[0]: WHOLE}, "range to cut")
    refuses(step, names, 2, {**forms, "grouped_gemm": WHOLE}, "reads all of grouped_gemm")

    (first, last), program = forward_ranges(step)[0], step.program
    forms = AxisInference(program).forms(first, last)
    residual = next(i for i in program.instructions[first : last + 1] if i.op == "aten.add").inputs[0]
    names = tuple(i.name for i in program.instructions[first : last + 1])
    refuses(step, names, 2, {**forms, residual: WHOLE}, "parts that do not fit together")
