"""Which MoE layer does a collective of a captured graph belong to? For the message when it fails.

Tracing notes in which module a node was made, and for a node of the backward in which one its forward was.
"""

from __future__ import annotations

from torch import fx

from lancet_kernels.graph.from_fx import is_collective, is_instruction, op_name
from lancet_kernels.ops.waiting import enter_layer

_KEYS = ("nn_module_stack", "fwd_nn_module_stack")
# Collectives of a layer that the Program does not count as such.
_OF_A_LAYER = ("lancet.exchange_counts", "lancet.fused_experts", "start_all_to_all")


def layer_name(node: fx.Node) -> str:
    """The name, within the captured module, of the module that a node belongs to; "" if that is unknown.

    Example: "model.blocks.3.feed_forward".
    """
    for key in _KEYS:
        for path, _ in reversed((node.meta.get(key) or {}).values()):
            return path.removeprefix("L['self']").removeprefix(".")
    return ""


def layer_meta(node: fx.Node) -> dict[str, object]:
    """What another node of the same layer needs in its `meta`, so that `layer_name` knows it."""
    return {key: node.meta[key] for key in _KEYS if key in node.meta}


def announce_layers(module: fx.GraphModule, in_pieces: bool) -> None:
    """Put a call of `enter_layer` before each collective of an MoE layer, wherever the layer changes.

    Args: in_pieces: the graph is compiled in pieces; an exchange of counts, which is inside one, gets none.
    """
    current = None
    for node in list(module.graph.nodes):
        if not is_instruction(node) or not (is_collective(node) or op_name(node).startswith(_OF_A_LAYER)):
            continue
        if in_pieces and op_name(node) == "lancet.exchange_counts":
            continue
        name = layer_name(node)
        if name and name != current:
            with module.graph.inserting_before(node):
                module.graph.call_function(enter_layer, (name,))
            current = name
    module.recompile()
