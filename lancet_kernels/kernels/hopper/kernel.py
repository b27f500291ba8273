"""The overlap kernel for Hopper, in Gluon: the tasks, table and signals of `overlap_kernel`, other bodies.

The warps of a program have four jobs, and go on independently of each other:

    consumers    8 warps   two warpgroups that multiply (wgmma m64n256k16) and store   `consumer.py`
    producer     1 warp    claims GEMM tasks, waits, loads operands by TMA             `pipeline.py`
    copy warps   2 warps   puts                                                        `signals.py`
    signal warp  1 warp    says where results go, and signals what is stored           `signals.py`

There are two counters of claims instead of one: the copy warps claim puts, the producers all others, in the
order of a launch without puts. A producer claims its next task when it has loaded the last step of the one
before, while the consumers still multiply, and long before their epilogue.

Why one resident program per PE is enough. Copy warps and producer are two chains that both go on. As in
`schedule.py` all puts of all PEs come to an end, whatever the GEMMs do, and with them all rows arrive. Of the
GEMM tasks, take the unfinished one with the smallest number on a PE. It waits for rows, or for the words of
tasks with smaller numbers, which are finished. The producer that claimed it has claimed only smaller numbers
before, and waits for nothing else of them: loads need an empty stage, a hand-over an empty place. The
consumers empty stages, and wait for no signal themselves; the signal warp empties places, and waits for the
consumers only. Both take tasks in the order of the hand-over, and a task is signalled when it is stored,
whether another one follows or not: a consumer that signalled behind its next product would have to signal
before it waits for a task, which the producer may hand over only behind that signal. So the task is finished:
a contradiction. Waits inside a program (mbarriers) need no bound of their own: whom they wait for waits for
bounded signals only.

What a release covers. `tl.debug_barrier` in a partition joins its warps and no others: `put_signal` of the
copy warps covers their own stores. What consumers store reaches the signal warp, and a producer's acquire the
consumers, through an mbarrier (release and acquire of the block); releases, being cumulative, publish it.

Bytes of puts in flight. NVLink carries 450 GB/s in each direction of a GPU; until a row that is read arrives,
1 to 2 us pass. By Little's law 450 to 900 kB must be on their way to fill the link: 3.4 to 6.8 kB in each of
132 programs, which all put. A put reads ahead into a ring in shared memory, beside the operands of the GEMMs:
16 KiB beside 4 stages, so that 27 to 55 programs fill the link; 64 KiB beside 3, 7 to 14 programs. Its stores
at the peer are on their way besides. None has measured whether the GEMMs can spare a stage, so 4 are the
default. Bulk copies would free the copy warps of the stores, but are of the async proxy, which a release does
not cover, and the wait for their writes (not only reads) is missing in Triton before 3.8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lancet_kernels.kernels.config import GemmConfig
from lancet_kernels.kernels.hopper.consumer import consume
from lancet_kernels.kernels.hopper.pipeline import TASK_WORDS, TASKS, Descriptors, Rings, produce
from lancet_kernels.kernels.hopper.signals import COPY_WARPS, copy, signal
from lancet_kernels.kernels.protocol import NOT_SPECIALIZED, Constants, Pointers, Sizes, device
from lancet_kernels.kernels.protocol.schedule import NUM_TILES
from lancet_kernels.kernels.protocol.steps import is_sound, num_put_tasks
from lancet_kernels.kernels.protocol.tasks import num_gemm_tasks
from lancet_kernels.kernels.runtime import launch

# Registers of a thread of producer, copy and signal warps, one warpgroup; the consumers share the rest, 208.
# With more warps a kernel starts with 128 registers in each, and ptxas refuses a wgmma with that many.
COPY_REGISTERS = gl.constexpr(88)


@gluon.jit
def _start(ptrs, sizes, descs, const):
    """Make the rings, and let the partitions go."""
    BM: gl.constexpr = const.BM
    BN: gl.constexpr = const.BN
    BK: gl.constexpr = const.BK
    epoch, sound = gl.load(ptrs.of_pass.words), is_sound(ptrs)
    num_tiles = gl.load(ptrs.of_pass.table + NUM_TILES)
    num_puts = gl.minimum(num_put_tasks(ptrs), sizes.limit)
    # Opaque: else it would be computed in every partition again.
    num_gemms = device.opaque(num_gemm_tasks(num_tiles, sizes, const))
    num_gemms = gl.minimum(num_gemms, sizes.limit)

    element: gl.constexpr = ptrs.arrivals.rows.dtype.element_ty
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BK], element)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, BN], element)
    a = gl.allocate_shared_memory(element, [const.STAGES, BM, BK], a_layout)
    b = gl.allocate_shared_memory(element, [const.STAGES, BK, BN], b_layout)
    ring_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    ring = gl.allocate_shared_memory(element, [const.PUT_SLOTS, const.PUT_ROWS, const.PUT_BLOCK], ring_layout)
    one_word: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tasks = gl.allocate_shared_memory(gl.int32, [TASKS * TASK_WORDS, 1], one_word)
    empty = gl.allocate_shared_memory(gl.int64, [const.STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [const.STAGES, 1], mbarrier.MBarrierLayout())
    task_empty = gl.allocate_shared_memory(gl.int64, [TASKS, 1], mbarrier.MBarrierLayout())
    task_full = gl.allocate_shared_memory(gl.int64, [TASKS, 1], mbarrier.MBarrierLayout())
    stored = gl.allocate_shared_memory(gl.int64, [TASKS, 1], mbarrier.MBarrierLayout())
    targets = gl.allocate_shared_memory(gl.int64, [BM], one_word)
    targets_full = gl.allocate_shared_memory(gl.int64, [TASKS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(const.STAGES):
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(TASKS):
        mbarrier.init(task_empty.index(i), count=1)
        mbarrier.init(task_full.index(i), count=1)
        mbarrier.init(stored.index(i), count=1)
        mbarrier.init(targets_full.index(i), count=1)
    rings = Rings(a, b, empty, full, tasks, task_empty, task_full, stored, targets, targets_full)
    gl.warp_specialize([
        (consume, (ptrs, sizes, rings, const)),
        (produce, (ptrs, sizes, descs, num_gemms, num_tiles, epoch, sound, rings, const)),
        (copy, (ptrs, sizes, num_puts, ring, const)),
        (signal, (ptrs, sizes, rings, const)),
    ], [1, COPY_WARPS, 1], [COPY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS])  # fmt: skip


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def gluon_overlap_kernel(
    of_pass, arrivals, returns, sending, gemms, gradients, problems_ptr,
    rows_desc, weight_in_desc, hidden_desc, weight_out_desc,
    rank, W, L, D, F, R, tiles, chunks, timeout_us, num_problems, dense_tiles, limit,
    BACKWARD: gl.constexpr, ACT: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BN_IN: gl.constexpr, BK: gl.constexpr, BW: gl.constexpr,
    PUT_ROWS: gl.constexpr, PUT_BLOCK: gl.constexpr,
    STAGES: gl.constexpr, PUT_SLOTS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """One launch. Arguments are those of `overlap_kernel`, but for NVSHMEM's stages and the descriptors.

    Grid: (programs,), at most what is resident; one is enough.
    """
    H = 2 * F if ACT == "swiglu" else F
    # Not assigned to a name, which would make tensors of constants.
    _start(
        Pointers(of_pass, arrivals, returns, None, sending, gemms, gradients, problems_ptr),
        Sizes(rank, W, L, D, F, H, R, tiles, chunks, timeout_us, num_problems, dense_tiles, limit),
        Descriptors(rows_desc, weight_in_desc, hidden_desc, weight_out_desc),
        Constants(
            BACKWARD, ACT, False, True, BM, BN, BN_IN, BK, BW, PUT_ROWS, PUT_BLOCK, STAGES, PUT_SLOTS, WARPS
        ),
    )  # fmt: skip


# Of ptxas. At its default of 5 it keeps the number of the thread, which all partitions need, in local memory;
# up to 3 it does not, and the loops over the contraction are the same. `lancet kernels` says what holds.
PTX_OPTIONS = "--register-usage-level=3"
# Shared memory of a program; what of it epilogues, mbarriers, tasks and targets take, compiled, rounded up.
SHARED_BYTES = 227 * 1024
EPILOGUE_BYTES = 18 * 1024
_ELEMENT = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def launch_gluon(grid: tuple[int, ...], tile: GemmConfig, arguments: dict[str, Any]) -> None:
    """Launch the Hopper kernel with the arguments of a launch of `overlap_kernel`."""
    given = {name: value for name, value in arguments.items() if name in gluon_overlap_kernel.arg_names}
    step = arguments["PUT_ROWS"] * arguments["PUT_BLOCK"]
    launch(
        gluon_overlap_kernel, grid, **given, **descriptors(arguments),
        STAGES=tile.num_stages, WARPS=tile.num_warps,
        PUT_SLOTS=put_slots(tile.num_stages, (tile.block_m + tile.block_n) * tile.block_k, step),
        num_warps=tile.num_warps, ptx_options=PTX_OPTIONS,
    )  # fmt: skip


def descriptors(arguments: dict[str, Any]) -> dict[str, TensorDescriptor]:
    """Descriptors of all received rows, of `hidden`, and of the weights of all experts, as matrices.

    A box is what one load brings. Weights of the backward are multiplied transposed.
    """
    gemms, BK = arguments["gemms"], arguments["BK"]
    rows, transposed = [arguments["BM"], BK], arguments["gradients"] is not None

    def weight(columns: int) -> list[int]:
        return [columns, BK] if transposed else [BK, columns]

    return {
        "rows_desc": _descriptor(arguments["arrivals"].rows, rows),
        "weight_in_desc": _descriptor(gemms.weight_in, weight(arguments["BN_IN"])),
        "hidden_desc": _descriptor(gemms.hidden, rows),
        "weight_out_desc": _descriptor(gemms.weight_out, weight(arguments["BN"])),
    }


def _descriptor(tensor: Tensor, box: list[int]) -> TensorDescriptor:
    matrix = tensor.view(-1, tensor.shape[-1])
    layout = gl.NVMMASharedLayout.get_default_for(box, _ELEMENT[matrix.dtype])
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), box, layout)


def put_slots(stages: int, stage_elements: int, step_elements: int) -> int:
    """Steps of a put that a program has on the way: as many as fit beside operands and epilogue, up to 16."""
    free = SHARED_BYTES - EPILOGUE_BYTES - 2 * stages * stage_elements
    return max(2, min(16, free // (2 * step_elements)))
