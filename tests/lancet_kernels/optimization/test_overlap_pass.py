"""`overlap_pass` on whole steps as GraphTrainer traces them, and on joint graphs of AOTAutograd: what they
compute stays bitwise the same, on real ranks; waits stand late; what is marked stays marked."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.fx.traceback
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.capture import capture
from lancet_kernels.graph.capture.captured_graph import copy_of
from lancet_kernels.graph.costs.clusters import load_cluster
from lancet_kernels.graph.program import Kind, Phase
from lancet_kernels.optimization.overlap_pass import _placement, milliseconds, overlap_pass, read_graph
from lancet_kernels.predict.own_step import fake_ranks
from lancet_kernels.schedules.order.ordering import weight_gradients
from lancet_kernels.schedules.rewrite.apply import instruction_order
from lancet_kernels.schedules.time.peak_memory import peak_memory
from lancet_kernels.schedules.time.simulate import run
from tests.grids import few_of
from tests.lancet_kernels.optimization.sharded_step import sharded_step

WAIT = torch.ops._c10d_functional.wait_tensor.default


def whole_step(model: nn.Module, tokens: Tensor) -> fx.GraphModule:
    """Loss and gradients as one graph of (parameters, tokens); nodes that autograd runs are tagged."""
    names = list(dict(model.named_parameters()))

    def step(parameters: list[Tensor], tokens: Tensor) -> list[Tensor]:
        loss = functional_call(model, dict(zip(names, parameters, strict=True)), (tokens,))
        setup_stacktrace_preservation_hooks([loss.grad_fn])
        return [loss, *torch.autograd.grad(loss, parameters)]

    with torch.fx.traceback.preserve_node_meta():
        return make_fx(step, tracing_mode="fake")(list(model.parameters()), tokens)


def dispatched(x: Tensor, sizes: Tensor, weight: Tensor) -> list[Tensor]:
    """Rows to another rank and back, as many as the other says, and the gradients."""
    world = dist.group.WORLD
    arriving = functional.all_to_all_single(sizes, [1, 1], [1, 1], world)
    sent, received = sizes.tolist(), arriving.tolist()
    for size in sent + received:
        torch._check(size >= 0)
    rows = functional.all_to_all_single_autograd(x, received, sent, world)
    back = functional.all_to_all_single_autograd(torch.relu(rows @ weight), sent, received, world)
    loss = back.square().sum()
    return [loss, *torch.autograd.grad(loss, [x, weight])]


def step_of_data(x: Tensor, sizes: Tensor, weight: Tensor) -> fx.GraphModule:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fake = [mode.from_tensor(t, static_shapes=True) for t in (x, sizes, weight)]
    with mode, torch._dynamo.config.patch(capture_scalar_outputs=True):
        return make_fx(dispatched)(*fake)


def check_on_ranks(kind: str) -> tuple[bool, int]:
    """-> did the order change, the number of differing results; of this rank."""
    torch.manual_seed(dist.get_rank())
    if kind == "data":
        x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        inputs: list = [x, torch.tensor([4, 2] if dist.get_rank() else [1, 5]), weight]
        module = step_of_data(*inputs)
    else:
        model, tokens = sharded_step(width=16, hidden=8, experts=4), torch.randn(16, 16)
        module = whole_step(model, tokens)
        inputs = [list(model.parameters()), tokens]
        if kind == "joint":
            module = capture(model, (tokens,)).joint
            inputs = [[*model.parameters(), tokens], [torch.ones(())]]
    planned = overlap_pass(copy_of(module))
    with torch.no_grad():
        before, after = module(*inputs), planned(*inputs)
    flat = [torch.utils._pytree.tree_leaves(results) for results in (before, after)]
    assert len(flat[0]) > 2
    different = sum(not torch.equal(a, b) for a, b in zip(*flat, strict=True) if isinstance(a, Tensor))
    assert all(bool(torch.isfinite(r).all()) for r in flat[1] if isinstance(r, Tensor))
    return instruction_order(module.graph) != instruction_order(planned.graph), different


@pytest.mark.parametrize(
    ("kind", "ranks"), few_of([("step", 2), ("joint", 2), ("data", 2), ("step", 4), ("joint", 4)])
)
def test_results_stay_the_same(pool, kind, ranks):
    assert pool.run(check_on_ranks, kind, ranks=ranks) == [(True, 0)] * ranks


@pytest.fixture(scope="module")
def traced() -> fx.GraphModule:
    with fake_ranks(8):
        return whole_step(sharded_step(width=64, hidden=64, experts=16), torch.zeros(64, 64))


def same_costs(node: fx.Node) -> float:
    """A collective takes as long as two products, so that there is something to hide."""
    target = str(node.target)
    return 2.0 if "_c10d_functional" in target and "wait" not in target else 1.0 if "mm" in target else 0.01


@pytest.fixture(scope="module")
def planned(traced) -> fx.GraphModule:
    return overlap_pass(copy_of(traced), costs=same_costs, memory_limit=None)


def test_waits_stand_right_before_the_first_reader(planned):
    nodes = list(planned.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    waits = [node for node in nodes if node.target is WAIT]
    assert len(waits) > 20
    program = read_graph(planned.graph)
    views = {i.name for i in program.instructions if i.is_free and program.is_view(i)}
    for wait in waits:
        behind = nodes[place[wait] + 1 :]
        first = next(i for i, node in enumerate(behind) if node in wait.users)
        # Between a wait and its reader there are other waits of this reader, and views.
        assert all(node.name in views or node.target is WAIT for node in behind[:first])


def test_it_hides_communication_within_the_memory_limit(traced, planned):
    program = read_graph(traced.graph)
    ms = milliseconds(traced.graph, program, same_costs, load_cluster("p4de"))
    took, exposed = {}, {}
    limited = overlap_pass(copy_of(traced), costs=same_costs, memory_limit=1.0)
    for limit, module in ((1.0, limited), (None, planned)):
        order = [program.index[name] for name in instruction_order(module.graph)]
        assert limit is None or peak_memory(program, order) <= limit * peak_memory(program)
        times = run(program, ms, order)
        took[limit], exposed[limit] = times.iteration_ms, times.exposed_ms
    before = run(program, ms, range(len(program)))
    assert before.iteration_ms > took[1.0] >= took[None] - 0.2
    assert exposed[None] < 0.7 * before.exposed_ms


def test_weight_gradients_are_known_in_a_step_without_tangents(traced):
    program = read_graph(traced.graph)
    products = {program.instructions[i].op for i in weight_gradients(program)} & {"aten.mm", "aten.bmm"}
    assert products == {"aten.mm", "aten.bmm"}
    assert {i.phase for i in program.instructions} == {Phase.FORWARD, Phase.BACKWARD}


def test_nothing_but_the_order_changes(traced):
    module = copy_of(traced)
    for i, node in enumerate(module.graph.nodes):
        node.meta["recompute"] = i
    before = {node.name: (node.args, node.kwargs, dict(node.meta)) for node in module.graph.nodes}
    assert overlap_pass(module, [], costs=same_costs) is module
    after = {node.name: (node.args, node.kwargs, dict(node.meta)) for node in module.graph.nodes}
    assert list(before) != list(after)
    assert repr(sorted(before.items())) == repr(sorted(after.items()))
    inputs = [node.name for node in traced.graph.nodes if node.op == "placeholder"]
    assert [node.name for node in module.graph.nodes if node.op == "placeholder"] == inputs


def test_none_and_graphs_without_communication_stay_as_they_are(traced):
    module = copy_of(traced)
    overlap_pass(module, strategy="none")
    assert instruction_order(module.graph) == instruction_order(traced.graph)
    alone = make_fx(lambda x: (x @ x).relu())(torch.ones(2, 2))
    assert overlap_pass(alone) is alone


def test_sizes_that_depend_on_data():
    with fake_ranks(2):
        x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        module = step_of_data(x, torch.tensor([4, 2]), weight)
    sizes = {node.name: str(node.meta["val"]) for node in module.graph.nodes if "val" in node.meta}
    program = read_graph(module.graph)
    arrived = [i for i in program.instructions if i.kind is Kind.ALL_TO_ALL]
    assert [program.tensors[i.outputs[0]].shape for i in arrived] == [(2,)] + [(6, 8)] * 4
    # What is read back to the host comes before what it is the size of.
    reads = [i for i, x in enumerate(program.instructions) if x.op == "aten._local_scalar_dense"]
    assert set(reads) <= set(program.dependencies[program.index[arrived[1].name]])
    assert {node.name: str(node.meta["val"]) for node in module.graph.nodes if "val" in node.meta} == sizes


def all_reduced_twice(x: Tensor, weight: Tensor) -> Tensor:
    """A partial product that the next product waits for, and a sum that nothing waits for."""
    world = dist.group.WORLD
    first = functional.all_reduce(x @ weight, "sum", world)
    return functional.all_reduce(first @ weight, "sum", world)


def test_an_all_reduce_that_products_wait_for_is_urgent():
    with fake_ranks(2):
        module = make_fx(all_reduced_twice, tracing_mode="fake")(torch.ones(4, 4), torch.ones(4, 4))
    kinds = [i.kind for i in read_graph(module.graph).instructions if i.kind.is_communication]
    assert kinds == [Kind.OTHER_COMMUNICATION, Kind.ALL_REDUCE]


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [([0, 1, 2, 3, 4, 5, 6, 7], (8, 1, 1)), ([0, 1], (2, 1, 1)), ([0, 8], (1, 2, 8)), (range(16), (8, 2, 1))],
)
def test_collectives_cost_what_their_group_costs(ranks: Sequence[int], expected):
    cluster = load_cluster("dgx-h100")
    with fake_ranks(16):
        group = dist.new_group(ranks)

        def summed(x: Tensor) -> Tensor:
            return functional.all_reduce(x, "sum", group)

        module = make_fx(summed, tracing_mode="fake")(torch.ones(1 << 20))
        (node, *_) = (n for n in module.graph.nodes if "all_reduce" in n.name)
        assert _placement(node, cluster) == expected
        program = read_graph(module.graph)
        all_of_it = milliseconds(module.graph, program, None, cluster)
        assert all_of_it[program.index[node.name]] > 0
        given = milliseconds(module.graph, program, lambda n: 7.0 if n is node else None, cluster)
    assert given[program.index[node.name]] == 7.0
    assert [ms for i, ms in enumerate(given) if ms != 7.0] == all_of_it[1:]


def a_module_call() -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_module("linear", (x,))
    graph.output(graph.call_function(WAIT, (product,)))
    return fx.GraphModule({"linear": nn.Linear(2, 2)}, graph)


def without_values() -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(WAIT, (graph.call_function(torch.ops.aten.relu.default, (x,)),)))
    return fx.GraphModule({}, graph)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (nn.Identity, {}, "graph of overlap_pass: got Identity, expected an fx.GraphModule"),
        (a_module_call, {}, "call_module of linear"),
        (without_values, {}, 'relu_default without meta\\["val"\\]'),
        (without_values, {"strategy": "lancet"}, "no rule cuts"),
        (without_values, {"strategy": "best"}, "one of none"),
        (without_values, {"memory_limit": 0.5}, "a number from 1"),
        (without_values, {"cluster": "moon"}, "cluster"),
    ],
)
def test_what_is_refused(make, options, message):
    with pytest.raises(UserError, match=message) as refused:
        overlap_pass(make(), **options)
    assert "\n" not in str(refused.value)


def gathered_twice(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    world = dist.group.WORLD
    hidden = torch.relu(x @ functional.all_gather_tensor(first, 0, world))
    return (hidden @ functional.all_gather_tensor(second, 0, world)).square().sum()


@pytest.mark.long
def test_inductor_keeps_the_order():
    """As the page on this pass plugs it in: the second all-gather starts before the first product."""
    config = {
        "post_grad_custom_post_pass": lambda graph: overlap_pass(graph.owning_module, costs=same_costs),
        "reorder_for_peak_memory": False,
    }
    with fake_ranks(2), torch._inductor.config.patch(config):
        shards = [torch.randn(4, 8, requires_grad=True) for _ in range(2)]
        compiled = torch.compile(gathered_twice, fullgraph=True)
        _, (forward, _) = run_and_get_code(lambda: compiled(torch.randn(4, 8), *shards).backward())
    ran = re.findall(r"(all_gather_into_tensor|wait_tensor|extern_kernels\.mm)[\w.]*\(", forward)
    assert ran == ["all_gather_into_tensor"] * 2 + ["wait_tensor", "extern_kernels.mm"] * 2
