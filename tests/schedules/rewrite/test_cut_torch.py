"""Captured models, cut into parts, compute what they computed: loss, every gradient, every routing decision.

In fp64, one rank, skewed routing with drops: losses and gradients agree to 1e-10, experts and slots exactly.
"""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import fx

from lancet_kernels.graph.capture.captured_graph import copy_of
from lancet_kernels.graph.costs.part_instruction import can_be_cut
from lancet_kernels.graph.from_fx import op_name
from lancet_kernels.graph.program import Phase
from lancet_kernels.graph.rules.rules import IRREGULAR, PARTIAL, WINDOW
from lancet_kernels.ops.moe.gates import parse_gate
from lancet_kernels.schedules.cut.ranges import AxisInference, pipeline_order
from lancet_kernels.schedules.rewrite.cut import cut_range
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
