"""The order asked for is the order that came out; collectives start early and are waited for late.

Parts written where the whole lies: the same numbers, no copies, and the memory model knows.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.capture import capture, split_joint
from lancet_kernels.graph.from_fx import op_name, program_from_fx
from lancet_kernels.graph.program import Program
from lancet_kernels.graph.rules.rules import cut_along
from lancet_kernels.ops.comm.all_to_all import start_all_to_all, start_exchange_counts
from lancet_kernels.schedules.rewrite.apply import (
    instruction_order,
    reorder,
    start_early_wait_late,
    wait,
    write_in_place,
)
from lancet_kernels.schedules.rewrite.cut import cut_range
from lancet_kernels.schedules.time.peak_memory import Storages, alive_bytes

aten, lancet = torch.ops.aten, torch.ops.lancet


def layer() -> tuple[fx.GraphModule, tuple[torch.Tensor, ...]]:
    """A graph with nodes of these names, p0 and p1 the elements of a pair; and inputs."""

    def step(x, counts):
        a = x + 1.0
        s = lancet.all_to_all(a, counts, counts, "", True)
        b = x * 2.0
        p0, p1 = b.split(2, 1)
        c = p0 - p1
        return s + 3.0, c

    values = torch.randn(5, 4), torch.tensor([[2, 3]])
    module = make_fx(step)(*values)
    for node, name in zip(module.graph.nodes, "x counts a s b pair p0 p1 c d".split(), strict=False):
        node.name = name
    module.recompile()
    return module, values


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
