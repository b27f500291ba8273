"""Made-up measurements of fused launches: what a GPU would have said, were its times these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lancet_kernels.graph.cost_entry import CostEntry, CostPoint, LayerKind
from lancet_kernels.graph.measured_launches import MeasuredLaunches
from lancet_kernels.kernels.gemm_config import GemmConfig
from lancet_kernels.kernels.overlap_config import OverlapConfig
from lancet_kernels.kernels.tuned_entry import MEASURED, Entry, config_fields
from lancet_kernels.kernels.tuning import TunedCache
from tests.tuned_cache import GPU

# A tile for any dtype.
CONFIG = OverlapConfig(GemmConfig(64, 32, 16, 8, 2), programs=132, comm_programs=16)
ROWS = (16384, 32768, 65536)
RIDER_FLOPS = (0.0, 1e11, 4e11)
Truth = Callable[[str, float, float], float]


def fast(direction: str, rows: float, rider_flops: float) -> float:
    """0.1 ms and 1 ms (backward 2 ms) per 65,536 rows; riders cost 1 ms per 4e11 FLOPs."""
    passes = 1 if direction == "forward" else 2
    return 0.1 + passes * rows / 65536 + rider_flops / 4e11


def slow(direction: str, rows: float, rider_flops: float) -> float:
    return 500.0 + fast(direction, rows, rider_flops)


def made_up_points(truth: Truth = fast) -> list[CostPoint]:
    """The launches that the tuner would time."""
    launches = [
        (direction, rows, flops)
        for direction in ("forward", "backward")
        for rows in ROWS
        for flops in (RIDER_FLOPS if direction == "backward" else (0.0,))
    ]
    return [CostPoint(*launch, truth(*launch)) for launch in launches]


def cost_entry(kind: LayerKind, truth: Truth = fast, **changes: object) -> CostEntry:
    """As `lancet tune` would have stored it for a kind of layer."""
    points = tuple(made_up_points(truth))
    entry = CostEntry(kind, GPU, MEASURED, config_fields(CONFIG), "made up", points, "3.6.0", "2026-11-21")
    return replace(entry, **changes)


def tuned_entry(kind: LayerKind, config: OverlapConfig = CONFIG) -> Entry:
    """The configuration that goes with it."""
    return Entry(
        "overlap",
        kind.shape,
        kind.dtype,
        GPU,
        config_fields(config),
        MEASURED,
        1.0,
        1.5,
        "3.6.0",
        "2026-11-21",
    )


def put(cache: TunedCache, entries: Sequence[Entry], costs: Sequence[CostEntry] = ()) -> None:
    """Store both in the file of a cache."""
    cache.put(entries)
    if costs:
        costs_of(cache).put(costs)


def costs_of(cache: TunedCache) -> MeasuredLaunches:
    """The measured launches in the same file."""
    return MeasuredLaunches(cache.path)
