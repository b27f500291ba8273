"""Made-up measurements of fused launches: what a GPU would have said, were its cost function this one."""

from __future__ import annotations

from dataclasses import replace

from lancet_kernels.kernels.cost_entry import CostEntry, LayerKind
from lancet_kernels.kernels.fused_cost import CostPoint, FusedCost, LaunchWork
from lancet_kernels.kernels.gemm_config import GemmConfig
from lancet_kernels.kernels.overlap_config import OverlapConfig
from lancet_kernels.kernels.tuned_entry import MEASURED, Entry, config_fields
from lancet_kernels.tuning.tune_cost import CostSize, sizes_of
from lancet_kernels.tuning.workloads import Workload

GPU = "NVIDIA H100 80GB HBM3"
# That of the docstring of kernels.fused_cost.
TRUTH = FusedCost(
    launch_ms=0.03, latency_ms=0.01, link_gb_per_s=400.0, program_gb_per_s=10.0, program_tflops=5.0,
    efficiency=0.9,
)  # fmt: skip
# A tile for any dtype.
CONFIG = OverlapConfig(GemmConfig(64, 32, 16, 8, 2), programs=132, comm_programs=16)
WORKLOAD = Workload("made up", 32768, 2048, 2048, 16, 2)
# An empty launch alone, in ms.
EMPTY_MS = 0.005


def milliseconds(truth: FusedCost, work: LaunchWork) -> float:
    """Of a launch of any kind."""
    if work.bytes and work.expert_flops:
        return truth.milliseconds(work)
    if work.bytes:
        rate = min(truth.link_gb_per_s, work.programs * truth.program_gb_per_s)
        return EMPTY_MS + truth.latency_ms + work.bytes / rate * 1e-6
    return EMPTY_MS + work.expert_flops / (work.programs * truth.program_tflops) * 1e-9


def made_up_points(
    truth: FusedCost = TRUTH, workload: Workload = WORKLOAD, ranks: int = 2
) -> list[CostPoint]:
    """The launches that the tuner would time."""
    sizes = [CostSize(w, 2, CONFIG, w.tokens * w.choices, ranks) for w in sizes_of(workload)]
    return [
        CostPoint(direction, work, milliseconds(truth, work))
        for size in sizes
        for direction, work in size.launches()
    ]


def cost_entry(kind: LayerKind, truth: FusedCost = TRUTH, **changes: object) -> CostEntry:
    """As `lancet tune` would have stored it for a kind of layer."""
    workload = replace(WORKLOAD, width=kind.width, hidden=kind.hidden, activation=kind.activation)
    points = tuple(made_up_points(truth, workload, kind.ranks))
    entry = CostEntry(
        kind, GPU, MEASURED, config_fields(CONFIG), str(workload), points, "3.6.0", "2026-11-21"
    )
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
