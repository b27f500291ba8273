"""A graph with direct calls gives what the graph gives, and calls no op of this library by its overload."""

import weakref

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lancet_kernels.graph.capture.run import GraphRunner, Recorder, with_direct_calls
from lancet_kernels.graph.program import Phase
from lancet_kernels.ops.moe.dispatch import combine

aten = torch.ops.aten


def many_ops(x: Tensor, w: Tensor, row: Tensor, weight: Tensor) -> list[Tensor]:
    y = aten._unsafe_view(aten.mm(x, aten.t(w)), [2, 3, 4])
    y = aten.cat([aten.neg(y), aten.add(aten.mul(y, 2.0), y, alpha=3)], -1)
    norm = aten.rsqrt(aten.add(aten.mean(aten.pow(y, 2), [-1], True), 1e-6))
    y = aten.mul(y, aten.expand(aten.unsqueeze(aten.select(norm, 2, 0), 2), [2, 3, 8]))
    y = aten.sub(aten.div(aten.permute(y, [1, 0, 2]), 3), 1.0, alpha=2)
    sums = aten.sum(aten.clone(y, memory_format=torch.contiguous_format), [0], True, dtype=torch.float64)
    rows = combine(aten.reshape(y, [6, 8]), row, weight)
    product = aten.bmm(y, aten.transpose(y, 1, 2))
    return [y, sums, rows, product, aten.detach(aten.div(product, 2))]


def test_gives_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, weight = (torch.randn(*shape, generator=generator) for shape in ((6, 5), (4, 5), (3, 2)))
    inputs = (x, w, torch.tensor([[0, 3], [-1, 1], [5, -1]]), weight)
    module = make_fx(many_ops)(*inputs)
    direct = with_direct_calls(module)
    for expected, got in zip(module(*inputs), direct(list(inputs)), strict=True):
        assert got.dtype is expected.dtype
        assert torch.equal(got, expected)
    calls = {node.target for node in direct.graph.nodes if node.op == "call_function"}
    assert not any(isinstance(target, torch._ops.OpOverload) for target in calls), calls
    assert combine.function in calls


def test_each_input_is_freed_after_its_last_use() -> None:
    alive: list[bool] = []

    def is_alive(x: Tensor) -> Tensor:
        alive.append(first() is not None)
        return x

    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    total = graph.call_function(torch.add, (x, y))
    graph.output(graph.call_function(is_alive, (graph.call_function(torch.mul, (total, y)),)))
    runner = GraphRunner(torch.fx.GraphModule({}, graph), Phase.FORWARD, Recorder())
    inputs = [torch.ones(3), torch.ones(3)]
    first = weakref.ref(inputs[0])
    assert runner(inputs).tolist() == [2.0] * 3
    assert alive == [False]
    assert not inputs
