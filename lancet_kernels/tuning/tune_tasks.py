"""The tuning tasks of an MoE layer: candidates of each kernel, their specimens and runs.

    T  tokens    D  width    F  hidden width    E  experts    K  choices    C  rows of each expert

One `Task` is one kernel at one shape. Its launcher looks the winner up by the same kind and shape
(`kernels.tuning`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lancet_kernels import ops
from lancet_kernels.compiling import (
    gluon_specimens,
    grouped_gemm_specimens,
    overlap_specimens,
    routing_specimens,
    row_specimens,
)
from lancet_kernels.compiling.specimen import Specimen
from lancet_kernels.kernels import gemm_config, grouped_gemm_kernel, permute
from lancet_kernels.kernels.gemm_config import GemmConfig
from lancet_kernels.kernels.gemm_operands import DTYPES
from lancet_kernels.kernels.gluon_config import HOPPER_TILE, hopper_config
from lancet_kernels.kernels.overlap_config import OverlapConfig
from lancet_kernels.kernels.row_config import RowConfig
from lancet_kernels.kernels.topk_kernel import RoutingConfig
from lancet_kernels.kernels.tuned_entry import KINDS, Shape, key_of
from lancet_kernels.tuning.place import Place
from lancet_kernels.tuning.workloads import Workload


@dataclass(frozen=True)
class Task:
    """One kernel at one shape.

    Attributes:
        shape: as it is looked up, rows rounded up; exact: as it is run.
    """

    kind: str
    workload: Workload
    dtype: torch.dtype
    shape: Shape
    exact: Shape

    def key(self, device: str) -> str:
        return key_of(self.kind, self.shape, str(self.dtype).removeprefix("torch."), device)

    @property
    def tunable(self) -> Tunable:
        return _TUNABLES[self.kind]


@dataclass(frozen=True)
class Tunable:
    """How the kernels of a kind are tuned.

    Attributes:
        shapes: of a workload. candidates: to time, the default first; at most 20.
        specimens: what must compile. runner: a run on a GPU with a configuration; collective for "overlap".
    """

    shapes: Callable[[Workload, torch.dtype], Iterable[Shape]]
    candidates: Callable[[Task, Place], Sequence[Any]]
    specimens: Callable[[Task, Any, int], list[Specimen]]
    runner: Callable[[Task, torch.device], Callable[[Any], Callable[[], object]]]


def make_tasks(
    workloads: Iterable[Workload], dtype: torch.dtype, kinds: Iterable[str] = tuple(KINDS)
) -> list[Task]:
    """All tasks of the workloads, each shape once."""
    tasks: dict[tuple, Task] = {}
    for workload in workloads:
        for kind in kinds:
            for exact in _TUNABLES[kind].shapes(workload, dtype):
                shape = KINDS[kind].rounded(exact)
                # Routing runs in float32 for every dtype of the model.
                task_dtype = torch.float32 if kind == "routing" else dtype
                tasks.setdefault((kind, shape), Task(kind, workload, task_dtype, shape, exact))
    return list(tasks.values())


# Grouped GEMMs: as the op has them, without an activation in the epilogue.


def _forward_shapes(w: Workload, dtype: torch.dtype) -> list[Shape]:
    return [(w.capacity, w.wide, w.width, 1), (w.capacity, w.width, w.hidden, 1)]


def _dx_shapes(w: Workload, dtype: torch.dtype) -> list[Shape]:
    return [(w.capacity, w.hidden, w.width, 1), (w.capacity, w.width, w.wide, 1)]


def _dw_shapes(w: Workload, dtype: torch.dtype) -> list[Shape]:
    return [(w.width, w.wide, w.capacity, 1), (w.hidden, w.width, w.capacity, 1)]


def _gemm_candidates(task: Task, place: Place) -> Sequence[Any]:
    m, n, k, accumulators = map(int, task.exact)
    return list(gemm_config.candidates(m, n, k, task.dtype, place.arch, accumulators))


def _gemm_specimens(task: Task, config: Any, arch: int) -> list[Specimen]:
    return [grouped_gemm_specimens.specimen(task.kind, "none", task.dtype, config, arch)]


def _gemm_runner(task: Task, device: torch.device) -> Callable[[Any], Callable[[], object]]:
    m, n, k, _ = map(int, task.exact)
    experts = task.workload.experts
    make = lambda *shape: torch.randn(*shape, dtype=task.dtype, device=device)  # noqa: E731
    rows = k if task.kind == "grouped_gemm_dw" else m
    offset = torch.arange(experts + 1, device=device) * rows
    if task.kind == "grouped_gemm_dw":
        x, dy, dw = make(experts * k, m), make(experts * k, n), make(experts, m, n)
        return lambda config: lambda: grouped_gemm_kernel.grouped_gemm_dw(x, dy, offset, dw=dw, config=config)
    x, out = make(experts * m, k), make(experts * m, n)
    if task.kind == "grouped_gemm_dx":
        w = make(experts, n, k)
        return lambda config: (
            lambda: grouped_gemm_kernel.grouped_gemm_dx(x, offset, w, out=out, config=config)
        )
    w = make(experts, k, n)
    return lambda config: (
        lambda: grouped_gemm_kernel.grouped_gemm_forward(x, offset, w, out=out, config=config)
    )


# Rows to their experts and back.


def _row_shapes(w: Workload, dtype: torch.dtype) -> list[Shape]:
    return [(w.width,)]


def _row_candidates(task: Task, place: Place) -> Sequence[Any]:
    return RowConfig.candidates(task.workload.width)


def _row_specimens(task: Task, config: Any, arch: int) -> list[Specimen]:
    weighted = task.kind == "combine"
    return [row_specimens.specimen(task.kind, DTYPES[task.dtype], task.workload.choices, weighted, config)]


def routed(w: Workload, device: torch.device) -> tuple[torch.Tensor, Any]:
    """(weights of the choices [T, K], routing) of random scores at the capacity of the workload."""
    from lancet_kernels.kernels.routing import route_scores

    score = torch.randn(w.tokens, w.experts, device=device)
    used = torch.zeros(w.experts, dtype=torch.int64, device=device)
    slots = route_scores(score, used, w.choices, w.capacity)
    return score.softmax(-1).gather(1, slots.expert_TK), slots


def send_rows_of(routed: Any) -> tuple[torch.Tensor, int]:
    """(row of each choice [T, K], number of rows) of a routing."""
    row = ops.send_rows(routed.expert_TK, routed.slot_TK, routed.kept_E[None])
    return row, int(routed.kept_E.sum())


def _row_runner(task: Task, device: torch.device) -> Callable[[Any], Callable[[], object]]:
    w = task.workload
    weight, slots = routed(w, device)
    row, num_rows = send_rows_of(slots)
    if task.kind == "permute":
        x = torch.randn(w.tokens, w.width, dtype=task.dtype, device=device)
        out = torch.empty(num_rows, w.width, dtype=task.dtype, device=device)
        return lambda config: lambda: permute.permute(x, row, None, num_rows, out=out, config=config)
    rows = torch.randn(num_rows, w.width, dtype=task.dtype, device=device)
    return lambda config: lambda: permute.combine(rows, row, weight, config=config)


# Routing.


def _routing_shapes(w: Workload, dtype: torch.dtype) -> list[Shape]:
    return [(w.experts, w.choices, 32)]


def _routing_candidates(task: Task, place: Place) -> Sequence[Any]:
    return RoutingConfig.candidates(task.workload.experts, task.workload.choices)


def _routing_specimens(task: Task, config: Any, arch: int) -> list[Specimen]:
    return [routing_specimens.score_specimen("fp32", task.workload.experts, task.workload.choices, config)]


def _routing_runner(task: Task, device: torch.device) -> Callable[[Any], Callable[[], object]]:
    from lancet_kernels.kernels.routing import route_scores

    w = task.workload
    score = torch.randn(w.tokens, w.experts, device=device)
    used = torch.zeros(w.experts, dtype=torch.int64, device=device)
    return lambda config: lambda: route_scores(score, used, w.choices, w.capacity, config=config)


# The fused kernel, forward and backward.


def _overlap_shapes(w: Workload, dtype: torch.dtype) -> list[Shape]:
    return [(w.width, w.hidden, w.activation, 1)]


# Tiles to time, by bytes of an element: (block_m, block_n, block_k, warps, stages). Smaller than those of a
# GEMM alone, because puts and waits need registers; tiles that spill are dropped after compilation.
_OVERLAP_TILES = {
    2: (
        (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 128, 64, 4, 4),
        (128, 64, 64, 8, 4),
        (128, 64, 64, 4, 4),
        (64, 128, 64, 4, 4),
        (64, 64, 64, 4, 4),
        (128, 256, 64, 8, 3),
        (64, 64, 32, 8, 4),
    ),
    4: ((64, 64, 16, 8, 3), (64, 32, 16, 4, 3), (128, 32, 16, 8, 2), (64, 32, 32, 8, 2)),
}


def _overlap_candidates(task: Task, place: Place) -> Sequence[Any]:
    """The default, and changes of one property at a time: programs that put, split, put step, tile.

    All put steps have 4096 elements, in few long pieces of rows or many short ones. All combinations would be
    several hundred configurations, which take too long to compile. Whether duplicates are sent once depends
    on ranks and choices, which an entry does not name: `overlap_config.dedup_pays` decides.
    """
    w = task.workload
    default = OverlapConfig.for_gpu(w.width, w.hidden, w.activation, task.dtype, place.arch, place.sms)
    accumulators = 2 if w.activation == "swiglu" else 1
    tiles = [GemmConfig(*sizes) for sizes in _OVERLAP_TILES[task.dtype.itemsize]]
    changed: list[dict[str, Any]] = [
        *({"comm_programs": max(1, place.sms // share)} for share in (16, 4)),
        {"split": True},
        *({"put_rows": rows, "put_block": block} for rows, block in ((4, 1024), (16, 256))),
        *({"gemm": tile} for tile in tiles if tile.is_valid(task.dtype, place.arch, accumulators)),
    ]
    hopper = _hopper_candidates(task, place)
    return list(dict.fromkeys([default, *(replace(default, **fields) for fields in changed), *hopper]))


def _hopper_candidates(task: Task, place: Place) -> list[OverlapConfig]:
    """Of the kernel for Hopper, where it can run: its default, and changes of one property at a time."""
    widths = task.workload.width, task.workload.hidden
    step = HOPPER_TILE.block_k
    if place.arch != 90 or task.dtype.itemsize != 2 or any(width % step for width in widths):
        return []
    default = hopper_config(place.sms)
    changed: tuple[dict[str, Any], ...] = (
        {}, {"split": True}, {"put_block": 2048}, {"put_rows": 8, "put_block": 512},
    )  # fmt: skip
    return [replace(default, **fields) for fields in changed]


def _overlap_specimens(task: Task, config: Any, arch: int) -> list[Specimen]:
    forward = ("dispatch+gemm", "gemm+combine") if config.split else ("forward",)
    if config.bodies == "gluon":
        return [
            gluon_specimens.specimen(
                fused, "", activation=task.workload.activation, dtype=task.dtype, config=config
            )
            for fused in (*forward, "backward")
        ]
    return [
        overlap_specimens.specimen(
            fused, "", arch, activation=task.workload.activation, dtype=task.dtype, config=config
        )
        for fused in (*forward, "backward")
    ]


def _overlap_runner(task: Task, device: torch.device) -> Callable[[Any], Callable[[], object]]:
    from lancet_kernels.fused_pass import FusedPasses

    passes = FusedPasses(task.workload, task.dtype, device)
    return lambda config: lambda: passes.forward_backward(config)


_GEMM = (_gemm_candidates, _gemm_specimens, _gemm_runner)
_ROWS = (_row_shapes, _row_candidates, _row_specimens, _row_runner)
_TUNABLES = {
    "grouped_gemm_forward": Tunable(_forward_shapes, *_GEMM),
    "grouped_gemm_dx": Tunable(_dx_shapes, *_GEMM),
    "grouped_gemm_dw": Tunable(_dw_shapes, *_GEMM),
    "permute": Tunable(*_ROWS),
    "combine": Tunable(*_ROWS),
    "routing": Tunable(_routing_shapes, _routing_candidates, _routing_specimens, _routing_runner),
    "overlap": Tunable(_overlap_shapes, _overlap_candidates, _overlap_specimens, _overlap_runner),
}
