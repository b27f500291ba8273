"""The producer of the Hopper kernel: one warp that claims GEMM tasks, waits, and loads their operands by TMA.

    W  PEs, L experts on each    D  model width    F  hidden width    H  F, or 2F for swiglu
    R  most rows received        BM, BN  the tile of the output       BN_IN  columns that TILE_IN makes

A task whose rows do not come in time is not handed to the consumers, except a weight gradient, which they
then fill with NaN: as in the plain kernel, nobody is told that something is there which is not.

Descriptors. Those of TILE_IN and TILE_OUT come from the host, one over all received rows and one over the
weights of all experts: the rows of a tile behind the last of its expert belong to others, or to nobody, and
end in rows of the accumulator that are never stored; the contraction ends at the buffer's edge or, along the
rows of the weights, at a multiple of BK. A weight gradient contracts over rows, of which those behind the
expert's last must count as zero, so its descriptors have the extent of this expert's rows; and where the
operands of an independent GEMM lie stands in a table on the device. Both are made here, in the one place in
memory that Triton gives each, when no load that reads the former one is in flight any more.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from lancet_kernels.kernels.gluon_pipeline import NO_TASK, hand_over, load_steps, wait_for_loads
from lancet_kernels.kernels.gluon_shim import view
from lancet_kernels.kernels.overlap_kernel import find_task
from lancet_kernels.kernels.overlap_tasks import wait_ready, wait_rows
from lancet_kernels.kernels.overlap_tiles import NN, NT, TN, dense_problem, wgrad_operands
from lancet_kernels.kernels.schedule import group, tile_ptr
from lancet_kernels.kernels.tasks import DENSE, TILE_IN, TILE_OUT, WGRAD


@gluon.jit
def produce(
    use_ptr, counter, earlier_use_ptr, table_ptr, report_ptr, rank, max_polls, num_tasks, num_tiles,
    num_wgrad, epoch, sound, W, L, D, F, H, R, tiles, chunks, tiles_in, tiles_out, lag, dense_tiles,
    num_problems, rows_ptr, arrived_ptr, hidden_ptr, ready_ptr, saved_rows_ptr, saved_hidden_ptr,
    problems_ptr,
    rows_desc, weight_in_desc, hidden_desc, weight_out_desc,
    a_bufs, b_bufs, empty, full, tasks, task_empty, task_full,
    HAS_IN: gl.constexpr, HAS_OUT: gl.constexpr, HAS_WGRAD: gl.constexpr, DENSE_KINDS: gl.constexpr,
    BACKWARD: gl.constexpr, PAIR: gl.constexpr, BANKS: gl.constexpr, EARLIER_BANKS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BN_IN: gl.constexpr, BK: gl.constexpr, BW: gl.constexpr,
    STAGES: gl.constexpr, TASKS: gl.constexpr,
):  # fmt: skip
    """The producer's partition: all tasks but puts, gradients of combine weights and reductions.

    num_tasks: of these kinds. Their numbers are those of `tasks.py` in a launch without puts.
    """
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    element: gl.constexpr = a_bufs.dtype
    # The same bytes for operands that lie the other way, and for the halves of gate and up.
    across_a: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, BM], element)
    across_b: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BK], element)
    half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, BN // 2], element)
    a_across = view(a_bufs, [STAGES, BK, BM], across_a)
    b_across = view(b_bufs, [STAGES, BN, BK], across_b)
    b_halves = view(b_bufs, [2 * STAGES, BK, BN // 2], half)
    a_layout: gl.constexpr = a_bufs.layout
    b_layout: gl.constexpr = b_bufs.layout
    it = 0
    j = 0
    i = gl.atomic_add(use_ptr + counter, 1, sem="relaxed", scope="gpu").to(gl.int32)
    while i < num_tasks:
        kind, a, b, c, d = find_task(
            i, 0, num_tiles, num_wgrad, 0, dense_tiles, num_problems, tiles_in, tiles_out, lag, 1, 1,
            problems_ptr, table_ptr, table_ptr, chunks, L, D, F, H,
            False, HAS_IN or HAS_OUT, HAS_WGRAD, DENSE_KINDS != 0, BM, BN,
        )  # fmt: skip
        if HAS_IN:
            if kind == TILE_IN:
                local = gl.load(tile_ptr(table_ptr, W, W * L) + a)
                _, first_row, first_tile = group(table_ptr, W, W * L, rank * L + local)
                here = wait_rows(
                    a, a - first_tile, rank * L + local, epoch, rank, W, L, tiles, table_ptr, arrived_ptr,
                    max_polls, report_ptr, False, True, BANKS, BM, BW, i_w=gl.arange(0, BW, lanes),
                )  # fmt: skip
                if here:
                    steps = gl.cdiv(D, BK)
                    row = (epoch % BANKS).to(gl.int32) * R + first_row + (a - first_tile) * BM
                    form: gl.constexpr = NT if BACKWARD else NN
                    j = hand_over(
                        j, tasks, task_empty, task_full, kind, a, b, c, d, form, steps, 1, TASKS, 1
                    )  # fmt: skip
                    if BACKWARD:
                        it = load_steps(
                            it, steps, rows_desc, weight_in_desc, row, 0, local * F + b * BN_IN, 0, 0,
                            a_bufs, b_across, empty, full, False, False, False, STAGES, BM, BN, BK,
                        )  # fmt: skip
                    elif PAIR:
                        it = load_steps(
                            it, steps, rows_desc, weight_in_desc, row, 0, local * D, b * BN_IN, F + b * BN_IN,
                            a_bufs, b_halves, empty, full, False, True, True, STAGES, BM, BN, BK,
                        )  # fmt: skip
                    else:
                        it = load_steps(
                            it, steps, rows_desc, weight_in_desc, row, 0, local * D, b * BN_IN, 0,
                            a_bufs, b_bufs, empty, full, False, True, False, STAGES, BM, BN, BK,
                        )  # fmt: skip
        if HAS_OUT:
            if kind == TILE_OUT:
                local = gl.load(tile_ptr(table_ptr, W, W * L) + a)
                _, first_row, first_tile = group(table_ptr, W, W * L, rank * L + local)
                here = sound != 0
                if HAS_IN:
                    here = wait_ready(a, gl.cdiv(F, BN_IN), rank, ready_ptr, max_polls, report_ptr, True)
                if here:
                    row = first_row + (a - first_tile) * BM
                    if BACKWARD:
                        steps = gl.cdiv(H, BK)
                        j = hand_over(
                            j, tasks, task_empty, task_full, kind, a, b, c, d, NT, steps, 1, TASKS, 1
                        )  # fmt: skip
                        it = load_steps(
                            it, steps, hidden_desc, weight_out_desc, row, 0, local * D + b * BN, 0, 0,
                            a_bufs, b_across, empty, full, False, False, False, STAGES, BM, BN, BK,
                        )  # fmt: skip
                    else:
                        steps = gl.cdiv(F, BK)
                        j = hand_over(
                            j, tasks, task_empty, task_full, kind, a, b, c, d, NN, steps, 1, TASKS, 1
                        )  # fmt: skip
                        it = load_steps(
                            it, steps, hidden_desc, weight_out_desc, row, 0, local * F, b * BN, 0,
                            a_bufs, b_bufs, empty, full, False, True, False, STAGES, BM, BN, BK,
                        )  # fmt: skip
        if HAS_WGRAD:
            if kind == WGRAD:
                rows, first_row, _ = group(table_ptr, W, W * L, rank * L + b)
                here = sound != 0
                if HAS_IN:
                    here = here & wait_ready(
                        tiles + b, gl.cdiv(rows, BM) * gl.cdiv(F, BN_IN), rank, ready_ptr, max_polls,
                        report_ptr, True,
                    )  # fmt: skip
                x_ptr, dy_ptr, A, B = wgrad_operands(
                    a, first_row, epoch, earlier_use_ptr, D, F, H, R, rows_ptr, hidden_ptr, saved_rows_ptr,
                    saved_hidden_ptr, BANKS, EARLIER_BANKS,
                )  # fmt: skip
                steps = gl.where(here, gl.cdiv(rows, BK), 0)
                j = hand_over(
                    j, tasks, task_empty, task_full, kind, a, b, c, d, TN, steps, here.to(gl.int32), TASKS, 1
                )  # fmt: skip
                if steps > 0:
                    wait_for_loads(it, full, STAGES)
                    x_desc = tma.make_tensor_descriptor(x_ptr, [rows, A], [A, 1], [BK, BM], across_a)
                    dy_desc = tma.make_tensor_descriptor(dy_ptr, [rows, B], [B, 1], [BK, BN], b_layout)
                    it = load_steps(
                        it, steps, x_desc, dy_desc, 0, c * BM, 0, d * BN, 0,
                        a_across, b_bufs, empty, full, True, True, False, STAGES, BM, BN, BK,
                    )  # fmt: skip
        if DENSE_KINDS != 0:
            if kind == DENSE:
                form, a_ptr, b_ptr, _, M, N, K = dense_problem(problems_ptr, a, rows_ptr, True)
                steps = gl.cdiv(K, BK)
                j = hand_over(
                    j, tasks, task_empty, task_full, kind, a, b, c, d, form.to(gl.int32), steps, 1, TASKS, 1
                )  # fmt: skip
                wait_for_loads(it, full, STAGES)
                if DENSE_KINDS & 1:
                    if form == NN:
                        a_desc = tma.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BM, BK], a_layout)
                        b_desc = tma.make_tensor_descriptor(b_ptr, [K, N], [N, 1], [BK, BN], b_layout)
                        it = load_steps(
                            it, steps, a_desc, b_desc, b * BM, 0, 0, c * BN, 0,
                            a_bufs, b_bufs, empty, full, False, True, False, STAGES, BM, BN, BK,
                        )  # fmt: skip
                if DENSE_KINDS & 2:
                    if form == NT:
                        a_desc = tma.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BM, BK], a_layout)
                        b_desc = tma.make_tensor_descriptor(b_ptr, [N, K], [K, 1], [BN, BK], across_b)
                        it = load_steps(
                            it, steps, a_desc, b_desc, b * BM, 0, c * BN, 0, 0,
                            a_bufs, b_across, empty, full, False, False, False, STAGES, BM, BN, BK,
                        )  # fmt: skip
                if DENSE_KINDS & 4:
                    if form == TN:
                        a_desc = tma.make_tensor_descriptor(a_ptr, [K, M], [M, 1], [BK, BM], across_a)
                        b_desc = tma.make_tensor_descriptor(b_ptr, [K, N], [N, 1], [BK, BN], b_layout)
                        it = load_steps(
                            it, steps, a_desc, b_desc, 0, b * BM, 0, c * BN, 0,
                            a_across, b_bufs, empty, full, True, True, False, STAGES, BM, BN, BK,
                        )  # fmt: skip
        i = gl.atomic_add(use_ptr + counter, 1, sem="relaxed", scope="gpu").to(gl.int32)
    hand_over(j, tasks, task_empty, task_full, NO_TASK, 0, 0, 0, 0, 0, 0, 0, TASKS, 1)
