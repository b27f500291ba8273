"""Milliseconds of the nodes of a traced graph: from the caller, or on a cluster (not this machine).

On a cluster computation has the time of its roofline. A collective has that of its own process group: how
many of the group's ranks share a node, on how many nodes, and how many such groups share the network cards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist
from torch import fx
from torch.distributed.distributed_c10d import _resolve_process_group

from lancet_kernels.graph.costs.clusters import Cluster
from lancet_kernels.graph.costs.communication import (
    CommunicationModel,
    grouped_all_reduce_ms,
    grouped_all_to_all_ms,
)
from lancet_kernels.graph.costs.costs import CostModel, collective_of
from lancet_kernels.graph.program.program import Program

NodeCosts = Callable[[fx.Node], float | None]
"""Milliseconds of a node; None: it does not know."""


class _Placement(NamedTuple):
    """Where the ranks of a process group are: ranks on a node, nodes, groups that share a node's network."""

    local: int
    nodes: int
    at_once: int


def milliseconds(graph: fx.Graph, program: Program, costs: NodeCosts | None, cluster: Cluster) -> list[float]:
    """The time of each instruction of a Program: that of `costs` if it knows one, or the cluster's."""
    nodes = {node.name: node for node in graph.nodes}
    computation = CostModel(cluster, CommunicationModel({}))
    result = []
    for instruction in program.instructions:
        node = nodes[instruction.name]
        ms = None if costs is None else costs(node)
        if ms is None and instruction.kind.is_communication:
            ms = _collective_ms(
                cluster, collective_of(instruction), instruction.bytes, _placement(node, cluster)
            )
        result.append(computation(instruction, program.tensors) if ms is None else ms)
    return result


def _collective_ms(cluster: Cluster, collective: str, size: float, placement: _Placement) -> float:
    if collective in ("all_to_all", "point_to_point"):
        return grouped_all_to_all_ms(cluster, size, *placement)
    # An all-reduce is a reduce-scatter and an all-gather, which take the same time.
    return grouped_all_reduce_ms(cluster, size, *placement) / (1 if collective == "all_reduce" else 2)


def _placement(node: fx.Node, cluster: Cluster) -> _Placement:
    """Where the ranks of a collective are. A group that is unknown here counts as consecutive ranks."""
    names = [argument.name for argument in node.target._schema.arguments]
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    splits = arguments.get("output_split_sizes")
    count = len(splits) if isinstance(splits, (list, tuple)) else arguments.get("group_size", 2)
    ranks = _ranks(arguments.get("group_name")) or range(count)
    nodes = len({rank // cluster.gpus_per_node for rank in ranks})
    local = math.ceil(len(ranks) / nodes)
    return _Placement(local, nodes, max(1, cluster.gpus_per_node // local) if nodes > 1 else 1)


def _ranks(group: object) -> list[int] | None:
    if isinstance(group, str) and dist.is_initialized():
        try:
            group = _resolve_process_group(group)  # type: ignore[arg-type]
        except RuntimeError:
            return None
    return dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else None
