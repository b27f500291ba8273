"""Fits the cost functions of fused launches (`kernels.fused_cost`) to measured points.

Linear least squares of relative errors with parameters >= 0, for one kind of launch after the other:

    puts alone     T = a + B / R(p)         for several B and p: the link, the rate of a program
    GEMMs alone    T = g + G / (p r)        for several G and p: r; latency = max(0, a - g)
    fused          T = launch + M / eta     M = max(T_comm, T_gemm) of the above

Puts and GEMMs alone are timed with several sizes of the grid, which gives the rate per program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from lancet_kernels.kernels.fused_cost import MS_OF_GB_PER_S, MS_OF_TFLOPS, CostPoint, FusedCost

# The number of different sizes that a linear fit needs.
FEWEST_SIZES = 2
# A function with a larger mean relative error at its own points is rejected.
LARGEST_ERROR = 0.3


def fit_cost(points: Sequence[CostPoint]) -> FusedCost:
    """The cost function of one direction, from its measured points.

    Raises: ValueError with the reason, if there are too few points or no such function fits them.
    """
    by_kind = {kind: [p for p in points if p.kind == kind] for kind in ("put", "gemm", "fused")}
    for kind, of_kind in by_kind.items():
        sizes = {(p.work.bytes, p.work.expert_flops) for p in of_kind}
        if len(sizes) < FEWEST_SIZES:
            names = {"put": "puts alone", "gemm": "GEMMs alone", "fused": "fused launches"}
            raise ValueError(f"{names[kind]} of {len(sizes)} sizes, at least {FEWEST_SIZES} are needed")
    put_ms, program_rate, link_rate = _fit_puts(by_kind["put"])
    gemms = by_kind["gemm"]
    work = [(p.work.expert_flops + p.work.independent_flops) / p.work.programs for p in gemms]
    (gemm_ms, per_flop), _ = _lines([_ones(gemms), work], gemms)
    _check_grows("GEMMs alone", per_flop)
    alone = FusedCost(
        launch_ms=0.0,
        latency_ms=max(0.0, put_ms - gemm_ms),
        link_gb_per_s=link_rate,
        program_gb_per_s=program_rate,
        program_tflops=MS_OF_TFLOPS / per_flop,
        efficiency=1.0,
    )
    fused = by_kind["fused"]
    (launch_ms, per_ms), _ = _lines([_ones(fused), [alone.milliseconds(p.work) for p in fused]], fused)
    _check_grows("fused launches", per_ms)
    cost = replace(alone, launch_ms=launch_ms, efficiency=1 / per_ms)
    if (error := cost.error(fused)) > LARGEST_ERROR:
        raise ValueError(f"it misses the measured launches by {error:.0%} on average")
    return cost


def _fit_puts(points: Sequence[CostPoint]) -> tuple[float, float, float]:
    """(a in ms, GB/s of a program, GB/s of the link) of T = a + B / min(link, p * rate of a program).

    For small p the programs limit the rate, for large p the link. The p at which this changes is unknown, so
    all are tried. If only one of the two ever is the limit, the rate of the other is set to the largest
    observed one.
    """
    counts = sorted({p.work.programs for p in points})
    best: tuple[float, float, float, float] | None = None
    for bound in range(len(counts), -1, -1):
        slow = [p.work.programs in counts[:bound] for p in points]
        by_program = [p.work.bytes / p.work.programs * s for p, s in zip(points, slow, strict=True)]
        by_link = [p.work.bytes * (not s) for p, s in zip(points, slow, strict=True)]
        columns = [_ones(points), *(column for column in (by_program, by_link) if any(column))]
        factors, error = _lines(columns, points)
        if all(slope > 0 for slope in factors[1:]) and (best is None or error < best[0] * (1 - 1e-6)):
            rates = [MS_OF_GB_PER_S / slope for slope in factors[1:]]
            program = rates[0] if bound else rates[0] / counts[0]
            link = rates[-1] if bound < len(counts) else rates[0] * counts[-1]
            best = error, factors[0], program, link
    if best is None:
        raise _does_not_grow("puts alone")
    return best[1:]


def _ones(points: Sequence[CostPoint]) -> list[float]:
    return [1.0] * len(points)


def _lines(columns: Sequence[Sequence[float]], points: Sequence[CostPoint]) -> tuple[list[float], float]:
    """Non-negative least squares: factors >= 0 of the columns whose weighted sum is closest to the points'
    ms, by relative errors. -> the factors, and the squared error.

    Tries all subsets of the columns, of which there are few (for many, Lawson and Hanson's method is faster).
    """
    ms = np.array([p.ms for p in points])
    table = np.array(columns, dtype=float).T / ms[:, None]
    # Scale the columns to similar sizes: bytes are around 1e9 times the 1 of an intercept.
    scale = np.abs(table).max(axis=0)
    best, least = [0.0] * len(columns), float(len(points))
    for size in range(1, len(columns) + 1):
        for part in map(list, combinations(range(len(columns)), size)):
            factors = np.linalg.lstsq(table[:, part] / scale[part], np.ones(len(points)), rcond=None)[0]
            error = float(((table[:, part] / scale[part] @ factors - 1) ** 2).sum())
            if (factors >= 0).all() and error < least:
                best, least = [0.0] * len(columns), error
                for place, factor in zip(part, factors / scale[part], strict=True):
                    best[place] = float(factor)
    return best, least


def _check_grows(what: str, slope: float) -> None:
    if slope <= 0:
        raise _does_not_grow(what)


def _does_not_grow(what: str) -> ValueError:
    return ValueError(f"the time of {what} does not grow with their size")
