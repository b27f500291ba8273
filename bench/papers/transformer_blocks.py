"""A transformer block as a graph for `schedules.shard.segments`, and what Megatron's partitions of it cost.

    0 add  1 norm  2 qkv  3 attention  4 projection  5 add  6 norm  7 fc1  8 activation  9 fc2  10 add

Operator 0 is the last one of the preceding block. Attention is one operator, cut along batch and heads only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lancet_kernels.graph.costs.clusters import Cluster
from lancet_kernels.graph.rules.slices import Partition
from lancet_kernels.schedules.shard.partition_costs import Operator, linear, pointwise
from lancet_kernels.schedules.shard.segments import Problem, Solution, megatron, solution_of

EDGES = ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (0, 5), (5, 6), (6, 7), (7, 8), (8, 9), (9, 10), (5, 10))
MLP = ("fc1", "activation", "fc2")


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of a block. gated: the activation multiplies two halves (SwiGLU). key_value_width: the width of
    the keys, and of the values, if it differs from `width` (grouped-query attention)."""

    width: int
    hidden: int
    gated: bool = False
    key_value_width: int = 0


def block(sizes: BlockSizes, batch: int, sequence: int) -> tuple[Operator, ...]:
    """The operators of a block, for a batch of sequences."""
    b, m, d, f = batch, sequence, sizes.width, sizes.hidden
    qkv = d + 2 * (sizes.key_value_width or d)
    # Causal: half of query x key and of probabilities x value.
    attention = 2.0 * b * m * m * d
    return (
        pointwise("add 0", b, m, d, passes=3),
        pointwise("norm 1", b, m, d, passes=2),
        linear("qkv", b, m, d, qkv),
        pointwise("attention", b, m, d, splits="bh", passes=4, flops=attention),
        linear("projection", b, m, d, d),
        pointwise("add 1", b, m, d, passes=3),
        pointwise("norm 2", b, m, d, passes=2),
        linear("fc1", b, m, d, f * (2 if sizes.gated else 1)),
        pointwise("activation", b, m, f, passes=3 if sizes.gated else 2),
        linear("fc2", b, m, f, d),
        pointwise("add 2", b, m, d, passes=3),
    )


def problem(
    cluster: Cluster, sizes: BlockSizes, batch: int, sequence: int, devices: int, microbatches: int = 1
) -> Problem:
    """All partitions of a block over `devices`.

    Args: batch: of a microbatch. microbatches: of an iteration, at whose end weight gradients are summed.
    """
    operators = [replace(o, accumulated=microbatches) for o in block(sizes, batch, sequence)]
    return Problem.over(cluster, operators, EDGES, devices)


def spatial(problem: Problem) -> Problem:
    """Splits alone, what others search."""
    choices = zip(problem.operators, problem.choices, strict=True)
    return problem.restricted({o.name: [p for p in partitions if p.steps == 1] for o, partitions in choices})


def fixed(problem: Problem, partitions: Sequence[Partition], layers: int = 1) -> Solution:
    """The cost of `layers` layers with a fixed partition of each operator."""
    only = problem.restricted({o.name: (p,) for o, p in zip(problem.operators, partitions, strict=True)})
    return solution_of(only, [0] * (1 + layers * (len(partitions) - 1)))


def best_megatron(
    problem: Problem, devices: int, layers: int = 1, memory_limit: float | None = None
) -> Solution:
    """Megatron's fastest split of the devices into data and tensor parallelism that fits into memory; if none
    does, the one that needs least."""
    bits, batch = devices.bit_length() - 1, problem.operators[0].sizes["b"]
    every = [
        fixed(problem, megatron(problem.operators, data, bits - data), layers)
        for data in range(bits + 1)
        if 1 << data <= batch
    ]
    fitting = [s for s in every if memory_limit is None or s.memory_bytes <= memory_limit]
    return min(fitting, key=lambda s: s.ms) if fitting else min(every, key=lambda s: s.memory_bytes)
