"""Times of the communication of a partition, depending on how its groups of devices spread over nodes.
(PrimePar, slides "Cost Model": an alpha and a beta for each grouping pattern)

Devices fill the nodes of a cluster one after another, so the leading bits of a device's number are its node.
Links inside a node and between nodes have different costs, and simultaneous messages from one node share its
network cards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs.clusters import Cluster
from lancet_kernels.graph.costs.communication import grouped_all_reduce_ms, point_to_point_ms
from lancet_kernels.graph.rules.slices import Partition, moves


def all_reduce_ms(cluster: Cluster, groups: Sequence[Sequence[int]], size: float) -> float:
    """Milliseconds of simultaneous all-reduces, one per group, of `size` bytes per device.

    Raises: UserError if a group has more devices on one node than on another.
    """
    if not groups:
        return 0.0
    at_once: Counter[int] = Counter()
    local = nodes = 1
    for group in groups:
        of_node = Counter(device // cluster.gpus_per_node for device in group)
        if len(set(of_node.values())) > 1:
            raise UserError(
                "group of an all-reduce",
                got=f"devices {tuple(group)}",
                expected="as many on each node",
                do="use a power of two of GPUs per node",
            )
        local, nodes = max(of_node.values()), len(of_node)
        if nodes > 1:
            at_once.update(of_node.keys())
    return grouped_all_reduce_ms(cluster, size, local, nodes, max(at_once.values(), default=0))


def shift_ms(cluster: Cluster, source_of: Sequence[int], size: float) -> float:
    """Milliseconds of a shift: every device gets `size` bytes from its source; 0 if nothing moves."""
    if not moves(source_of):
        return 0.0
    node = cluster.gpus_per_node
    leaving = Counter(s // node for d, s in enumerate(source_of) if s // node != d // node)
    return point_to_point_ms(cluster, size, max(leaving.values(), default=0))


Boxes = np.ndarray
"""[devices, dimensions, 2]: begin and end of each device's tile, as fractions of the dimension."""


def boxes(partition: Partition, phase: str, dimensions: Sequence[str], t: int) -> Boxes:
    """The tiles of a tensor at one step."""
    slices = np.array([partition.slices(d) for d in dimensions], dtype=float)
    tiles = np.array(partition.tiles(phase, dimensions, t), dtype=float).reshape(-1, len(slices))
    return np.stack([tiles, tiles + 1], axis=-1) / slices[:, None]


def travelling_shares(
    held: np.ndarray, needed: np.ndarray, gpus_per_node: int
) -> tuple[np.ndarray, np.ndarray]:
    """The traffic of redistributions between layouts [layouts, devices, dimensions, 2], for all pairs.

    Every device gets the missing part of its tile, from its own node if a device there holds it (interCost of
    the slides).

    Returns: two arrays [held layouts, needed layouts]: the largest fraction of the tensor that a device gets
        from its own node, and the largest that a node gets from other nodes.
    """
    node = np.arange(held.shape[1]) // gpus_per_node
    same_node = node[:, None] == node[None, :]
    # Replicas of a tile in one node count once, for the first device that holds it.
    alike = (held[:, :, None] == held[:, None, :]).all(axis=(-1, -2)) & same_node
    counted = ~np.tril(alike, -1).any(axis=-1)[:, None, :] & same_node
    inside, outside = np.empty((2, len(held), len(needed)))
    for n, layout in enumerate(needed):
        overlap = 1.0  # [held layouts, needing devices, holding devices]
        for d in range(layout.shape[1]):
            begin = np.maximum(layout[None, :, None, d, 0], held[:, None, :, d, 0])
            end = np.minimum(layout[None, :, None, d, 1], held[:, None, :, d, 1])
            overlap = overlap * np.maximum(end - begin, 0.0)
        in_node = (overlap * counted).sum(axis=-1)
        missing = (layout[..., 1] - layout[..., 0]).prod(axis=-1) - in_node
        inside[:, n] = (in_node - np.diagonal(overlap, axis1=1, axis2=2)).max(axis=-1)
        outside[:, n] = np.max([missing[:, node == one].sum(axis=-1) for one in np.unique(node)], axis=0)
    return inside, outside


def redistributions_ms(cluster: Cluster, inside: np.ndarray, outside: np.ndarray, size: float) -> np.ndarray:
    """Milliseconds for a tensor of `size` bytes; the slower link counts.

    Example: 8 GPUs of one p3dn node hold rows of a tensor of 64 MB and need columns: each gets 7/8 of 8 MB
    over 104 GB/s, 0.07 ms, plus 0.02 ms of latency.
    Args: inside, outside: from `travelling_shares`.
    """
    link = cluster.link_efficiency * 1e9
    inside_ms = inside * size / (cluster.intra_node_gb_per_s * link) * 1e3
    outside_ms = outside * size / (cluster.inter_node_gb_per_s * link) * 1e3
    latency = np.where(outside > 0, cluster.inter_node_latency_us, cluster.intra_node_latency_us) * 1e-3
    travels = (inside > 0) | (outside > 0)
    return np.where(travels, latency + np.maximum(inside_ms, outside_ms), 0.0)
