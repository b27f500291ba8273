"""Parts written where the whole lies: the same numbers, no copies, and the memory model knows."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lancet_kernels.graph.capture.capture import capture, split_joint
from lancet_kernels.graph.from_fx import op_name, program_from_fx
from lancet_kernels.graph.program.forms import cut_along
from lancet_kernels.graph.program.program import Program
from lancet_kernels.schedules.rewrite.apply import write_in_place
from lancet_kernels.schedules.rewrite.cut import cut_range
from lancet_kernels.schedules.time.peak_memory import Storages, alive_bytes


class Product(nn.Module):
    """x [6, 3, 8] -> what is cut: a matrix product, seen as [6, 3, 8], and maybe a softmax; and a loss."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))

    def forward(self, x):
        y = (x.reshape(-1, 8) @ self.weight).reshape(x.shape)
        return (y.transpose(0, 1) if self.transposed else y).sinh().square().sum()


def cut_product(transposed: bool, dimension: int):
    """The model, its input, the captured step with product and sinh in two parts."""
    torch.manual_seed(0)
    model, x = Product(transposed), torch.randn(6, 3, 8, dtype=torch.float64)
    captured = capture(model, (x,))
    program = program_from_fx(captured.joint)
    names = [i.name for i in program.instructions]
    inside = program.instructions[: 1 + next(k for k, n in enumerate(names) if n.startswith("sinh"))]
    forms = {t: cut_along(0) for i in inside for t in i.outputs}
    if transposed:
        forms |= {
            t: cut_along(1) for i in inside if i.op in ("aten.transpose", "aten.sinh") for t in i.outputs
        }
    forms[program.inputs[1]] = cut_along(dimension)
    cut_range(captured.joint.graph, [(i.name, part) for i in inside for part in range(2)], 2, forms)
    return model, x, captured


@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_and_what_follows_it_are_written_in_place(transposed):
    model, x, captured = cut_product(transposed, 0)
    cut_program = program_from_fx(captured.joint)
    loss = model(x)
    loss.backward()
    expected, model.weight.grad = model.weight.grad, None

    halves = []

    def split(joint, outputs):
        halves.extend(split_joint(joint, outputs))
        write_in_place(halves[0])
        return tuple(halves)

    again = captured.compile(split)(x)
    again.backward()

    # Parts are multiplied in other shapes, and may be summed in another order.
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close(model.weight.grad, expected)
    ops = [op_name(node) for node in halves[0].graph.nodes if node.op == "call_function"]
    joins = [i for i in cut_program.instructions if i.op == "aten.cat"]
    free = [i.name for i in joins if i.milliseconds == 0.0]
    assert free
    if transposed:  # parts of the transposed tensor do not lie in one piece
        assert ops.count("aten.cat") == len(joins) - len(free) > 0
    else:
        assert "aten.cat" not in ops
        assert len(free) == len(joins)
        at = cut_program.index[joins[-1].name]
        copied = alive_bytes(Storages(_with_own_memory(cut_program)))[at]
        assert copied - alive_bytes(Storages(cut_program))[at] == 6 * 3 * 8 * 8


def _with_own_memory(program: Program) -> Program:
    """The same if every part had memory of its own."""
    own = {
        name: replace(spec, alias_of=None, bytes=None) if "_part" in name and spec.alias_of else spec
        for name, spec in program.tensors.items()
    }
    return replace(program, tensors=own)
