"""The MoE layer that a collective of a captured graph belongs to, for error messages when it fails.

Tracing records the module of each node, and for a backward node the module of its forward.
"""

from __future__ import annotations

from torch import fx

from lancet_kernels.graph.from_fx import is_instruction, op_name
from lancet_kernels.graph.meta import REGION
from lancet_kernels.graph.ops import STARTED, facts
from lancet_kernels.ops.comm.waiting import enter_layer

_KEYS = ("nn_module_stack", "fwd_nn_module_stack")
_COPIED = (*_KEYS, REGION.key)


def layer_name(node: fx.Node) -> str:
    """The path, in the captured module, of the module that a node belongs to; "" if it is unknown.

    Example: "model.blocks.3.feed_forward".
    """
    for key in _KEYS:
        for path, _ in reversed((node.meta.get(key) or {}).values()):
            return path.removeprefix("L['self']").removeprefix(".")
    return ""


def layers_of(graph: fx.Graph) -> dict[str, str]:
    """By name of an instruction, the path of its module, as `layer_name` gives it."""
    return {node.name: layer_name(node) for node in graph.nodes if is_instruction(node)}


def layer_meta(node: fx.Node) -> dict[str, object]:
    """The entries of `meta` to copy to a new node of the same layer, so that `layer_name` works for it, and a
    recomputed one stays one."""
    return {key: node.meta[key] for key in _COPIED if key in node.meta}


def announce_layers(module: fx.GraphModule, in_pieces: bool) -> None:
    """Insert a call of `enter_layer` before each collective of an MoE layer, if the layer changes there.

    Args: in_pieces: the graph is compiled in pieces; no call goes before an exchange of counts, which is
        inside a piece.
    """
    current = None
    for node in list(module.graph.nodes):
        of_op = facts(STARTED.get(node.target, op_name(node)))
        if not is_instruction(node) or not (of_op.kind.is_communication or of_op.of_a_layer):
            continue
        if in_pieces and op_name(node) == "lancet.exchange_counts":
            continue
        name = layer_name(node)
        if name and name != current:
            with module.graph.inserting_before(node):
                module.graph.call_function(enter_layer, (name,))
            current = name
    module.recompile()
