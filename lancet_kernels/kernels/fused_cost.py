"""The time of a fused launch as a function of the bytes put, the tile work, and the programs that put.

    B  bytes of the rows that this rank puts     G  FLOPs of the experts' GEMMs     n  programs of the launch
    c  programs that put while others compute tiles that need not wait (SMs for communication)
    I  FLOPs of independent GEMMs (fillers: weight gradients of other layers)
    E  the part of G whose rows have arrived while others are still being put: (W - 1) / W of the tiles

    rate of p programs that put    R(p) = min(link, p * rate of a program)
    time of tiles without a wait   t = (E + I) / ((n - c) * r)   r: FLOP/s of a program; c programs put
    bytes put during that time     B_c = min(B, t * R(c))        then n programs put the rest, B_n = B - B_c
    T_put  = latency + B_c / R(c) + B_n / R(n)
    T_comm = T_put + B / R(n)                                    the same rows return
    T_gemm = (G + I) / (n r) + (c / n) B_c / R(c) + B_n / R(n)   a program that puts does not compute
    T      = launch + max(T_comm, T_gemm) / eta

T_gemm includes the time of the puts, because the task list mixes puts with tiles as long as there are tiles
that need not wait; then the whole grid puts the rest. Results return during the second GEMM. E: a rank's own
rows are available at once, those of rank-1 when the puts to rank+2 begin, and so on; those of the last rank
arrive last.
eta is the efficiency: max(T_comm, T_gemm) divided by the time that the launch really takes.

Example, 2 ranks. n 132, c 16; link 400 GB/s, 10 GB/s and 5 TFLOP/s a program, latency 0.01 ms, launch 0.03
ms, eta 0.9. B 200 MB, G 1e12, E 0.5e12: R(16) = 160 GB/s, t = 0.862 ms, B_c = 138 MB, T_put = 1.027, T_comm
= 1.527, T_gemm = 1.515 + 0.104 + 0.155 = 1.775, T = 2.002 ms. With I 0.232e12: t = 1.262 is longer than the
1.25 ms of all puts, T_put = 1.26, T_gemm = 1.867 + 0.152 = 2.018, T = 2.272 ms. The rider costs 0.27 ms; on a
GPU of its own it would take 0.35.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

DIRECTIONS = ("forward", "backward")
# Bytes over GB/s, FLOPs over TFLOP/s: to milliseconds.
MS_OF_GB_PER_S, MS_OF_TFLOPS = 1e-6, 1e-9


@dataclass(frozen=True)
class LaunchWork:
    """What one launch moves and computes.

    Attributes:
        bytes: of the rows that this rank puts, those to itself included; as many come back.
        expert_flops: of the experts' GEMMs; independent_flops: of GEMMs of other layers.
        programs: size of the grid; comm_programs: how many of it put while others have something to do.
        early_flops: of expert_flops, those of rows that are here before the last ones are put.
    Raises ValueError for numbers that are none, or negative.
    """

    bytes: float
    expert_flops: float
    independent_flops: float = 0.0
    programs: int = 1
    comm_programs: int = 1
    early_flops: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_number(field.name, getattr(self, field.name))
        grid = self.programs, self.comm_programs
        if not all(isinstance(n, int) for n in grid) or not 1 <= self.comm_programs <= self.programs:
            raise ValueError(f"{self.comm_programs} of {self.programs} programs put")

    @classmethod
    def of_pass(
        cls,
        direction: str,
        rows: float,
        width: int,
        hidden: int,
        activation: str,
        itemsize: int,
        ranks: int,
        **given,
    ) -> LaunchWork:
        """One direction of an MoE layer on `ranks` ranks: `rows` rows of `width`, experts of width `hidden`.

        The backward has dX and dW of both GEMMs: twice the FLOPs, and dW needs all rows. Args: given: the
        other attributes.
        """
        wide = 2 * hidden if activation == "swiglu" else hidden
        tiles = 2.0 * rows * width * (wide + hidden)
        flops = tiles if direction == "forward" else 2 * tiles
        early = tiles * (ranks - 1) / ranks
        return cls(float(rows * width * itemsize), flops, early_flops=early, **given)


@dataclass(frozen=True)
class CostPoint:
    """A launch that was timed: milliseconds of this work. Without bytes: GEMMs alone; without FLOPs: puts.

    direction: "forward" or "backward".
    """

    direction: str
    work: LaunchWork
    ms: float

    def __post_init__(self) -> None:
        _check_number("ms", self.ms)
        if self.direction not in DIRECTIONS or self.ms == 0:
            raise ValueError(f"direction {self.direction!r}, {self.ms} ms")

    @property
    def kind(self) -> str:
        """ "put", "gemm" or "fused"."""
        if self.work.expert_flops + self.work.independent_flops == 0:
            return "put"
        return "fused" if self.work.bytes else "gemm"


@dataclass(frozen=True)
class FusedCost:
    """The function above for one direction of a layer on one device. Call `milliseconds`.

    Attributes: program_gb_per_s, program_tflops: what a single program puts and computes.
    """

    launch_ms: float
    latency_ms: float
    link_gb_per_s: float
    program_gb_per_s: float
    program_tflops: float
    efficiency: float

    def milliseconds(self, work: LaunchWork) -> float:
        """T: of the one launch of a direction, or of both into which its configuration splits it."""
        return self.launch_ms + max(self.communication_ms(work), self.gemm_ms(work)) / self.efficiency

    def communication_ms(self, work: LaunchWork) -> float:
        """T_comm: rows there and back, without the launch."""
        few, all_of_them = self._putting(work)
        return self.latency_ms + few + all_of_them + self._travel_ms(work.bytes, work.programs)

    def gemm_ms(self, work: LaunchWork) -> float:
        """T_gemm: all tiles, and what programs lose by putting."""
        few, all_of_them = self._putting(work)
        flops = work.expert_flops + work.independent_flops
        computing = flops / (work.programs * self.program_tflops) * MS_OF_TFLOPS
        return computing + few * work.comm_programs / work.programs + all_of_them

    def _putting(self, work: LaunchWork) -> tuple[float, float]:
        """(ms in which comm_programs put while others compute, ms in which all programs put)."""
        beside = work.programs - work.comm_programs
        few = 0.0
        at_once = work.independent_flops + work.early_flops
        if beside and at_once:
            lasting = at_once / (beside * self.program_tflops) * MS_OF_TFLOPS
            few = min(lasting, self._travel_ms(work.bytes, work.comm_programs))
        left = work.bytes - few * self._rate(work.comm_programs) / MS_OF_GB_PER_S
        return few, self._travel_ms(max(0.0, left), work.programs)

    def _travel_ms(self, size: float, programs: int) -> float:
        return size / self._rate(programs) * MS_OF_GB_PER_S

    def _rate(self, programs: int) -> float:
        return min(self.link_gb_per_s, programs * self.program_gb_per_s)

    def error(self, points: Iterable[CostPoint]) -> float:
        """How far the function is from the fused points on average. Example: 0.05, five percent."""
        misses = [abs(self.milliseconds(p.work) / p.ms - 1) for p in points if p.kind == "fused"]
        return sum(misses) / len(misses)


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value!r}")
