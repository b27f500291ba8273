"""What no order of a Program can hide: a lower bound of the exposed time of each kind of communication."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lancet_kernels.graph.costs.costs import collective_of
from lancet_kernels.graph.program.program import Kind, Program
from lancet_kernels.schedules.time.clock import link_of


def exposed_bounds(program: Program, ms: Sequence[float]) -> dict[str, float]:
    """By collective, milliseconds of it during which compute idles in every order.

    A message is hidden by computation that no path connects with it; what is longer than all of that is
    exposed, for each message alone and for all of a kind together. Nothing is said where messages travel on
    several links, because what two of them expose at once counts for one.

    Args: ms: durations by position.
    """
    messages = [i for i, x in enumerate(program.instructions) if x.kind.is_communication]
    if len({link_of(program.instructions[i]) for i in messages}) > 1:
        return {}
    computes = [x.kind is Kind.COMPUTE for x in program.instructions]
    compute_ms = np.where(computes, ms, 0.0)
    alone: dict[str, float] = {}
    sent_ms: dict[str, float] = {}
    hides: dict[str, np.ndarray] = {}
    for i in messages:
        kind = collective_of(program.instructions[i])
        beside = _bits(program.reachability.independent(i), len(program))
        alone[kind] = alone.get(kind, 0.0) + max(0.0, ms[i] - float(compute_ms @ beside))
        sent_ms[kind] = sent_ms.get(kind, 0.0) + ms[i]
        hides[kind] = beside if kind not in hides else hides[kind] | beside
    together = {kind: sent_ms[kind] - float(compute_ms @ hides[kind]) for kind in sent_ms}
    return {kind: max(alone[kind], together[kind]) for kind in sorted(sent_ms)}


def _bits(bitset: int, size: int) -> np.ndarray:
    """[size] of truth values."""
    raw = np.frombuffer(bitset.to_bytes((size + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(raw, count=size, bitorder="little").astype(bool)
