"""Times of collectives: piecewise linear in bytes between measured points (Lancet, section 3).

Each collective and group has its own points (1 KB, 2 KB, 4 KB, ...). One of k parts of an irregular
all-to-all is priced at C/k bytes, because its true size is unknown when planning; with this uniform
approximation, the paper reports a 3.83 % error of the iteration time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs.clusters import Cluster

POINT_BYTES = tuple(1024 << n for n in range(22))
"""Sizes of the points that are calculated for a cluster: 1 KB, 2 KB, ... 2 GB."""

Points = tuple[tuple[float, float], ...]


def interpolated(points: Points, size: float) -> float:
    """Milliseconds at a size, piecewise linear: constant below the first point, with the last slope beyond
    the last point."""
    if len(points) == 1 or size <= points[0][0]:
        return points[0][1]
    right = min(bisect_right(points, size, key=lambda p: p[0]), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    slope = (y1 - y0) / (x1 - x0)
    if size > x1:
        slope = max(slope, 0.0)
        return y1 + slope * (size - x1)
    return y0 + slope * (size - x0)


@dataclass(frozen=True)
class CommunicationModel:
    """`points[collective, group]` are (bytes on one rank, milliseconds), sorted by bytes."""

    points: Mapping[tuple[str, str], Points]

    @classmethod
    def measured(cls, samples: Mapping[tuple[str, str], Iterable[tuple[float, float]]]) -> CommunicationModel:
        """From measured (bytes, milliseconds); several samples of one size are reduced to their median."""
        return cls({key: _sorted_points(key, points) for key, points in samples.items()})

    @classmethod
    def from_cluster(
        cls,
        cluster: Cluster,
        gpus: int,
        expert_ranks: int | None = None,
        shard_ranks: int | None = None,
        tensor_ranks: int = 1,
    ) -> CommunicationModel:
        """Points calculated for `gpus` ranks that fill the nodes of a cluster one after another.

        Args: expert_ranks: consecutive ranks that share one set of experts (default: all). All-to-alls are
            among these; all-reduces, reduce-scatters and all-gathers of group "replica" among the
            `gpus / expert_ranks` ranks with the same. The bytes of the last two are those of the whole.
            shard_ranks: consecutive ranks over which parameters are sharded (HSDP), group "shards"; group
            "copies" are the `gpus / shard_ranks` ranks with the same shard. tensor_ranks: consecutive ranks
            with slices of the same layers, group "tensor"; group "world" are those with the same slices.
        """
        if gpus < 1 or (gpus > cluster.gpus_per_node and gpus % cluster.gpus_per_node):
            raise UserError(
                "number of GPUs",
                got=gpus,
                expected=f"1 to {cluster.gpus_per_node}, or a multiple of {cluster.gpus_per_node}",
                do="use whole nodes",
            )
        among = expert_ranks or gpus
        # Any two ranks may exchange data: in the worst case every GPU of a node sends to another node at
        # once.
        leaving = cluster.gpus_per_node if gpus > cluster.gpus_per_node else 0
        local = min(among, cluster.gpus_per_node)
        placement = local, among // local, 1
        points = {
            ("all_to_all", "world"): _points(lambda size: grouped_all_to_all_ms(cluster, size, *placement)),
            ("point_to_point", "world"): _points(lambda size: point_to_point_ms(cluster, size, leaving)),
        }
        sums = {"world": (gpus, tensor_ranks), "tensor": (tensor_ranks, 1)}
        if among < gpus:
            sums["replica"] = gpus, among
        if shard_ranks is not None:
            sums |= {"shards": (shard_ranks, 1), "copies": (gpus, shard_ranks)}
        for group, ranks in sums.items():
            whole = _points(partial(_all_reduce_ms, cluster, *ranks))
            points["all_reduce", group] = whole
            # An all-reduce is a reduce-scatter and an all-gather, which take the same time.
            half = tuple((size, ms / 2) for size, ms in whole)
            points["reduce_scatter", group] = points["all_gather", group] = half
        return cls(points)

    def milliseconds(self, collective: str, bytes: float, group: str = "world") -> float:
        """Time of one collective over `bytes` per rank. Below the first point it is pure latency.

        Raises:
            UserError: no points for this collective and group.
        """
        points = self.points.get((collective, group))
        if points is None:
            measured = ", ".join(f"{c} in {g}" for c, g in self.points) or "nothing"
            raise UserError(
                "communication cost", got=f"{collective} in {group}", expected=measured, do="measure it first"
            )
        return interpolated(points, bytes)

    def latency(self, collective: str) -> float:
        """Milliseconds that even an empty message takes."""
        return self.milliseconds(collective, 0.0)

    def to_json(self) -> list[dict[str, Any]]:
        """A list of JSON values, one entry per collective and group."""
        return [
            {"collective": c, "group": g, "points": [list(p) for p in points]}
            for (c, g), points in self.points.items()
        ]


def _sorted_points(key: tuple[str, str], samples: Iterable[tuple[float, float]]) -> Points:
    by_size: dict[float, list[float]] = {}
    for size, ms in samples:
        assert size >= 0, f"{key[0]}: {size} bytes"
        assert ms >= 0, f"{key[0]}: {ms} ms for {size} bytes"
        by_size.setdefault(float(size), []).append(float(ms))
    assert by_size, f"{key[0]}: no samples"
    return tuple((size, sorted(times)[len(times) // 2]) for size, times in sorted(by_size.items()))


def point_to_point_ms(cluster: Cluster, size: float, leaving: int) -> float:
    """Every GPU sends `size` bytes to another one and receives as many; `leaving` GPUs of each node send to
    other nodes, and share the node's network cards.

    Example: p3dn, 16 MB, 4 leaving: 64 MB at 10 GB/s take 6.4 ms; none leaving: 16 MB at 104 GB/s 0.15 ms.
    """
    inside = size / (cluster.intra_node_gb_per_s * cluster.link_efficiency * 1e9)
    outside = leaving * size / (cluster.inter_node_gb_per_s * cluster.link_efficiency * 1e9)
    latency = cluster.inter_node_latency_us if leaving else cluster.intra_node_latency_us
    return latency * 1e-3 + max(inside, outside) * 1e3


def _points(formula: Callable[[float], float]) -> Points:
    return tuple((float(size), formula(size)) for size in POINT_BYTES)


def grouped_all_to_all_ms(cluster: Cluster, size: float, local: int, nodes: int, at_once: int) -> float:
    """Simultaneous all-to-alls in groups as those of `grouped_all_reduce_ms`: every rank sends an equal share
    of its `size` bytes to each rank of its group. NVLink and network cards work in parallel: the slower
    counts.

    Example: p3dn, 16 GPUs, 16 MB: 8 ranks x 16 MB x 8/16 = 64 MB leave a node at 10 GB/s: 6.4 ms.
    """
    gpus = local * nodes
    inside = size * (local - 1) / gpus / (cluster.intra_node_gb_per_s * cluster.link_efficiency * 1e9)
    leaving = at_once * local * size * (gpus - local) / gpus
    outside = leaving / (cluster.inter_node_gb_per_s * cluster.link_efficiency * 1e9)
    latency = cluster.inter_node_latency_us if nodes > 1 else cluster.intra_node_latency_us
    latency += cluster.per_peer_us * (gpus - 1)
    return latency * 1e-3 + max(inside, outside) * 1e3


def _all_reduce_ms(cluster: Cluster, gpus: int, apart: int, size: float) -> float:
    """All-reduces of groups of every `apart`-th rank, all at the same time (1: one group of all ranks).
    Hierarchical: reduce-scatter and all-gather inside the node, rings of equal local ranks between nodes.

    Per GPU 2 (n-1)/n of the bytes pass NVLink; per node 2 (m-1)/m of the bytes pass the network cards.
    Example: 16 GPUs, 8 per node, expert groups of 8: no two ranks of a node have the same experts, and 8
    all-reduces between the two nodes share the network cards, each with 2 * 1/2 of its bytes.
    """
    node = min(gpus, cluster.gpus_per_node)
    local, nodes = max(1, node // apart), max(1, gpus // max(node, apart))
    return grouped_all_reduce_ms(cluster, size, local, nodes, node // local)


def grouped_all_reduce_ms(cluster: Cluster, size: float, local: int, nodes: int, at_once: int) -> float:
    """Simultaneous all-reduces; each group has `local` GPUs on each of `nodes` nodes, and `at_once` groups
    share the network cards of a node."""
    inside = 2 * size * (local - 1) / local / (cluster.intra_node_gb_per_s * cluster.link_efficiency * 1e9)
    leaving = 2 * at_once * size * (nodes - 1) / nodes
    outside = leaving / (cluster.inter_node_gb_per_s * cluster.link_efficiency * 1e9)
    latency = cluster.inter_node_latency_us if nodes > 1 else cluster.intra_node_latency_us
    return 2 * latency * 1e-3 + (inside + outside) * 1e3
