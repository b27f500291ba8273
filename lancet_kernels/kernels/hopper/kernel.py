"""The overlap kernel for Hopper, in Gluon: the tasks, table and signals of `overlap_kernel`, other bodies.

    W  PEs, L experts on each    D  model width    F  hidden width    H  F, or 2F for swiglu
    T  tokens here               K  choices per token    R  most rows received

The warps of a program have three jobs, and go on independently of each other:

    consumers    8 warps   two warpgroups that multiply (wgmma m64n256k16) and store   `hopper/consumer.py`
    producer     1 warp    claims GEMM tasks, waits, loads operands by TMA             `hopper/producer.py`
    copy warps   2 warps   puts, sums of results                                       `hopper/copies.py`

What is claimed, waited for and signalled are the functions of `overlap_kernel`; see `schedule.py` for the
rows, words and order. Two counters instead of one: the copy warps claim

    [puts][reductions]

in that order, the producers claim all others, in the order of a launch without puts,

    [independent GEMMs][tiles][weight gradients]

The producer claims its next task when it has loaded the last step of the one before, while the consumers
still multiply, and long before their epilogue.

Why one resident program per PE is enough. Its warps are resident together, so its copy warps and its producer
are two chains that both go on. A put waits for nothing that this use makes: only for a release of an earlier
use. So all puts of all PEs come to an end, whatever the GEMMs do, and with them all rows arrive. Of the GEMM
tasks, take the unfinished one with the smallest number on a PE. It waits for rows, or for the words of tasks
with smaller numbers, which are finished. The producer that claimed it has claimed only smaller numbers
before, and waits for nothing else of them: loads need an empty stage, a hand-over an empty place, and the
consumers empty both, as they take tasks in the order of the hand-over and wait for no signal themselves. So
the task is finished: a contradiction. So all tiles of all PEs end, and the reductions, which wait for them
and stand behind all puts in the copy warps' list, end too. Waits inside a program (mbarriers) need no bound
of their own: whom they wait for waits for bounded signals only.

What each release covers. `put_signal` and `finish_ready` are called by one partition, after its own stores
and a barrier of that partition; `tl.debug_barrier` in a partition joins its warps and no others. A producer's
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
from lancet_kernels.kernels.hopper.pipeline import TASK_WORDS
from lancet_kernels.kernels.hopper.producer import produce
from lancet_kernels.kernels.protocol import device
from lancet_kernels.kernels.protocol.schedule import NUM_PUTS, NUM_TILES, VOID
from lancet_kernels.kernels.protocol.tasks import num_wgrads


@gluon.jit(
    do_not_specialize=[
        "limit", "counter", "copy_counter", "rank", "max_polls", "W", "L", "R", "tiles", "chunks", "T",
        "K", "tiles_in", "tiles_out", "lag", "dense_tiles", "num_problems", "reduce_blocks",
    ]
)  # fmt: skip
def gluon_overlap_kernel(
    use_ptr, counter, copy_counter, earlier_use_ptr, table_ptr, report_ptr, rank, max_polls, limit,
    W, L, D, F, H, R, tiles, chunks, T, K,
    tiles_in, tiles_out, lag, dense_tiles, num_problems, reduce_blocks,
    source_ptr, token_ptr, send_weights_ptr,
    rows_ptr, rows_peers_ptr, row_weights_ptr, row_weights_peers_ptr,
    arrived_ptr, arrived_peers_ptr, released_ptr,
    results_ptr, results_peers_ptr, dots_ptr, dots_peers_ptr, returned_ptr, returned_peers_ptr, spoiled_ptr,
    bias_in_ptr, pre_ptr, hidden_ptr, bias_out_ptr, row_dots_ptr, ready_ptr, done_ptr,
    saved_rows_ptr, activated_ptr, dweight_in_ptr, dbias_in_ptr, dweight_out_ptr, dbias_out_ptr,
    out_ptr, expert_ptr, row_ptr, weight_ptr, dweight_ptr, problems_ptr,
    # Of rows, hidden (backward: dh) and the weights of both GEMMs, in the order of this direction.
    rows_desc, weight_in_desc, hidden_desc, weight_out_desc,
    HAS_PUT: gl.constexpr, HAS_IN: gl.constexpr, HAS_OUT: gl.constexpr, HAS_WGRAD: gl.constexpr,
    HAS_REDUCE: gl.constexpr, DENSE_KINDS: gl.constexpr,
    BACKWARD: gl.constexpr, ACT: gl.constexpr, HAS_BIAS: gl.constexpr, SAVE_PRE: gl.constexpr,
    BANKS: gl.constexpr, EARLIER_BANKS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BN_IN: gl.constexpr, BK: gl.constexpr, BW: gl.constexpr,
    STAGES: gl.constexpr, PUT_SLOTS: gl.constexpr, PUT_ROWS: gl.constexpr, PUT_BLOCK: gl.constexpr,
    BT: gl.constexpr, BD: gl.constexpr, TASKS: gl.constexpr, WARPS: gl.constexpr, COPY_WARPS: gl.constexpr,
    COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One launch. Arguments are those of `overlap_kernel`, but for two counters and the descriptors.

    Grid: (programs,), at most what is resident; one is enough.
    """
    epoch = gl.load(use_ptr)
    # What an earlier launch of this use should have made is missing if one of its waits failed.
    sound = ((device.failed(report_ptr) == 0) & (gl.load(table_ptr + VOID) == 0)).to(gl.int32)
    num_tiles = gl.load(table_ptr + NUM_TILES)
    num_puts = 0
    if HAS_PUT:
        num_puts = gl.load(table_ptr + NUM_PUTS)
    num_wgrad = 0
    if HAS_WGRAD:
        # Opaque: else it would be computed in every partition again.
        num_wgrad = device.opaque(num_wgrads(L, D, F, H, BM, BN))
    num_copies = gl.minimum(num_puts + reduce_blocks, limit)
    num_gemms = gl.minimum(dense_tiles + num_tiles * (tiles_in + tiles_out) + num_wgrad, limit)

    element: gl.constexpr = rows_ptr.dtype.element_ty
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BK], element)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, BN], element)
    a_bufs = gl.allocate_shared_memory(element, [STAGES, BM, BK], a_layout)
    b_bufs = gl.allocate_shared_memory(element, [STAGES, BK, BN], b_layout)
    # Without puts a single word: what is not used still takes shared memory.
    ring_shape: gl.constexpr = [PUT_SLOTS, PUT_ROWS, PUT_BLOCK] if HAS_PUT else [1, 1, 1]
    ring_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    ring = gl.allocate_shared_memory(element, ring_shape, ring_layout)
    one_word: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tasks = gl.allocate_shared_memory(gl.int32, [TASKS * TASK_WORDS, 1], one_word)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    task_empty = gl.allocate_shared_memory(gl.int64, [TASKS, 1], mbarrier.MBarrierLayout())
    task_full = gl.allocate_shared_memory(gl.int64, [TASKS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(TASKS):
        mbarrier.init(task_empty.index(i), count=1)
        mbarrier.init(task_full.index(i), count=1)
    PAIR: gl.constexpr = ACT == "swiglu" and not BACKWARD
    gl.warp_specialize([
        (consume, (
            use_ptr, earlier_use_ptr, table_ptr, rank, W, L, D, F, H, R, tiles, chunks,
            results_ptr, results_peers_ptr, dots_ptr, dots_peers_ptr, returned_ptr, returned_peers_ptr,
            rows_ptr, row_weights_ptr, row_dots_ptr, bias_in_ptr, pre_ptr, hidden_ptr, bias_out_ptr,
            ready_ptr, done_ptr,
            saved_rows_ptr, activated_ptr, dweight_in_ptr, dbias_in_ptr, dweight_out_ptr, dbias_out_ptr,
            problems_ptr, a_bufs, b_bufs, empty, full, tasks, task_empty, task_full,
            HAS_IN, HAS_OUT, HAS_WGRAD, DENSE_KINDS, BACKWARD, ACT, HAS_BIAS, SAVE_PRE, BANKS, EARLIER_BANKS,
            BM, BN, BN_IN, BK, STAGES, TASKS, WARPS,
        )),
        (produce, (
            use_ptr, counter, earlier_use_ptr, table_ptr, report_ptr, rank, max_polls, num_gemms,
            num_tiles, num_wgrad, epoch, sound, W, L, D, F, H, R,
            tiles, chunks, tiles_in, tiles_out, lag, dense_tiles, num_problems, rows_ptr,
            arrived_ptr, hidden_ptr, ready_ptr, saved_rows_ptr, activated_ptr, problems_ptr,
            rows_desc, weight_in_desc, hidden_desc, weight_out_desc,
            a_bufs, b_bufs, empty, full, tasks, task_empty, task_full,
            HAS_IN, HAS_OUT, HAS_WGRAD, DENSE_KINDS, BACKWARD, PAIR, BANKS, EARLIER_BANKS,
            BM, BN, BN_IN, BK, BW, STAGES, TASKS,
        )),
        (copy, (
            use_ptr, copy_counter, table_ptr, report_ptr, rank, max_polls, num_copies,
            num_puts, sound, W, L, D, R, tiles, chunks, T, K,
            source_ptr, token_ptr, send_weights_ptr, rows_ptr, rows_peers_ptr, row_weights_ptr,
            row_weights_peers_ptr, arrived_ptr, arrived_peers_ptr, released_ptr, results_ptr, dots_ptr,
            spoiled_ptr, returned_ptr, out_ptr, expert_ptr, row_ptr, weight_ptr, dweight_ptr, ring,
            HAS_PUT, HAS_REDUCE, BACKWARD, BANKS, BM, PUT_SLOTS, PUT_ROWS, PUT_BLOCK, BT, BD, COPY_WARPS,
        )),
    ], [1, COPY_WARPS], [COPY_REGISTERS, COPY_REGISTERS])  # fmt: skip
