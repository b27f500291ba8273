"""How long would a fused launch take? A formula, for plans of clusters that are not at hand.

    max(communication, GEMMs) / EFFICIENCY + LAUNCH_MS, from the times of the ops on streams

Example: all-to-alls of 2.0 ms and GEMMs of 1.5 ms take 2.0 / 0.85 + 0.02 = 2.37 ms, and 3.5 ms on streams if
nothing overlaps. A filler of 0.4 ms adds nothing; one of 0.8 ms (GEMMs 2.3 ms) adds 0.35 ms.

Where the step can be measured, launches are measured with it. The formula then only says which weight
gradients become fillers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# Conservative: fused kernels of others reach 0.87 to 0.94 (MI355X, eight GPUs); ours are not measured.
EFFICIENCY = 0.85
LAUNCH_MS = 0.02
# A weight gradient becomes a filler if the launch hides at least this share of its time on a stream.
LEAST_HIDDEN = 0.5


class LaunchWork(NamedTuple):
    """What one launch does, in milliseconds as separate ops."""

    communication_ms: float
    gemm_ms: float

    def milliseconds(self, fillers_ms: float = 0.0) -> float:
        """The time of the launch, with so many milliseconds of more computation in it."""
        return max(self.communication_ms, self.gemm_ms + fillers_ms) / EFFICIENCY + LAUNCH_MS

    def part(self, parts: int) -> LaunchWork:
        """The work of one of so many copies."""
        return LaunchWork(self.communication_ms / parts, self.gemm_ms / parts)


def best_fit(candidates: Mapping[str, float], work: LaunchWork) -> list[str]:
    """The fillers of which the launch hides at least LEAST_HIDDEN, chosen longest first.

    Args: candidates: milliseconds on a stream, by name.
    """
    chosen: list[str] = []
    taken_ms = 0.0
    for name, ms in sorted(candidates.items(), key=lambda item: item[1], reverse=True):
        longer = work.milliseconds(taken_ms + ms) - work.milliseconds(taken_ms)
        if ms - longer >= LEAST_HIDDEN * ms:
            chosen.append(name)
            taken_ms += ms
    return chosen
