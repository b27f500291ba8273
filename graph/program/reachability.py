"""Which instructions do paths connect? Directed ones with one bitset per instruction, or any.

A bitset is a Python int: 10,000 instructions take about 25 MB and well under a second.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item", bound=Hashable)


def connected(items: Iterable[Item], edges: Iterable[tuple[Item, Item]]) -> list[list[Item]]:
    """Items that edges connect, whatever their direction, group by group; each in its order among the items.

    Example: connected("abcd", ["ac"]) is [[a, c], [b], [d]].
    """
    leader = {item: item for item in items}

    def find(item: Item) -> Item:
        while leader[item] != item:
            leader[item] = leader[leader[item]]
            item = leader[item]
        return item

    for a, b in edges:
        leader[find(a)] = find(b)
    groups: dict[Item, list[Item]] = {}
    for item in leader:
        groups.setdefault(find(item), []).append(item)
    return list(groups.values())


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
