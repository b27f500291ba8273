"""The overlap kernel for Hopper, in Gluon: the tasks, table and signals of `overlap_kernel`, other bodies.

    W  PEs, L experts on each    D  model width    F  hidden width    H  F, or 2F for swiglu
    T  tokens here               K  choices per token    R  most rows received

The warps of a program have four jobs, and go on independently of each other:

    consumers    8 warps   two warpgroups that multiply (wgmma m64n256k16) and store   `consumer.py`
    producer     1 warp    claims GEMM tasks, waits, loads operands by TMA             `producer.py`
    copy warps   2 warps   puts                                                        `copies.py`
    signal warp  1 warp    says where results go, and signals what is stored           `signals.py`

What is claimed, waited for and signalled are the functions of `overlap_kernel`; see `schedule.py` for the
rows, words and order. Two counters instead of one: the copy warps claim puts, the producers all others, in
the order of a launch without puts,

    [independent GEMMs][tiles][weight gradients]

The producer claims its next task when it has loaded the last step of the one before, while the consumers
still multiply, and long before their epilogue.

Why one resident program per PE is enough. Its warps are resident together, so its copy warps and its producer
are two chains that both go on. A put waits for nothing that this pass makes: only for a release of an earlier
pass. So all puts of all PEs come to an end, whatever the GEMMs do, and with them all rows arrive. Of the GEMM
tasks, take the unfinished one with the smallest number on a PE. It waits for rows, or for the words of tasks
with smaller numbers, which are finished. The producer that claimed it has claimed only smaller numbers
before, and waits for nothing else of them: loads need an empty stage, a hand-over an empty place. The
consumers empty stages, and wait for no signal themselves; the signal warp empties places, and waits for the
consumers only. Both take tasks in the order of the hand-over, and a task is signalled when it is stored,
whether another one follows or not: a consumer that signalled behind its next product would have to signal
before it waits for a task, which the producer may hand over only behind that signal. So the task is finished:
a contradiction. Waits inside a program (mbarriers) need no bound of their own: whom they wait for waits for
bounded signals only.

What each release covers. `put_signal` of the copy warps covers their own stores, behind a barrier of that
partition; `tl.debug_barrier` in a partition joins its warps and no others. What the consumers store reaches
the signal warp through the mbarrier `stored` (release and acquire of the block), and `finish_ready` and
`return_tile`, being cumulative, publish it. A producer's
acquire reaches the consumers through the mbarrier of the hand-over (release and acquire of the block), and
from there, being cumulative, whoever acquires what they release. TMA loads go through the async proxy:
fences stand after each acquire before a load, and where the loaded data is written by this kernel before its
release.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from lancet_kernels.kernels.hopper.consumer import consume
from lancet_kernels.kernels.hopper.copies import copy
from lancet_kernels.kernels.hopper.pipeline import TASK_WORDS, Rings
from lancet_kernels.kernels.hopper.producer import produce
from lancet_kernels.kernels.hopper.signals import signal
from lancet_kernels.kernels.portable.kernel import COUNTER
from lancet_kernels.kernels.protocol import device
from lancet_kernels.kernels.protocol.arguments import Blocks, Sizes
from lancet_kernels.kernels.protocol.schedule import NUM_TILES, VOID
from lancet_kernels.kernels.protocol.steps import num_put_tasks
from lancet_kernels.kernels.protocol.tasks import num_gemm_tasks

# Which word of a pass counts the puts.
COPY_COUNTER = gl.constexpr(2)


@gluon.jit
def _start(
    of_pass, arrivals, returns, sending, gemms, gradients, problems_ptr,
    rows_desc, weight_in_desc, hidden_desc, weight_out_desc, sizes, blocks, num_problems, dense_tiles, limit,
    BACKWARD: gl.constexpr, ACT: gl.constexpr, PUT_ROWS: gl.constexpr, PUT_BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    PUT_SLOTS: gl.constexpr, TASKS: gl.constexpr, WARPS: gl.constexpr, COPY_WARPS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Make the rings, and let the partitions go."""
    PAIR: gl.constexpr = ACT == "swiglu" and not BACKWARD
    BM: gl.constexpr = blocks.BM
    BN: gl.constexpr = blocks.BN
    BK: gl.constexpr = blocks.BK
    epoch = gl.load(of_pass.words)
    # Of a pass whose counts did not come, or did not fit, nothing is true.
    sound = ((device.failed(of_pass.report) == 0) & (gl.load(of_pass.table + VOID) == 0)).to(gl.int32)
    num_tiles = gl.load(of_pass.table + NUM_TILES)
    num_puts = gl.minimum(num_put_tasks(of_pass), limit)
    # Opaque: else it would be computed in every partition again.
    num_gemms = device.opaque(num_gemm_tasks(num_tiles, dense_tiles, sizes, blocks, BACKWARD))
    num_gemms = gl.minimum(num_gemms, limit)

    element: gl.constexpr = arrivals.rows.dtype.element_ty
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BK], element)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, BN], element)
    a = gl.allocate_shared_memory(element, [STAGES, BM, BK], a_layout)
    b = gl.allocate_shared_memory(element, [STAGES, BK, BN], b_layout)
    ring_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    ring = gl.allocate_shared_memory(element, [PUT_SLOTS, PUT_ROWS, PUT_BLOCK], ring_layout)
    one_word: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tasks = gl.allocate_shared_memory(gl.int32, [TASKS * TASK_WORDS, 1], one_word)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    task_empty = gl.allocate_shared_memory(gl.int64, [TASKS, 1], mbarrier.MBarrierLayout())
    task_full = gl.allocate_shared_memory(gl.int64, [TASKS, 1], mbarrier.MBarrierLayout())
    stored = gl.allocate_shared_memory(gl.int64, [TASKS, 1], mbarrier.MBarrierLayout())
    targets = gl.allocate_shared_memory(gl.int64, [BM], one_word)
    targets_full = gl.allocate_shared_memory(gl.int64, [TASKS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(TASKS):
        mbarrier.init(task_empty.index(i), count=1)
        mbarrier.init(task_full.index(i), count=1)
        mbarrier.init(stored.index(i), count=1)
        mbarrier.init(targets_full.index(i), count=1)
    rings = Rings(a, b, empty, full, tasks, task_empty, task_full, stored, targets, targets_full)
    gl.warp_specialize([
        (consume, (
            of_pass, sizes, arrivals, returns, gemms, gradients, problems_ptr, rings, blocks,
            BACKWARD, ACT, STAGES, TASKS, WARPS,
        )),
        (produce, (
            of_pass, sizes, arrivals, gemms, gradients, problems_ptr, num_problems, dense_tiles, num_gemms,
            num_tiles, epoch, sound, rows_desc, weight_in_desc, hidden_desc, weight_out_desc, rings,
            blocks, BACKWARD, PAIR, COUNTER, STAGES, TASKS,
        )),
        (copy, (
            of_pass, sizes, sending, arrivals, num_puts, ring,
            BACKWARD, BM, PUT_SLOTS, PUT_ROWS, PUT_BLOCK, COPY_COUNTER, COPY_WARPS,
        )),
        (signal, (
            of_pass, sizes, arrivals, returns, gemms, gradients, problems_ptr, rings, blocks, BACKWARD, TASKS,
        )),
    ], [1, COPY_WARPS, 1], [COPY_REGISTERS, COPY_REGISTERS, COPY_REGISTERS])  # fmt: skip


@gluon.jit(
    do_not_specialize=[
        "rank", "W", "L", "R", "tiles", "chunks", "timeout_us", "num_problems", "dense_tiles", "limit",
    ]
)  # fmt: skip
def gluon_overlap_kernel(
    of_pass, arrivals, returns, sending, gemms, gradients, problems_ptr,
    # Of rows, hidden (backward: dh) and the weights of both GEMMs, in the order of this direction.
    rows_desc, weight_in_desc, hidden_desc, weight_out_desc,
    rank, W, L, D, F, R, tiles, chunks, timeout_us, num_problems, dense_tiles, limit,
    BACKWARD: gl.constexpr, ACT: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BN_IN: gl.constexpr, BK: gl.constexpr, BW: gl.constexpr,
    PUT_ROWS: gl.constexpr, PUT_BLOCK: gl.constexpr,
    STAGES: gl.constexpr, PUT_SLOTS: gl.constexpr, TASKS: gl.constexpr, WARPS: gl.constexpr,
    COPY_WARPS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One launch. Arguments are those of `overlap_kernel`, but for NVSHMEM's stages and the descriptors.

    Grid: (programs,), at most what is resident; one is enough.
    """
    H = 2 * F if ACT == "swiglu" else F
    # Not assigned to a name, which would make tensors of constants.
    _start(
        of_pass, arrivals, returns, sending, gemms, gradients, problems_ptr,
        rows_desc, weight_in_desc, hidden_desc, weight_out_desc,
        Sizes(rank, W, L, D, F, H, R, tiles, chunks, timeout_us),
        Blocks(BM, BN, BN_IN, BK, BW),
        num_problems, dense_tiles, limit, BACKWARD, ACT, PUT_ROWS, PUT_BLOCK, STAGES, PUT_SLOTS, TASKS, WARPS,
        COPY_WARPS, COPY_REGISTERS,
    )  # fmt: skip
