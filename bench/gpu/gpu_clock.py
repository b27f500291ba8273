"""What many samples say: median and spread, and how contenders compare round by round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from lancet_kernels.measuring.timing import Clock

__all__ = ["Clock", "Times", "each_round", "spread"]

Times = dict[str, list[float]]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and the tenth and ninetieth percentile. Example: [3, 1, 2] -> median 2, p10 1, p90 3."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "median": statistics.median(ordered),
        "p10": ordered[round(0.1 * last)],
        "p90": ordered[round(0.9 * last)],
        "rounds": len(ordered),
    }


def each_round(function: Callable[..., float], *columns: Sequence[float]) -> list[float]:
    """function(a, b, ...) for the values of each round; contenders of one round saw the same clocks."""
    return [function(*values) for values in zip(*columns, strict=True)]
