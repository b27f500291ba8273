"""Costs of an operator under a partition, and of an edge between two operators. (PrimePar, slides "Cost
Model")

    intraCost   computation, collectives, and the ring steps that computation does not hide
    interCost   redistribution between an operator and the next one, forward and backward
    memory      of one device: weights with gradients and optimizer states, and what the backward needs

Dimensions: b batch, m rows of a sequence, n features summed over in the forward, k features out, h heads.

Devices fill the nodes of a cluster one after another, so the leading bits of a device's number are its node.
Communication costs by how its groups of devices spread over nodes (the slides have an alpha and a beta for
each grouping pattern): simultaneous messages from one node share its network cards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from lancet_kernels.graph.costs.clusters import Cluster, grouped_all_reduce_ms, point_to_point_ms
from lancet_kernels.graph.costs.costs import roofline_ms
from lancet_kernels.graph.rules.slices import (
    BACKWARD,
    FORWARD,
    GRADIENT,
    LINEAR,
    Operand,
    Partition,
    Product,
    all_reduces,
    begins_at_home,
    hand_over,
    moves,
    shifts,
)


def all_reduce_ms(cluster: Cluster, groups: Sequence[Sequence[int]], size: float) -> float:
    """Milliseconds of simultaneous all-reduces, one per group, of `size` bytes per device."""
    if not groups:
        return 0.0
    at_once: Counter[int] = Counter()
    local = nodes = 1
    for group in groups:
        by_node = Counter(device // cluster.gpus_per_node for device in group)
        assert len(set(by_node.values())) == 1, "as many devices on each node"
        local, nodes = max(by_node.values()), len(by_node)
        if nodes > 1:
            at_once.update(by_node.keys())
    return grouped_all_reduce_ms(cluster, size, local, nodes, max(at_once.values(), default=0))


def shift_ms(cluster: Cluster, source_of: Sequence[int], size: float) -> float:
    """Milliseconds of a shift: every device gets `size` bytes from its source; 0 if nothing moves."""
    if not moves(source_of):
        return 0.0
    node = cluster.gpus_per_node
    leaving = Counter(s // node for d, s in enumerate(source_of) if s // node != d // node)
    return point_to_point_ms(cluster, size, max(leaving.values(), default=0))


def boxes(partition: Partition, phase: str, dimensions: Sequence[str], t: int) -> np.ndarray:
    """[devices, dimensions, 2]: begin and end of each device's tile of a tensor at one step, as fractions of
    the dimension."""
    slices = np.array([partition.slices(d) for d in dimensions], dtype=float)
    tiles = np.array(partition.tiles(phase, dimensions, t), dtype=float).reshape(-1, len(slices))
    return np.stack([tiles, tiles + 1], axis=-1) / slices[:, None]


def travelling_shares(
    held: np.ndarray, needed: np.ndarray, gpus_per_node: int
) -> tuple[np.ndarray, np.ndarray]:
    """The traffic of redistributions between layouts [layouts, devices, dimensions, 2], for all pairs. Every
    device gets the missing part of its tile, from its own node if a device there holds it.

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


DTYPE, ITEM = "float16", 2
"""Dtype and bytes of a number in weights and activations."""
WEIGHT_BYTES = 16
"""Per parameter in mixed precision with Adam: weight and gradient in 2 bytes, master weight and two moments
in 4."""


@dataclass(frozen=True)
class Operator:
    """A node of the graph: what each phase computes, and which primitives may cut it.

    flops: of the forward; every other phase of a product takes as many. passes: how often a phase of an
    operator that is no product reads or writes a tensor of its size. normalized: a dimension whose statistics
    have to be summed when it is cut.
    """

    name: str
    sizes: Mapping[str, int] = field(hash=False)
    products: Mapping[str, Product] = field(hash=False)
    splits: str
    has_weight: bool = False
    flops: float = 0.0
    passes: int = 0
    normalized: str = ""

    def bytes(self, tensor: Operand) -> float:
        """Size of the whole tensor."""
        return ITEM * math.prod(self.sizes[d] for d in tensor.dimensions)

    @property
    def result(self) -> Operand:
        return self.products[FORWARD].result


def linear(name: str, b: int, m: int, n: int, k: int) -> Operator:
    """O[b, m, k] = I[b, m, n] W[n, k]."""
    return Operator(name, {"b": b, "m": m, "n": n, "k": k}, LINEAR, "bmnk", True, 2.0 * b * m * n * k)


def pointwise(
    name: str, b: int, m: int, k: int, *, splits: str = "bmk", passes: int = 2, flops: float = 0.0
) -> Operator:
    """An operator whose result has the form of its input: activation, addition; attention along its heads."""
    last = splits[-1]
    dimensions = ("b", "m", last)
    i, o, di, do = (Operand(n, dimensions) for n in ("I", "O", "dI", "dO"))
    products = {FORWARD: Product(FORWARD, o, (i,)), BACKWARD: Product(BACKWARD, di, (do, i))}
    normalized = "k" if name.startswith("norm") else ""
    return Operator(name, {"b": b, "m": m, last: k}, products, splits, False, flops, passes, normalized)


@dataclass(frozen=True)
class PartitionCost:
    """Milliseconds, and bytes on one device."""

    compute_ms: float = 0.0
    collective_ms: float = 0.0
    """All-reduces, which nothing hides."""
    ring_ms: float = 0.0
    exposed_ring_ms: float = 0.0
    """Time of ring steps beyond the computation of their step."""
    memory_bytes: float = 0.0

    @property
    def ms(self) -> float:
        return self.compute_ms + self.collective_ms + self.exposed_ring_ms

    def __add__(self, other: PartitionCost) -> PartitionCost:
        return PartitionCost(**{name: ms + getattr(other, name) for name, ms in vars(self).items()})


def intra_cost(cluster: Cluster, operator: Operator, partition: Partition) -> PartitionCost:
    """Cost of one operator, all its phases."""
    total = PartitionCost(memory_bytes=_memory(operator, partition))
    for product in operator.products.values():
        total += phase_times(cluster, operator, partition, product).cost
    if operator.has_weight:
        total += _alignment_cost(cluster, operator, partition)
    return total


@dataclass(frozen=True)
class PhaseTimes:
    """Milliseconds of one phase of an operator: of the computation of each step, of the tensors whose tiles
    travel beside each step, and of collectives."""

    step_ms: float
    travelling: tuple[tuple[tuple[str, float], ...], ...]
    collective_ms: float

    @property
    def cost(self) -> PartitionCost:
        beside = [sum(ms for _, ms in tiles) for tiles in self.travelling]
        return PartitionCost(
            compute_ms=self.step_ms * len(beside),
            collective_ms=self.collective_ms,
            ring_ms=sum(beside),
            exposed_ring_ms=sum(max(0.0, ms - self.step_ms) for ms in beside),
        )


def phase_times(cluster: Cluster, operator: Operator, partition: Partition, product: Product) -> PhaseTimes:
    """Times of one phase under a partition."""
    tensors = (*product.operands, product.result)
    tile_bytes = [_tile_bytes(operator, partition, t) for t in tensors]
    every = dict.fromkeys(d for t in tensors for d in t.dimensions)
    flops = operator.flops / _parts(partition, tuple(every))
    if operator.passes:
        # The backward of what is no product takes twice its forward.
        twice = 1 + (product.phase == BACKWARD)
        flops, moved = flops * twice, operator.passes * twice * tile_bytes[-1]
    else:
        moved = sum(tile_bytes)
    travelling: list[list[tuple[str, float]]] = [[] for _ in range(partition.steps)]
    for tensor, size in zip(tensors, tile_bytes, strict=True):
        is_result = tensor is product.result
        for t, sources in enumerate(shifts(partition, product.phase, tensor)):
            # Operands of step t + 1 travel beside step t, a sum that moves on beside the step it moves to.
            if ms := shift_ms(cluster, sources, size):
                travelling[t + is_result].append((tensor.name, ms))
    if operator.has_weight and product.phase == GRADIENT and not begins_at_home(partition):
        # The only tile of the weight goes back to where the forward begins: beside the last step.
        weight = operator.products[FORWARD].operands[1]
        back = hand_over(partition, weight, (BACKWARD, -1), (FORWARD, 0))
        if ms := shift_ms(cluster, back, _tile_bytes(operator, partition, weight)):
            travelling[-1].append((weight.name, ms))
    groups = all_reduces(partition, product) if product.summed else ()
    collective_ms = all_reduce_ms(cluster, groups, tile_bytes[-1])
    if operator.normalized:
        collective_ms += _statistics_ms(cluster, operator, partition, product)
    step_ms = roofline_ms(cluster, DTYPE, flops, moved)
    return PhaseTimes(step_ms, tuple(map(tuple, travelling)), collective_ms)


def _statistics_ms(cluster: Cluster, operator: Operator, partition: Partition, product: Product) -> float:
    """Two numbers of 4 bytes a row, summed over the devices that share it."""
    rows = Operand("rows", tuple(d for d in product.result.dimensions if d != operator.normalized))
    groups = all_reduces(partition, Product(product.phase, rows, (product.result,)))
    size = 8 * math.prod(operator.sizes[d] for d in rows.dimensions) / _parts(partition, rows.dimensions)
    return all_reduce_ms(cluster, groups, size)


def _alignment_cost(cluster: Cluster, operator: Operator, partition: Partition) -> PartitionCost:
    """Tiles that one phase leaves on other devices than the next one begins with."""
    i, weight = operator.products[FORWARD].operands
    do, dweight = operator.products[BACKWARD].operands[0], operator.products[GRADIENT].result
    ms, step = 0.0, 0 if begins_at_home(partition) else -1
    for tensor, before, after in (
        (weight, (FORWARD, step), (BACKWARD, 0)),
        (do, (BACKWARD, step), (GRADIENT, 0)),
        (i, (FORWARD, step), (GRADIENT, 0)),
        (dweight, (GRADIENT, -1), (FORWARD, 0)),
    ):
        source_of = hand_over(partition, tensor, before, after)
        ms += shift_ms(cluster, source_of, _tile_bytes(operator, partition, tensor))
    return PartitionCost(ring_ms=ms, exposed_ring_ms=ms)


def _memory(operator: Operator, partition: Partition) -> float:
    """Weights with gradients and optimizer states, and the input, which the backward needs (not of an
    addition)."""
    operands, held = operator.products[FORWARD].operands, 0.0
    if operator.has_weight:
        operands, weight = operands[:1], operands[1]
        held = _tile_bytes(operator, partition, weight) / ITEM * WEIGHT_BYTES
    if not operator.name.startswith("add"):
        held += sum(_tile_bytes(operator, partition, t) for t in operands)
    return held


def _parts(partition: Partition, dimensions: tuple[str, ...]) -> int:
    """Into how many tiles a tensor is cut."""
    return math.prod(partition.slices(d) for d in dimensions)


def _tile_bytes(operator: Operator, partition: Partition, tensor: Operand) -> float:
    return operator.bytes(tensor) / _parts(partition, tensor.dimensions)


def redistributions(
    cluster: Cluster,
    producer: Operator,
    befores: Sequence[Partition],
    consumer: Operator,
    afters: Sequence[Partition],
) -> np.ndarray:
    """Milliseconds of redistribution on one edge, of the result in the forward and of its gradient in the
    backward, for every two partitions: [2, befores, afters]. Dimensions correspond by position."""
    result, operand = producer.result, consumer.products[FORWARD].operands[0]
    gradient, needed = consumer.products[BACKWARD].result, producer.products[BACKWARD].operands[0]
    size = producer.bytes(result)
    forward = _between(
        cluster,
        [boxes(p, FORWARD, result.dimensions, -1) for p in befores],
        [boxes(p, FORWARD, operand.dimensions, 0) for p in afters],
        size,
    )
    backward = _between(
        cluster,
        [boxes(p, BACKWARD, gradient.dimensions, -1) for p in afters],
        [boxes(p, BACKWARD, needed.dimensions, 0) for p in befores],
        size,
    )
    return np.stack([forward, backward.T])


def _between(cluster: Cluster, held: list[np.ndarray], needed: list[np.ndarray], size: float) -> np.ndarray:
    """Redistribution of every pair; many partitions have the same tiles, so of every pair of layouts once."""
    held_layouts, held_rows = np.unique(np.stack(held), axis=0, return_inverse=True)
    needed_layouts, needed_rows = np.unique(np.stack(needed), axis=0, return_inverse=True)
    shapes = held_layouts.shape, needed_layouts.shape
    shares = _shares(held_layouts.tobytes(), needed_layouts.tobytes(), *shapes, cluster.gpus_per_node)
    costs = redistributions_ms(cluster, *shares, size)
    return costs[np.ix_(held_rows.ravel(), needed_rows.ravel())]


@lru_cache(maxsize=64)
def _shares(
    held: bytes, needed: bytes, held_shape: tuple, needed_shape: tuple, gpus_per_node: int
) -> tuple[np.ndarray, np.ndarray]:
    """Alike for models of all sizes."""
    one, other = np.frombuffer(held).reshape(held_shape), np.frombuffer(needed).reshape(needed_shape)
    return travelling_shares(one, other, gpus_per_node)
