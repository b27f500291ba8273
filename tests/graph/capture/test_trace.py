"""Collectives of a graph know their layer when they run, forward and backward; guards are freed."""

import gc

import torch
from torch import fx, nn
from torch._dynamo.guards import CheckFunctionManager

from lancet_kernels import ops
from lancet_kernels.graph.capture.run import GraphRunner, Recorder
from lancet_kernels.graph.capture.trace import announce_layers, layer_name, trace
from lancet_kernels.graph.program import Phase
from lancet_kernels.ops.comm.waiting import current_layer, enter_layer

ALL_TO_ALL = torch.ops.lancet.all_to_all.default


def stack(path: str) -> dict:
    return {"1": ("L['self']", object), "2": (f"L['self'].{path}", object)}


def graph_of_two_layers() -> fx.GraphModule:
    """all_to_all of layer a, again, of b, and one of a's backward."""
    graph = fx.Graph()
    rows, count = graph.placeholder("rows"), graph.placeholder("count")
    for path in ("blocks.0.a", "blocks.0.a", "blocks.1.b", "blocks.0.a"):
        rows = graph.call_function(ALL_TO_ALL, (rows, count, count, "", True))
        rows.meta["nn_module_stack"] = stack(path)
    rows.meta["fwd_nn_module_stack"] = rows.meta.pop("nn_module_stack")
    graph.output(rows)
    return fx.GraphModule({}, graph)


def test_a_layer_is_announced_where_it_changes():
    module = graph_of_two_layers()
    names = [layer_name(n) for n in module.graph.find_nodes(op="call_function", target=ALL_TO_ALL)]
    assert names == ["blocks.0.a", "blocks.0.a", "blocks.1.b", "blocks.0.a"]
    announce_layers(module, in_pieces=False)
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    calls = [n.args[0] if n.target is enter_layer else "op" for n in calls]
    assert calls == ["blocks.0.a", "op", "op", "blocks.1.b", "op", "blocks.0.a", "op"]


def test_a_graph_that_runs_enters_its_layers():
    rows, count = torch.randn(6, 4), torch.full((1, 2), 3)
    enter_layer("")
    recorder = Recorder(on=True)
    runner = GraphRunner(graph_of_two_layers(), Phase.FORWARD, recorder)
    assert torch.equal(runner([rows, count]), rows)
    assert current_layer() == "blocks.0.a"
    assert len(recorder.computed) == 4, "announcing a layer is no instruction"
    assert ops.all_to_all(rows, count, count, "", True).equal(rows)


def test_guards_are_freed_with_their_owner():
    """torch's finalizers would keep them as long as `torch.relu`, of which the trace takes note."""

    def alive() -> int:
        gc.collect()
        return sum(type(one) is CheckFunctionManager for one in gc.get_objects())

    before = alive()
    _, _, assumptions = trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (torch.ones(2, 2),), {})
    guards = assumptions()
    assert alive() == before + 1
    del guards, assumptions
    torch.compiler.reset()
    assert alive() == before
