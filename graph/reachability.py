"""Reachability over directed paths, with one bitset per instruction.

A bitset is a Python int: 10,000 instructions take about 25 MB and well under a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Reachability:
    """Bit j of `ancestors[i]` says that a directed path leads from j to i; `descendants` is its transpose."""

    ancestors: list[int]
    descendants: list[int]

    @classmethod
    def of(cls, dependencies: Sequence[Sequence[int]]) -> Reachability:
        """From the direct dependencies of a valid order (each points to earlier positions only).

        Example: `[(), (0,), (1,)]` gives ancestors `[0b000, 0b001, 0b011]`.
        """
        ancestors = [0] * len(dependencies)
        descendants = [0] * len(dependencies)
        for i, before in enumerate(dependencies):
            reach = 0
            for j in before:
                reach |= ancestors[j] | (1 << j)
            ancestors[i] = reach
        for i in reversed(range(len(dependencies))):
            reach = descendants[i] | (1 << i)
            for j in dependencies[i]:
                descendants[j] |= reach
        return cls(ancestors, descendants)

    def reaches(self, i: int, j: int) -> bool:
        """Is there a directed path from i to j?"""
        return bool(self.descendants[i] >> j & 1)

    def independent(self, i: int) -> int:
        """Bitset of the instructions without a path to or from i, in either direction, i itself excluded."""
        everything = (1 << len(self.ancestors)) - 1
        return everything & ~(self.ancestors[i] | self.descendants[i] | 1 << i)


def bitset(positions: Sequence[int]) -> int:
    """The int with exactly these bits set."""
    bits = 0
    for p in positions:
        bits |= 1 << p
    return bits
