"""The cheapest partition of each operator. (PrimePar, slides "Optimization Algorithm: segmented dynamic
programming")

    Cost = sum of intraCost(n, P_n) over operators + sum of interCost(e, P_i, P_j) over edges

A *border* is an operator that only edges from the first operator cross; between two neighbouring borders is a
segment. C[a, b](P_a, P_b) is the least cost of all operators from a to b:

    within a segment    dynamic programming over its operators; those still needed are dimensions of a table
    merge segments      C[0, c] = min over P_b of C[0, b] + C[b, c] - n_b, + e(0, c)
    merge layers        C[0, 2L] = min over P_L of C[0, L] + C[L, 2L] - n_L, for equal layers by doubling

A memory limit is met by a price per byte (Lagrange): the result is the fastest that fits on the lower convex
hull of time and memory; where none fits, the one with the least memory does not either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, reduce
from itertools import pairwise

import numpy as np

from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs.clusters import Cluster
from lancet_kernels.graph.rules.slices import Partition, Primitive, home_square, replicate, split, square
from lancet_kernels.schedules.shard.partition_costs import (
    Operator,
    PartitionCost,
    intra_cost,
    redistributions,
)

PRICES = 24
"""The most prices of memory that are tried."""


Squares = Callable[[int], tuple[Primitive, ...]]
"""The squares of 4^k devices, by k, that a search may use."""


def slides_squares(k: int) -> tuple[Primitive, ...]:
    """The paper's."""
    return (square(k),)


def home_squares(k: int) -> tuple[Primitive, ...]:
    """Both whose phases begin at home."""
    return home_square(k, "n"), home_square(k, "k")


def candidates(
    operator: Operator, bits: int, node_bits: int, squares: Squares = slides_squares
) -> list[Partition]:
    """Every partition of an operator over 2^bits devices, up to the order of splits that stand side by side.

    Args: node_bits: how many of the first bits say on which node a device is: splits are not exchanged with
        others across that border, where they cost something else.
    A dimension has at least one element in each slice. Without a weight, a bit may also replicate.
    """
    every = _sequences(operator.splits, operator.has_weight, bits, node_bits, squares)
    return [p for p in every if all(p.slices(d) <= n for d, n in operator.sizes.items())]


@cache
def _sequences(
    splits: str, has_weight: bool, bits: int, node_bits: int, squares: Squares
) -> tuple[Partition, ...]:
    """Sequences of primitives. The same objects for models of all sizes: what follows from one is worked out
    once."""
    alphabet = [split(d) for d in splits]
    if not has_weight:
        alphabet.append(replicate())
    order = {p.name: n for n, p in enumerate(alphabet)}
    sides = range(1, bits // 2 + 1) if has_weight else ()
    larger = [primitive for k in sides for primitive in squares(k)]

    def sequences(used: int, before: Primitive | None) -> Iterator[tuple[Primitive, ...]]:
        if used == bits:
            yield ()
            return
        for primitive in (*alphabet, *larger):
            if used + primitive.bits > bits:
                continue
            # Of splits side by side in one order only; where a square or a node's border is between, in any.
            earlier = order.get(before.name, -1) if before is not None and used != node_bits else -1
            if order.get(primitive.name, len(order)) < earlier:
                continue
            for rest in sequences(used + primitive.bits, primitive):
                yield (primitive, *rest)

    return tuple(map(Partition, sequences(0, None)))


def megatron(operators: Sequence[Operator], data_bits: int, tensor_bits: int) -> list[Partition]:
    """Megatron's partition of each operator: data parallel over the first bits; over the others columns of
    qkv and fc1, heads, and rows of the projection and fc2, with the operators between them replicated."""
    assert operators[0].sizes["b"] >= 1 << data_bits, "the batch has a sequence for each slice"
    tensor = {"qkv": "k", "attention": "h", "projection": "n", "fc1": "k", "activation": "k", "fc2": "n"}
    return [
        Partition(
            (split("b"),) * data_bits
            + (split(tensor[o.name]) if o.name in tensor else replicate(),) * tensor_bits
        )
        for o in operators
    ]


@dataclass(frozen=True)
class Problem:
    """One layer: its first operator is the last one of the layer before (alike, counted once between two).

    operators: in the order in which they run. edges: (producer, consumer) by position. choices: the
    partitions of each operator.
    """

    cluster: Cluster
    operators: tuple[Operator, ...]
    edges: tuple[tuple[int, int], ...]
    choices: tuple[tuple[Partition, ...], ...] = field(repr=False)

    @classmethod
    def over(
        cls,
        cluster: Cluster,
        operators: Sequence[Operator],
        edges: Sequence[tuple[int, int]],
        devices: int,
        squares: Squares = slides_squares,
    ) -> Problem:
        """Every partition of every operator.

        Raises: UserError for a number of devices that is no power of two, or whose nodes are none.
        """
        bits = devices.bit_length() - 1
        node = min(cluster.gpus_per_node, devices)
        if devices != 1 << bits or node & (node - 1):
            raise UserError(
                "devices to partition over",
                got=f"{devices}, {cluster.gpus_per_node} per node",
                expected="powers of two",
                do="use 2^n devices",
            )
        node_bits = bits - (node.bit_length() - 1)
        choices = tuple(tuple(candidates(o, bits, node_bits, squares)) for o in operators)
        return cls(cluster, tuple(operators), tuple(edges), choices)

    @cached_property
    def costs(self) -> list[list[PartitionCost]]:
        """Cost of each operator under each of its partitions."""
        return [
            [intra_cost(self.cluster, operator, partition) for partition in partitions]
            for operator, partitions in zip(self.operators, self.choices, strict=True)
        ]

    @cached_property
    def edge_ms(self) -> dict[tuple[int, int], np.ndarray]:
        """Milliseconds of each edge, by the partitions of its ends."""
        return {
            (i, j): redistributions(
                self.cluster, self.operators[i], self.choices[i], self.operators[j], self.choices[j]
            ).sum(axis=0)
            for i, j in self.edges
        }

    def restricted(self, choices: Mapping[str, Sequence[Partition]]) -> Problem:
        """The same with other partitions to choose from, by name of the operator."""
        return replace(self, choices=tuple(tuple(choices[o.name]) for o in self.operators))


@dataclass(frozen=True)
class Solution:
    """The partitions of all operators of all layers, in their order, and what they cost.

    intra: sum over operators; inter_ms: over edges.
    """

    partitions: tuple[Partition, ...]
    intra: PartitionCost
    inter_ms: float

    @property
    def ms(self) -> float:
        """Time of all operators and edges: one forward and backward."""
        return self.intra.ms + self.inter_ms

    @property
    def memory_bytes(self) -> float:
        """On each device."""
        return self.intra.memory_bytes


@dataclass(frozen=True)
class _Table:
    """C[a, b]: the least cost by the partitions of both ends; `between` gives, for a choice at both ends,
    those of all operators from a to b, both included."""

    cost: np.ndarray
    between: Callable[[int, int], list[int]]


def solve(problem: Problem, layers: int = 1, memory_limit: float | None = None) -> Solution:
    """The partitions of `layers` equal layers, one behind the other, that cost least.

    Args: memory_limit: bytes on each device.
    Raises: UserError if nothing fits.
    """
    ends = problem.choices[0], problem.choices[-1]
    assert layers == 1 or ends[0] == ends[1], "a layer begins with the last operator of the one before"
    return solve_apart([(problem, layers)], memory_limit)[0]


def solve_apart(problems: Sequence[tuple[Problem, int]], memory_limit: float | None = None) -> list[Solution]:
    """The solutions of several problems, of so many equal layers each, that cost least together.

    Args: memory_limit: bytes on each device for all of them. Raises: UserError if nothing fits.
    """

    def at(price: float) -> list[Solution]:
        return [_solve_at(problem, layers, price) for problem, layers in problems]

    best = at(0.0)
    if memory_limit is None or _bytes(best) <= memory_limit:
        return best
    # More than any difference in time can be worth.
    high = 1e3 * _ms(best) / max(memory_limit, 1.0)
    fits = at(high)
    if _bytes(fits) > memory_limit:
        raise UserError(
            "memory limit",
            got=f"{memory_limit / 1e9:.3g} GB",
            expected=f"at least {_bytes(fits) / 1e9:.3g} GB on each device",
            do="use more devices, or a smaller batch",
        )
    low = 0.0
    for _ in range(PRICES):
        price = math.sqrt(low * high) if low else high / 16
        solutions = at(price)
        if _bytes(solutions) <= memory_limit:
            fits, high = min(fits, solutions, key=_ms), price
        else:
            low = price
        if low and high / low < 1.001:
            break
    return fits


def _bytes(solutions: Sequence[Solution]) -> float:
    return sum(s.memory_bytes for s in solutions)


def _ms(solutions: Sequence[Solution]) -> float:
    return sum(s.ms for s in solutions)


def _solve_at(problem: Problem, layers: int, price: float) -> Solution:
    """The least of milliseconds + price * bytes."""
    nodes = [np.array([c.ms + price * c.memory_bytes for c in costs]) for costs in problem.costs]
    doubled, parts = _layer_table(problem, nodes), []
    while True:
        if layers & 1:
            parts.append(doubled)
        layers >>= 1
        if not layers:
            break
        doubled = _merged(doubled, doubled, nodes[-1])
    table = reduce(lambda left, right: _merged(left, right, nodes[-1]), parts)
    first, end = np.unravel_index(np.argmin(table.cost), table.cost.shape)
    return solution_of(problem, table.between(int(first), int(end)))


def solution_of(problem: Problem, chosen: Sequence[int]) -> Solution:
    """What a choice costs: the position of the partition of each operator, of one layer behind the other."""
    count = len(problem.operators)
    layers = (len(chosen) - 1) // (count - 1)
    own = [0] + [1 + n % (count - 1) for n in range(len(chosen) - 1)]
    intra = sum((problem.costs[o][c] for o, c in zip(own, chosen, strict=True)), PartitionCost())
    inter = 0.0
    for layer in range(layers):
        base = layer * (count - 1)
        inter += sum(ms[chosen[base + i], chosen[base + j]] for (i, j), ms in problem.edge_ms.items())
    return Solution(
        tuple(problem.choices[o][c] for o, c in zip(own, chosen, strict=True)), intra, float(inter)
    )


def borders_of(problem: Problem) -> list[int]:
    """The operators that segments begin and end at."""
    last = len(problem.operators) - 1
    borders = {0, last} | {b for b in range(1, last) if all(i == 0 for i, j in problem.edges if i < b < j)}
    # An edge from the first operator must end at a border, where it is added.
    while wrong := {
        b for b in borders - {0, last} if any(b < j and j not in borders for i, j in problem.edges if i == 0)
    }:
        borders -= wrong
    return sorted(borders)


def _layer_table(problem: Problem, nodes: list[np.ndarray]) -> _Table:
    """Dynamic programming within segments, which are then merged from the left."""
    first, *others = pairwise(borders_of(problem))
    table = _segment_table(problem, nodes, *first)
    for a, b in others:
        table = _merged(table, _segment_table(problem, nodes, a, b), nodes[a])
        if (0, b) in problem.edge_ms:
            table = replace(table, cost=table.cost + problem.edge_ms[0, b])
    return table


def _segment_table(problem: Problem, nodes: list[np.ndarray], a: int, b: int) -> _Table:
    """Operators come one by one; one without further edges is minimized over."""
    edges = {e: ms for e, ms in problem.edge_ms.items() if a <= e[0] and e[1] <= b}
    live, cost = [a], nodes[a]
    steps: list[tuple[list[int], int, np.ndarray]] = []
    for j in range(a + 1, b + 1):
        live.append(j)
        finished = [n for n in live if n not in (a, j) and all(c <= j for p, c in edges if p == n)]
        into = {i: ms for (i, consumer), ms in edges.items() if consumer == j}
        # Row by row of the first operator: a table over all live ones would be large.
        rows, bests = [], []
        for first, row in enumerate(cost):
            row = row[..., None] + nodes[j]
            for i, ms in into.items():
                shape = [1] * row.ndim
                shape[-1] = ms.shape[1]
                if i != a:
                    shape[live.index(i) - 1] = ms.shape[0]
                row = row + (ms[first] if i == a else ms).reshape(shape)
            rest, best = live[1:], []
            for i in finished:
                axis = rest.index(i)
                best.append(row.argmin(axis=axis))
                row = row.min(axis=axis)
                rest = [n for n in rest if n != i]
            rows.append(row)
            bests.append(best)
        cost = np.stack(rows)
        for n, i in enumerate(finished):
            live.remove(i)
            steps.append((list(live), i, np.stack([best[n] for best in bests])))

    def between(first: int, last: int) -> list[int]:
        chosen = {a: first, b: last}
        for others, operator, best in reversed(steps):
            chosen[operator] = int(best[tuple(chosen[n] for n in others)])
        return [chosen[n] for n in range(a, b + 1)]

    return _Table(cost, between)


def _merged(left: _Table, right: _Table, shared: np.ndarray) -> _Table:
    """Min-plus: what one ends and the other begins with is counted once.

    Row by row: a table over all three operators would be large."""
    cost = np.empty((left.cost.shape[0], right.cost.shape[1]))
    best = np.empty(cost.shape, dtype=np.int64)
    rest = right.cost - shared[:, None]
    for first, row in enumerate(left.cost):
        sums = row[:, None] + rest
        best[first] = sums.argmin(axis=0)
        cost[first] = sums.min(axis=0)

    def between(first: int, last: int) -> list[int]:
        middle = int(best[first, last])
        return left.between(first, middle) + right.between(middle, last)[1:]

    return _Table(cost, between)
