"""Which instructions would make the host wait for a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lancet_kernels import ops
from lancet_kernels.graph.from_fx import host_waits, op_name

lancet = torch.ops.lancet
X, MASK, INDEX = torch.arange(6.0), torch.tensor([True, False] * 3), torch.tensor([1, 2])
ROWS, COUNT = torch.zeros(4, 5), torch.tensor([[1, 3]])


def waiting(function: Callable, *inputs: Tensor) -> list[str]:
    """Names of the ops that wait."""
    module = make_fx(function)(*inputs)
    nodes = {node.name: node for node in module.graph.nodes}
    return [op_name(nodes[name]) for name in host_waits(module.graph)]


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (lambda x: x.relu().sum(), [X], []),
        (lambda x, i: x[i], [X, INDEX], []),
        (lambda x, m: torch.where(m, x, 0), [X, MASK], []),
        (lambda x, m: x.index_put((m,), torch.tensor(0.0)), [X, MASK], []),
        (lambda x, i: x.index_put((i,), x[:2]), [X, INDEX], []),
        (lambda x, m: x[m], [X, MASK], ["aten.index"]),
        (lambda x, m: x.index_put((m,), x[:3]), [X, MASK], ["aten.index_put"]),
        (lambda m: m.nonzero(), [MASK], ["aten.nonzero"]),
        (lambda i: torch.bincount(i), [INDEX], ["aten.bincount"]),
        (lambda x, m: x.masked_select(m), [X, MASK], ["aten.masked_select"]),
        (lambda b, c: lancet.all_to_all(b, c, c, "", True), [ROWS, COUNT], []),
        (lancet.grouped_gemm_dw, [ROWS, ROWS, COUNT], ["lancet.grouped_gemm_dw"]),
        (lancet.grouped_gemm_dw, [ROWS[:, :4].repeat(1, 2).bfloat16()] * 2 + [COUNT], []),
        (lambda b, c: lancet.merge_parts([b, b], [c, c], True), [ROWS, COUNT], ["lancet.merge_parts"]),
        (lambda b, c: lancet.window_rows(b, c, 0, 2, True), [ROWS, COUNT], ["lancet.window_rows"]),
    ],
)
def test_ops(function: Callable, inputs: list[Tensor], expected: list[str]) -> None:
    assert waiting(function, *inputs) == expected


def test_between_ranks_sizes_are_asked_for() -> None:
    module = make_fx(lambda b, c: lancet.all_to_all(b, c, c, "", True))(ROWS, COUNT)
    (node,) = [n for n in module.graph.nodes if op_name(n) == "lancet.all_to_all"]
    node.args = (*node.args[:3], "some group", *node.args[4:])
    assert host_waits(module.graph) == [node.name]
    assert ops.all_to_all(ROWS, COUNT, COUNT, "", True).shape == ROWS.shape
