"""From fx graphs to Programs: kinds, phases, aliases, bytes and FLOPs, by hand and of captured models."""

import operator

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lancet_kernels.graph.capture.capture import capture
from lancet_kernels.graph.costs.clusters import CommunicationModel, load_cluster
from lancet_kernels.graph.costs.costs import CostModel
from lancet_kernels.graph.from_fx import program_from_fx, program_from_graph
from lancet_kernels.graph.program import Instruction, Kind, Phase, fingerprint
from lancet_kernels.ops.moe import fused_graph  # noqa: F401  (registers the op)
from lancet_kernels.schedules.order.ordering import overlappable, weight_gradients
from tests.capturing import read_only_step
from tests.grids import few_of
from tests.model_zoo import Size

aten, collectives = torch.ops.aten, torch.ops._c10d_functional
T, D, F = 6, 8, 10
ITEM = 4


class Builder:
    """An fx graph written by hand, with fake values."""

    def __init__(self) -> None:
        self.graph, self.mode = fx.Graph(), FakeTensorMode()

    def input(self, name: str, *shape: int, dtype=torch.float32) -> fx.Node:
        node = self.graph.placeholder(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def call(self, target, *args, **kwargs) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def unpacked(self, target, *args) -> list[fx.Node]:
        """The results of a call that has several."""
        node = self.call(target, *args)
        return [self.call(operator.getitem, node, i) for i in range(len(node.meta["val"]))]

    def module(self, *results: fx.Node) -> fx.GraphModule:
        self.graph.output(results)
        return fx.GraphModule(nn.Module(), self.graph)


def test_a_linear_layer_by_hand():
    model = nn.Linear(D, F)
    captured = capture(model, (torch.randn(T, D, requires_grad=True),))
    program = program_from_fx(captured.joint)
    by_op: dict[str, list] = {}
    for i in program.instructions:
        by_op.setdefault(i.op, []).append(i)
    (forward,) = by_op["aten.addmm"]
    assert (forward.phase, forward.kind, forward.flops) == (Phase.FORWARD, Kind.COMPUTE, 2 * T * D * F)
    assert forward.bytes == ITEM * (F + T * D + D * F + T * F)
    gradients = by_op["aten.mm"]
    costs = Phase.BACKWARD, 2 * T * D * F, ITEM * (T * F + F * D + T * D)
    assert {(i.phase, i.flops, i.bytes) for i in gradients} == {costs}
    shapes = {program.tensors[i.outputs[0]].shape for i in gradients}
    assert shapes == {(T, D), (F, D)} or shapes == {(T, D), (D, F)}
    for view in by_op["aten.t"]:
        assert view.bytes == view.flops == 0
        assert program.tensors[view.outputs[0]].alias_of == view.inputs[0]
        assert program.tensors[view.outputs[0]].bytes == 0
    assert program.tensors[forward.outputs[0]].bytes == ITEM * T * F
    assert program.outputs[0] == forward.outputs[0]


def test_functional_collectives():
    b = Builder()
    x, w = b.input("x", 4, D), b.input("w", D, D)
    sent = b.call(collectives.all_to_all_single.default, x, [2, 2], [2, 2], "0")
    arrived = b.call(collectives.wait_tensor.default, sent)
    y = b.call(aten.mm.default, arrived, w)
    reduced = b.call(collectives.all_reduce.default, w, "sum", "0")
    done = b.call(collectives.wait_tensor.default, reduced)
    gathered = b.call(collectives.all_gather_into_tensor.default, y, 2, "0")
    module = b.module(y, done, b.call(collectives.wait_tensor.default, gathered))

    program = program_from_fx(module, name="by hand")
    # A start and its wait are one instruction.
    kinds = {i.name: i.kind for i in program.instructions}
    assert kinds == {
        sent.name: Kind.ALL_TO_ALL,
        y.name: Kind.COMPUTE,
        reduced.name: Kind.ALL_REDUCE,
        gathered.name: Kind.OTHER_COMMUNICATION,
    }
    at = program.index
    assert program.instructions[at[sent.name]].bytes == ITEM * 4 * D
    assert program.instructions[at[gathered.name]].bytes == ITEM * 2 * 4 * D
    assert program.instructions[at[y.name]].inputs == (sent.name, w.name)
    assert all(i.phase is Phase.FORWARD for i in program.instructions)
    assert program.inputs == ("x", "w")
    assert program.outputs == (y.name, reduced.name, gathered.name)


def test_times_of_nodes_and_of_parts():
    b = Builder()
    x, w = b.input("x", T, D), b.input("w", D, F)
    y = b.call(aten.mm.default, x, w)
    z = b.call(aten.relu.default, y)
    y.meta["milliseconds"] = 2.5
    first, second = program_from_graph(b.module(z).graph, parts={z.name: (1.5, 4)}).instructions
    assert (first.milliseconds, "parts" in first.attributes) == (2.5, False)
    assert (second.milliseconds, second.attributes["parts"]) == (1.5, 4)


def test_mutation_and_tuples():
    b = Builder()
    x = b.input("x", 4, 6)
    first = b.call(aten.split.Tensor, x, 3, 1)
    taken = b.call(lambda pair: pair[0], first)  # an op that is no OpOverload
    b.call(aten.add_.Tensor, x, 1.0)
    program = program_from_fx(b.module(taken))
    split, _, add = program.instructions
    assert split.outputs == (f"{first.name}.0", f"{first.name}.1")
    assert [program.tensors[t].alias_of for t in split.outputs] == ["x", "x"]
    assert add.mutates == ("x",)
    assert 0 in program.dependencies[2]


def test_types_that_cuda_ops_return():
    b = Builder()
    x = b.input("seed", 2, dtype=torch.uint64)
    program = program_from_fx(b.module(b.call(aten.clone.default, x)))
    assert [spec.bytes for spec in program.tensors.values()] == [16, 16]


@pytest.mark.parametrize("name", few_of(["gpt2", "bert", "llama"]))
def test_a_captured_model(name):
    size = Size(batch=5)
    step = read_only_step(name, size)
    program = step.program
    sends = [program.instructions[i] for i in program.positions(Kind.ALL_TO_ALL)]
    moe_layers = size.layers // 2
    assert [i.phase for i in sends] == [Phase.FORWARD] * 2 * moe_layers + [Phase.BACKWARD] * 2 * moe_layers
    rows = size.batch * size.sequence * size.top_k
    assert {i.bytes for i in sends} == {rows * size.width * 8}
    assert {program.tensors[i.outputs[0]].shape for i in sends} == {(rows, size.width)}
    for op in ("lancet.grouped_gemm", "lancet.grouped_gemm_dx", "lancet.grouped_gemm_dw"):
        gemms = [i for i in program.instructions if i.op == op]
        assert len(gemms) == 2 * moe_layers
        hidden = size.width * 2
        inner = 2 * hidden if name == "llama" else 4 * size.width if name == "gpt2" else hidden
        outer = hidden if name != "gpt2" else 4 * size.width
        widths = {2.0 * rows * size.width * inner, 2.0 * rows * size.width * outer}
        assert {i.flops for i in gemms} == widths
    # What the forward pass reads, no tangent reaches.
    made_later = {t for i in program.instructions if i.phase is Phase.BACKWARD for t in i.outputs}
    assert not any(made_later & set(i.inputs) for i in program.instructions if i.phase is Phase.FORWARD)


def test_nodes_without_values():
    """An attribute, a placeholder for None, and one that says nothing, read by an op with FLOPs."""
    b = Builder()
    x, bias, mask = b.input("x", T, D), b.graph.placeholder("bias"), b.graph.placeholder("mask")
    mask.meta["val"] = None
    y = b.graph.call_function(aten.mm.default, (x, b.graph.get_attr("weight")))
    with b.mode:
        y.meta["val"] = torch.empty(T, F)
    picked = b.graph.call_function(aten.where.self, (mask, y, bias))
    picked.meta["val"] = y.meta["val"]
    root = nn.Module()
    root.weight = nn.Parameter(torch.zeros(D, F))
    b.graph.output((picked,))
    program = program_from_fx(fx.GraphModule(root, b.graph))
    mm, where = program.instructions
    assert program.inputs == ("x", mm.inputs[1])
    assert program.parameters == (mm.inputs[1],)
    assert program.tensors[mm.inputs[1]].shape == (D, F)
    assert mm.flops == 2 * T * D * F
    assert mm.bytes == ITEM * (T * D + D * F + T * F)
    assert where.inputs == (y.name,)


def fsdp_step() -> fx.GraphModule:
    """x W with W gathered from shards of two ranks; the backward gathers it again and scatters dW."""
    b = Builder()
    x, shard, tangent = b.input("x", T, D), b.input("shard", D // 2, F), b.input("tangents_1", T, F)

    def gathered() -> fx.Node:
        return b.call(
            collectives.wait_tensor.default,
            b.call(collectives.all_gather_into_tensor.default, shard, 2, "0"),
        )

    y = b.call(aten.mm.default, x, gathered())
    dx = b.call(aten.mm.default, tangent, b.call(aten.t.default, gathered()))
    sent = b.call(collectives.all_to_all_single.default, dx, [T // 2, T // 2], [T // 2, T // 2], "0")
    dw = b.call(aten.mm.default, b.call(aten.t.default, x), tangent)
    scattered = b.call(collectives.reduce_scatter_tensor.default, dw, "sum", 2, "0")
    done = b.call(collectives.wait_tensor.default, scattered)
    return b.module(y, b.call(collectives.wait_tensor.default, sent), done)


def test_gathers_and_scatters_are_priced_as_such():
    program = program_from_fx(fsdp_step())
    whole = ITEM * D * F
    found = {i.op: i for i in program.instructions if i.kind is Kind.OTHER_COMMUNICATION}
    gather, scatter = found.values()
    assert (gather.attributes["collective"], gather.bytes) == ("all_gather", whole)
    assert (scatter.attributes["collective"], scatter.bytes) == ("reduce_scatter", whole)
    assert "group_name" not in gather.attributes
    cluster = load_cluster("p4de")
    cost = CostModel.for_cluster(cluster, 8)
    reduced = Instruction("r", "all_reduce", kind=Kind.ALL_REDUCE, bytes=whole)
    assert cost(gather, program.tensors) == cost(scatter, program.tensors)
    assert cost(gather, program.tensors) == cost(reduced, {}) / 2
    measured = {("all_gather", "world"): [(8.0, 3.0)], ("reduce_scatter", "world"): [(8.0, 5.0)]}
    cost = CostModel(cluster, CommunicationModel.measured(measured))
    assert [cost(i, program.tensors) for i in (gather, scatter)] == [3.0, 5.0]


def test_weight_gradients_that_are_scattered():
    program = program_from_fx(fsdp_step())
    found = [program.instructions[i].name for i in weight_gradients(program)]
    (dw,) = [
        i for i in program.instructions if i.op == "aten.mm" and program.tensors[i.outputs[0]].shape == (D, F)
    ]
    assert dw.name in found
    assert not {i.name for i in program.instructions if i.phase is Phase.FORWARD} & set(found)
    at = program.index
    assert overlappable(program)[at[dw.name]] == 1 << program.positions(Kind.ALL_TO_ALL)[0]


def test_what_a_rank_captured_before_is_no_part_of_the_structure():
    """Ranks have other numbers of contexts, and one plan."""

    def structure(context: int) -> str:
        b = Builder()
        x, weight = b.input("x", T, D), b.input("weight", T, 1)
        expert, row = (b.input(name, T, 1, dtype=torch.int64) for name in ("expert", "row"))
        counts = b.input("counts", 1, 2, dtype=torch.int32)
        w1, w2 = b.input("w1", 2, D, F), b.input("w2", 2, F, D)
        op = torch.ops.lancet.fused_experts.default
        y, _ = b.unpacked(op, x, expert, row, weight, counts, w1, None, w2, None, 9, context, "moe")
        return fingerprint(program_from_fx(b.module(y)))

    assert structure(0) == structure(1)
