"""How should a model for one device run on many? The search for a `ShardingStrategy`.

HiDup, section 4. `search_sharding` searches the forward Program of a microbatch. What people choose by hand
is in `schedules.shard.sharding_baselines`.
"""

from __future__ import annotations

from lancet_kernels.graph.costs.costs import Cost
from lancet_kernels.graph.program.program import Program
from lancet_kernels.schedules.shard.sharding_search import Search
from lancet_kernels.schedules.shard.sharding_states import Restriction, StateSpace
from lancet_kernels.schedules.shard.sharding_strategy import ShardingStrategy

MOST_LABELS = 200
"""Strategies kept behind each border in a large graph; those of small graphs are all kept."""
TOLERANCE = 0.01
LEAST_SLICED_BYTES = 1 << 16
PRICES = (0.1, 0.3, 0.45, 0.65, 1.0)
"""Prices of memory: such a share of the fastest strategy's time for all that a device may hold."""
SMALL = 8
"""Instructions of a graph that is searched without any of these."""


def search_sharding(
    program: Program,
    ranks: int,
    cost: Cost,
    *,
    memory_gb: float | None = None,
    restriction: Restriction | None = None,
    name: str = "hidup",
    most_labels: int | None = None,
    overlaps_backward: bool = True,
) -> ShardingStrategy:
    """The fastest strategy for the forward Program of a microbatch (section 4.2).

    Args:
        program: the forward of a model for one device, on one microbatch of the batch of all ranks together.
        ranks: how many ranks share every tensor. cost: prices instructions and collectives.
        memory_gb: of a device; strategies that need more are dropped. It is looked at only where the
            fastest strategy of all needs more.
        most_labels: strategies kept behind each border; None: all of a small graph, `MOST_LABELS` of others.
        overlaps_backward: see `Search`.
    Raises: UserError: a Program with collectives or a backward; no strategy within the memory.
    """
    is_small = len(program) <= SMALL
    least_sliced_bytes = 0 if is_small else LEAST_SLICED_BYTES
    space = StateSpace(program, ranks, cost, restriction=restriction, least_sliced_bytes=least_sliced_bytes)

    def searched(memory_bytes: float | None = None, price: float = 0.0) -> ShardingStrategy:
        return Search(
            space,
            memory_bytes=memory_bytes,
            most_labels=most_labels or (None if is_small else MOST_LABELS),
            tolerance=0.0 if is_small else TOLERANCE,
            overlaps_backward=overlaps_backward,
            price=price,
        ).run(name)

    fastest = searched()
    limit = None if memory_gb is None else memory_gb * 1e9
    if limit is None or fastest.memory_bytes <= limit:
        return fastest
    # Those that fit at some price of memory, beside the search that keeps to the limit on its way.
    candidates = [searched(limit)]
    if not is_small:
        candidates += [searched(price=share * fastest.predicted_ms / limit) for share in PRICES]
    fitting = [candidate for candidate in candidates if candidate.memory_bytes <= limit]
    return min(fitting, key=lambda candidate: candidate.predicted_ms)
