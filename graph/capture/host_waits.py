"""Which instructions of a graph make the host wait for a GPU? A graph with one cannot be captured as CUDA
graph.

The host needs the sizes of an irregular collective, the counts of the experts' rows where torch's grouped_mm
does not take the operands, and the shapes of results that depend on data. Other ops of this library do not
make the host wait (`ops.moe.kernel_path`).
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from lancet_kernels.graph.program.from_fx import is_instruction, op_name
from lancet_kernels.ops.moe.grouped_gemm import waits_for_counts

# Only with a group: without one there are no sizes to exchange.
_EXCHANGES = ("lancet.exchange_counts", "start_exchange_counts", "lancet.all_to_all", "start_all_to_all")
_GROUP = dict.fromkeys(_EXCHANGES, 3)
_ALWAYS = """lancet.merge_parts lancet.window_rows aten._local_scalar_dense aten.nonzero aten.masked_select
    aten.bincount aten._unique2 aten.unique_consecutive aten.unique_dim""".split()
_GROUPED = {"lancet.grouped_gemm", "lancet.grouped_gemm_dx", "lancet.grouped_gemm_dw"}
_WITH_MASKS = {"aten.index", "aten.index_put", "aten.index_put_"}


def host_waits(graph: fx.Graph) -> list[str]:
    """Names of the nodes that make the host wait, in order."""
    return [node.name for node in graph.nodes if is_instruction(node) and _waits(node)]


def _waits(node: fx.Node) -> bool:
    name = op_name(node)
    if name in _GROUP:
        return bool(node.args[_GROUP[name]])
    if name in _GROUPED:
        return waits_for_counts(*(a.meta["val"] for a in node.args if isinstance(a, fx.Node)))
    if name in _WITH_MASKS:
        indices = [index.meta["val"] for index in node.args[1] if isinstance(index, fx.Node)]
        # index_put with a mask and a single number is a masked_fill, which does not wait.
        single = name != "aten.index" and _numel(node.args[2]) == 1
        return not single and any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    if name == "aten.repeat_interleave":
        return "output_size" not in node.kwargs
    return name in _ALWAYS


def _numel(node: object) -> int:
    value = node.meta["val"] if isinstance(node, fx.Node) else node
    return value.numel() if isinstance(value, Tensor) else 1
