"""The order asked for is the order that came out; collectives start early and are waited for late."""

import operator

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lancet_kernels.errors import UserError
from lancet_kernels.ops.comm.all_to_all import start_all_to_all, start_exchange_counts
from lancet_kernels.schedules.rewrite.apply import instruction_order, reorder, start_early_wait_late, wait

aten, lancet = torch.ops.aten, torch.ops.lancet


def layer() -> tuple[fx.GraphModule, tuple[torch.Tensor, ...]]:
    """a = x + 1;  s = all_to_all(a);  b = x * 2;  first, second = split(b);  c = first - second;
    d = s + 3;  -> d, c."""
    values = torch.randn(5, 4), torch.tensor([[2, 3]])
    graph, mode = fx.Graph(), FakeTensorMode()

    def known(node: fx.Node, value: object, name: str) -> fx.Node:
        node.meta["val"], node.name = value, name
        return node

    x = known(graph.placeholder("x"), mode.from_tensor(values[0]), "x")
    counts = known(graph.placeholder("counts"), mode.from_tensor(values[1]), "counts")

    def call(name: str, target, *args) -> fx.Node:
        with mode:
            value = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        return known(graph.call_function(target, args), value, name)

    a = call("a", aten.add.Tensor, x, 1.0)
    s = call("s", lancet.all_to_all.default, a, counts, counts, "", True)
    b = call("b", aten.mul.Tensor, x, 2.0)
    pair = call("pair", aten.split.Tensor, b, 2, 1)
    c = call(
        "c", aten.sub.Tensor, call("p0", operator.getitem, pair, 0), call("p1", operator.getitem, pair, 1)
    )
    d = call("d", aten.add.Tensor, s, 3.0)
    graph.output((d, c))
    return fx.GraphModule(nn.Module(), graph), values


def names(graph: fx.Graph) -> list[str]:
    return [node.name for node in graph.nodes]


@pytest.mark.parametrize("order", ["a s b pair c d", "b pair c a s d", "a s d b pair c", "b a pair s c d"])
def test_the_order_asked_for_is_the_order_that_came_out(order):
    module, values = layer()
    expected = module(*values)
    reorder(module.graph, order.split())
    module.recompile()
    assert instruction_order(module.graph) == order.split()
    assert all(torch.equal(a, b) for a, b in zip(module(*values), expected, strict=True))
    in_graph = names(module.graph)
    assert in_graph.index("p0") < in_graph.index("c")


@pytest.mark.parametrize(
    ("order", "why"),
    [
        ("s a b pair c d", "s before a"),
        ("a s c b pair d", "c before"),
        ("a s b pair c", "different in d"),
        ("a s b pair c d d", "repetitions"),
        ("a s b pair c d other", "different in other"),
    ],
)
def test_an_invalid_order_is_refused_and_nothing_changes(order, why):
    module, _ = layer()
    before = names(module.graph)
    with pytest.raises(UserError, match=why):
        reorder(module.graph, order.split())
    assert names(module.graph) == before


def test_a_collective_starts_at_its_place_and_its_first_reader_waits():
    module, values = layer()
    expected = module(*values)
    start_early_wait_late(module)
    order = names(module.graph)
    assert order.index("a") + 1 == order.index("s_start")
    assert order.index("s") + 1 == order.index("d")
    assert order.index("s_start") < order.index("b") < order.index("s")
    by_name = {node.name: node for node in module.graph.nodes}
    assert by_name["s_start"].target is start_all_to_all
    assert by_name["s"].target is wait
    assert all(torch.equal(a, b) for a, b in zip(module(*values), expected, strict=True))


def test_an_exchange_of_counts_is_waited_for_by_the_all_to_all_that_needs_them():
    def step(x, counts):
        received = lancet.exchange_counts(counts, 4, torch.float32, "")
        return lancet.all_to_all(x * 2.0, counts, received, "", True)

    values = torch.randn(5, 4), torch.tensor([[2, 3]])
    module = make_fx(step)(*values)
    expected = module(*values)
    start_early_wait_late(module)
    order = names(module.graph)
    places = [order.index(n) for n in ("exchange_counts_start", "mul", "exchange_counts", "all_to_all_start")]
    assert places == sorted(places)
    by_name = {node.name: node for node in module.graph.nodes}
    assert by_name["exchange_counts_start"].target is start_exchange_counts
    assert torch.equal(module(*values), expected)


def test_what_blocks_stays_in_one_piece():
    module, _ = layer()
    before = names(module.graph)
    start_early_wait_late(module, blocking={"s"})
    assert names(module.graph) == before


def test_a_sum_of_a_bucket_is_waited_for_by_the_reader_of_each_of_its_gradients():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    functional = torch.ops._c10d_functional
    bucket = graph.call_function(functional.all_reduce_coalesced.default, ([x, y], "sum", "link of 0"))
    elements = [graph.call_function(operator.getitem, (bucket, i)) for i in range(2)]
    elements = [graph.call_function(functional.wait_tensor.default, (element,)) for element in elements]
    free = graph.call_function(aten.neg.default, (x,))
    reads = graph.call_function(aten.add.Tensor, (elements[1], 1.0))
    graph.output((free, reads, elements[0]))
    module = fx.GraphModule(nn.Module(), graph)
    start_early_wait_late(module)
    order = names(module.graph)
    in_order = [bucket, free, elements[1], reads, elements[0], graph.output_node()]
    places = [order.index(node.name) for node in in_order]
    assert places == sorted(places)


def test_a_result_that_nobody_reads_is_waited_for_at_the_end():
    module, values = layer()
    d = next(n for n in module.graph.nodes if n.name == "d")
    s = next(n for n in module.graph.nodes if n.name == "s")
    d.replace_input_with(s, next(n for n in module.graph.nodes if n.name == "x"))
    start_early_wait_late(module)
    assert names(module.graph)[-2:] == ["s", "output"]
    module(*values)
