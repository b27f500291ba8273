"""MoE layer over a paced (emulated) wire on virtual PEs: how much of what `none` exposes does `fused` hide?

    hidden = 1 - exposed communication of fused / that of none       1: all of it

`gpu_wire.py` says what the ways are and what is exposed. The rate of the wire is chosen so that communication
takes 40 % of `none`, forward and backward together. All ways run the same kernel's tiles, so results are
equal bit for bit (checked).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
from gpu_clock import Clock, Times, each_round, spread
from gpu_overlap import FusedLayer
from gpu_sizes import Sizes
from gpu_wire import JITTED, WAYS, Pe, Traffic, pace, played, rate_for
from held_back import staged
from torch import Tensor
from virtual_pes import VirtualPes

HIDDEN_GOAL, OVER_STREAMS_GOAL = 0.8, 1.0
FAST = math.inf
# ms by (way, rate of the wire in GB/s)
Taken = dict[tuple[str, float], list[float]]


class PacedLayer:
    """A layer of the sizes on W virtual PEs, each behind an emulated wire."""

    def __init__(self, sizes: Sizes, world: int, device: torch.device, dtype: torch.dtype) -> None:
        self.virtual = VirtualPes(world, device)
        self.pes = [Pe(self.virtual, rank) for rank in range(world)]
        self.layer = FusedLayer(sizes, world, device, dtype, pes=self.virtual, spare_programs=1)
        self.traffic = Traffic(self.layer, self.pes)
        self.saved: list = [None] * world

    def forward(self, way: str, rank: int) -> Tensor:
        layer, pe = self.layer, self.pes[rank]
        run, _ = played(way, pe, self.traffic)
        with staged(run):
            out, self.saved[rank] = layer.forward(rank)
        return out

    def backward(self, way: str, rank: int) -> tuple[Tensor, ...]:
        layer, pe = self.layer, self.pes[rank]
        _, run = played(way, pe, self.traffic)
        with staged(run):
            g = layer.backward(rank, self.saved[rank])
        layer.forwards[rank].release(self.saved[rank].use)
        return g.dx, g.dw1, g.dw2, g.dweight

    def once(self, way: str, time_it: Callable[[Callable], float]) -> tuple[dict[str, float], list[Tensor]]:
        """A pass of all PEs. -> ms of each direction, and all results."""
        ms, found = {}, []

        def forward() -> None:
            found.extend(self.virtual.each(partial(self.forward, way)))

        def backward() -> None:
            for gradients in self.virtual.each(partial(self.backward, way)):
                found.extend(gradients)

        ms["forward"], ms["backward"] = time_it(forward), time_it(backward)
        return ms, found

    def passes(self, rank: int) -> list:
        """Every way, forward and backward, for rehearsals. -> all results, more than later at once."""
        return [(self.forward(way, rank), self.backward(way, rank)) for way in WAYS]

    def check(self) -> None:
        self.layer.check()
        for pe in self.pes:
            pe.check()


def measure(clock: Clock, paced: PacedLayer, rounds: int, warmup: int) -> Iterator[dict]:
    """A figure for both directions together, which has the goals, and one for each."""
    paced.virtual.rehearse(paced.passes, *JITTED)
    none_ms = [sum(paced.once("none", clock.once)[0].values()) for _ in range(max(1, warmup))]
    rate = rate_for(2 * paced.traffic.bytes_of_a_pass, statistics.median(none_ms))
    taken: dict[str, Taken] = {"forward": {}, "backward": {}}
    same, first = True, None
    for number in range(warmup + rounds):
        for gb_per_s in (FAST, rate):
            pace(paced.pes, gb_per_s)
            for way in WAYS:
                ms, found = paced.once(way, clock.once)
                paced.check()
                first = first or [t.clone() for t in found]
                same = same and all(map(torch.equal, found, first))
                for direction, value in ms.items() if number >= warmup else ():
                    taken[direction].setdefault((way, gb_per_s), []).append(value)
    pace(paced.pes, FAST)
    both = {
        key: [f + b for f, b in zip(taken["forward"][key], taken["backward"][key], strict=True)]
        for key in taken["forward"]
    }
    layer = paced.layer
    sizes = {**layer.sizes.letters(), "W": layer.world, "C": layer.capacity, "rows": layer.rows}
    for name, ms in (("layer", both), *((f"layer {direction}", ms) for direction, ms in taken.items())):
        passes = 2 if ms is both else 1
        yield figure(name, ms, rate, passes * paced.traffic.bytes_of_a_pass, has_goals=ms is both) | {
            "sizes": sizes,
            "name": layer.sizes.name,
            "every_way_gives_the_same_bits": same,
        }


def figure(name: str, taken: Taken, rate: float, bytes_sent: int, has_goals: bool) -> dict:
    """What both the layer and the step say. taken: of every way, with the fast and with the paced wire."""
    ms: Times = {way: taken[way, rate] for way in WAYS}
    ms |= {f"{way}, fast link": taken[way, FAST] for way in WAYS}
    exposed = {
        way: each_round(lambda slow, fast: slow - fast, taken[way, rate], taken[way, FAST]) for way in WAYS
    }
    # Where `none` exposes nothing there is nothing to hide: only in smoke runs.
    pairs = zip(exposed["fused"], exposed["none"], strict=True)
    hidden = [1 - fused / none for fused, none in pairs if none > 0]
    over = each_round(lambda streams, fused: streams / fused, ms["streams"], ms["fused"])
    return {
        "figure": f"paced link (emulated), {name}",
        "link": "emulated: signals handed on by the device clock",
        "gb_per_s": rate,
        "bytes": bytes_sent,
        "wire_ms": bytes_sent / rate * 1e-6,
        "ms": {who: spread(values) for who, values in ms.items()},
        "exposed_ms": {way: spread(values) for way, values in exposed.items()},
        "ratios": [
            {"what": what, "value": spread(values), "goal": goal if has_goals else None}
            for what, values, goal in (
                ("hidden by fused of what none exposes", hidden, HIDDEN_GOAL),
                ("time of streams over fused", over, OVER_STREAMS_GOAL),
            )
            if values
        ],
    }
