"""How fast can no strategy be? A bound that is cheap to calculate, however many strategies were dropped.

For stages with communication c_i and computation k_i of one microbatch, equation (5) is at least

    2 * sum of (s * c_i + (1 - s) * k_i)        for every share s between 0 and 1,

because a maximum is at least any mean of the two. That is a sum over blocks, so its minimum over all
strategies is a shortest path through the states; the largest minimum over the shares is the bound. Forward
and backward have a share each. With the share 1 it says that messages go one after the other, with 0 that
computation does, and between these that a strategy that avoids messages computes more.
"""

from __future__ import annotations

import numpy as np

from lancet_kernels.schedules.shard.sharding_costs import BACKWARD, COPIES
from lancet_kernels.schedules.shard.sharding_states import Segment, State, StateSpace, not_new, renamed

SHARES = np.linspace(0.0, 1.0, 11)


def lower_bounds(
    space: StateSpace, segments: list[Segment], *, overlaps_backward: bool = True
) -> tuple[float, float]:
    """(milliseconds of both microbatches, forward and backward; bytes of a device) that every strategy needs.

    Args: overlaps_backward: False where the backward communicates and computes one after the other.
    """
    bound = _Bound(space, overlaps_backward)
    states: dict[State, np.ndarray] = {(): np.zeros_like(bound.comm)}
    for segment in segments:
        states = bound.through(segment, states)
    if not states:
        return 0.0, 0.0
    *times, least_bytes = np.min(np.stack(list(states.values())), axis=0)
    return float(max(times)), float(least_bytes)


class _Bound:
    """Shortest paths, for all shares at once: arrays [shares of forward x shares of backward, then bytes]."""

    def __init__(self, space: StateSpace, overlaps_backward: bool) -> None:
        self.space = space
        forward, backward = (grid.ravel() for grid in np.meshgrid(SHARES, SHARES))
        if overlaps_backward:
            comm_b, comp_b = backward, 1 - backward
        else:
            comm_b = comp_b = np.ones_like(forward)
        self.comm, self.comm_b = np.append(COPIES * forward, 0.0), np.append(COPIES * comm_b, 0.0)
        self.comp = np.append(COPIES * (1 - forward + BACKWARD * comp_b), 0.0)
        self.bytes = np.append(np.zeros_like(forward), 1.0)
        self._paths: dict[tuple[int, State], dict[State, np.ndarray]] = {}

    def through(self, segment: Segment, states: dict[State, np.ndarray]) -> dict[State, np.ndarray]:
        """The shortest way to each state behind a segment."""
        behind: dict[State, np.ndarray] = {}
        for state, cost in states.items():
            inside = tuple(item for item in state if item.tensor in segment.position)
            outside = tuple(item for item in state if item.tensor not in segment.position)
            for end, more in self._paths_from(segment, inside).items():
                named = renamed(end, segment.tensors)
                _keep_smaller(behind, tuple(sorted((*named, *outside))), cost + more)
        return behind

    def _paths_from(self, segment: Segment, inside: State) -> dict[State, np.ndarray]:
        """From one state in front of a segment to all behind it; tensors by position in the segment, so that
        segments of the same structure share it."""
        key = segment.structure, renamed(inside, segment.position)
        if key not in self._paths:
            ends = self.space.walk(segment, {inside: np.zeros_like(self.comm)}, self._grow)
            self._paths[key] = {renamed(end, segment.position): cost for end, cost in ends.items()}
        return self._paths[key]

    def _grow(
        self, done: int, states: dict[State, np.ndarray], targets: dict[int, dict[State, np.ndarray]]
    ) -> None:
        for b, target in targets.items():
            for current, cost in states.items():
                for t in self.space.transitions(done, current, b):
                    more = t.comm_ms * self.comm + t.comm_backward_ms * self.comm_b
                    more += t.signature.ms * self.comp + t.bytes * self.bytes
                    # Without stages: whatever is there can be communicated.
                    _keep_smaller(target, not_new(t.state), cost + more)


def _keep_smaller(states: dict[State, np.ndarray], state: State, cost: np.ndarray) -> None:
    best = states.get(state)
    states[state] = cost if best is None else np.minimum(best, cost)
