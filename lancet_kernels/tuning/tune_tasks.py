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
from lancet_kernels.compiling.specimen import Specimen
from lancet_kernels.compiling.specimens import FusedCase, fused_specimens, specimens_of
from lancet_kernels.kernels.gemm_config import GemmConfig
from lancet_kernels.kernels.hopper.config import HOPPER_TILE, hopper_config
from lancet_kernels.kernels.moe import permute
from lancet_kernels.kernels.moe.row_config import RowConfig
from lancet_kernels.kernels.moe.topk import RoutingConfig
from lancet_kernels.kernels.overlap import config_for_gpu
from lancet_kernels.kernels.overlap_config import OverlapConfig
from lancet_kernels.kernels.tuned_entry import KINDS, Shape, key_of
from lancet_kernels.tuning.place import Place
from lancet_kernels.tuning.workloads import Workload


@dataclass(frozen=True)
class Task:
    """One kernel at one shape.

    Attributes:
        shape: as it is looked up.
    """

    kind: str
    workload: Workload
    dtype: torch.dtype
    shape: Shape

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
            for shape in _TUNABLES[kind].shapes(workload, dtype):
                # Routing runs in float32 for every dtype of the model.
                task_dtype = torch.float32 if kind == "routing" else dtype
                tasks.setdefault((kind, shape), Task(kind, workload, task_dtype, shape))
    return list(tasks.values())


# The most configurations that are timed per shape.
MOST_CANDIDATES = 20

# Rows to their experts and back.


def _row_shapes(w: Workload, dtype: torch.dtype) -> list[Shape]:
    return [(w.width,)]


def _row_candidates(task: Task, place: Place) -> Sequence[Any]:
    return RowConfig.candidates(task.workload.width)


def _row_specimens(task: Task, config: Any, arch: int) -> list[Specimen]:
    row = torch.zeros(4, task.workload.choices, dtype=torch.int64)
    x = torch.zeros(4, task.workload.width, dtype=task.dtype)
    if task.kind == "permute":
        return list(specimens_of("", permute.permute, x, row, None, 4, config=config))
    return list(specimens_of("", permute.combine, x, row, torch.zeros(row.shape), config=config))


def routed(w: Workload, device: torch.device) -> tuple[torch.Tensor, Any]:
    """(weights of the choices [T, K], routing) of random scores at the capacity of the workload."""
    from lancet_kernels.kernels.moe.routing import route_scores

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
    from lancet_kernels.kernels.moe.routing import route_scores

    w = task.workload
    score, used = torch.zeros(4, w.experts), torch.zeros(w.experts, dtype=torch.int64)
    return list(specimens_of("", route_scores, score, used, w.choices, w.capacity, config=config))


def _routing_runner(task: Task, device: torch.device) -> Callable[[Any], Callable[[], object]]:
    from lancet_kernels.kernels.moe.routing import route_scores

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
    """The default, and changes of one property of each kernel at a time: put step, tile.

    All put steps have 4096 elements, in few long pieces of rows or many short ones. All combinations would be
    several hundred configurations, which take too long to compile.
    """
    w = task.workload
    default = config_for_gpu(w.width, w.hidden, w.activation, task.dtype, place.arch, place.sms)
    plain = OverlapConfig.for_gpu(w.width, w.hidden, w.activation, task.dtype, place.arch, place.sms)
    accumulators = 2 if w.activation == "swiglu" else 1
    tiles = [GemmConfig(*sizes) for sizes in _OVERLAP_TILES[task.dtype.itemsize]]
    changed: list[dict[str, Any]] = [
        *({"put_rows": rows, "put_block": block} for rows, block in ((4, 1024), (16, 256))),
        *({"gemm": tile} for tile in tiles if tile.is_valid(task.dtype, place.arch, accumulators)),
    ]
    hopper = _hopper_candidates(task, place)
    others = [plain, *(replace(plain, **fields) for fields in changed)]
    return list(dict.fromkeys([default, *hopper, *others]))[:MOST_CANDIDATES]


def _hopper_candidates(task: Task, place: Place) -> list[OverlapConfig]:
    """The default of the kernel for Hopper, where it can run, and changes of one property at a time."""
    widths = task.workload.width, task.workload.hidden
    step = HOPPER_TILE.block_k
    if place.arch != 90 or task.dtype.itemsize != 2 or any(width % step for width in widths):
        return []
    default = hopper_config(place.sms)
    changed: tuple[dict[str, Any], ...] = (
        {}, {"put_block": 2048}, {"put_rows": 8, "put_block": 512},
    )  # fmt: skip
    return [replace(default, **fields) for fields in changed]


def _overlap_specimens(task: Task, config: Any, arch: int) -> list[Specimen]:
    case = FusedCase(task.workload.activation, task.dtype, bias=False)
    large = ("overlap", "gluon_overlap")
    return [specimen for specimen in fused_specimens(case, arch, config) if specimen.name in large]


def _overlap_runner(task: Task, device: torch.device) -> Callable[[Any], Callable[[], object]]:
    from lancet_kernels.measuring.fused_pass import FusedPasses

    passes = FusedPasses(task.workload, task.dtype, device)
    return lambda config: lambda: passes.forward_backward(config)


_ROWS = (_row_shapes, _row_candidates, _row_specimens, _row_runner)
_TUNABLES = {
    "permute": Tunable(*_ROWS),
    "combine": Tunable(*_ROWS),
    "routing": Tunable(_routing_shapes, _routing_candidates, _routing_specimens, _routing_runner),
    "overlap": Tunable(_overlap_shapes, _overlap_candidates, _overlap_specimens, _overlap_runner),
}
