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

from lancet_kernels.kernels.hopper.pipeline import NO_TASK, hand_over, load_steps, wait_for_loads
from lancet_kernels.kernels.hopper.shim import view
from lancet_kernels.kernels.protocol.device import opaque, opaque_sizes, opaque_width
from lancet_kernels.kernels.protocol.schedule import group, tile_ptr
from lancet_kernels.kernels.protocol.steps import wait_ready, wait_rows
from lancet_kernels.kernels.protocol.tasks import DENSE, TILE_IN, TILE_OUT, WGRAD
from lancet_kernels.kernels.reference.gemm import NN, NT, TN
from lancet_kernels.kernels.reference.kernel import find_task
from lancet_kernels.kernels.reference.tiles import dense_problem, wgrad_operands


@gluon.jit
def _load_in(
    it, j, tile, n, epoch, rank, W, L, D, F, R, tiles, table_ptr, arrived_ptr, max_polls,
    report_ptr, rows_desc, weight_desc,
    a_bufs, b_bufs, b_across, b_halves, empty, full, tasks, task_empty, task_full,
    BACKWARD: gl.constexpr, PAIR: gl.constexpr, BANKS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BN_IN: gl.constexpr, BK: gl.constexpr, BW: gl.constexpr, STAGES: gl.constexpr, TASKS: gl.constexpr,
):  # fmt: skip
    """TILE_IN: wait for the rows of the tile, hand it over, load. -> it, j."""
    W, L, D, F, _, R = opaque_sizes(W, L, D, F, F, R)
    tiles = opaque(tiles)
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    FORM: gl.constexpr = NT if BACKWARD else NN
    local = gl.load(tile_ptr(table_ptr, W, W * L) + tile)
    _, first_row, first_tile = group(table_ptr, W, W * L, rank * L + local)
    m = tile - first_tile
    here = wait_rows(
        tile, m, rank * L + local, epoch, rank, W, L, tiles, table_ptr, arrived_ptr, max_polls,
        report_ptr, False, True, BANKS, BM, BW, gl.arange(0, BW, lanes),
    )  # fmt: skip
    if here:
        steps = gl.cdiv(D, BK)
        row = (epoch % BANKS).to(gl.int32) * R + first_row + m * BM
        j = hand_over(j, tasks, task_empty, task_full, TILE_IN, tile, n, 0, 0, FORM, steps, 1, TASKS, 1)
        if BACKWARD:
            it = load_steps(
                it, steps, rows_desc, weight_desc, row, 0, local * F + n * BN_IN, 0, 0,
                a_bufs, b_across, empty, full, False, False, False, STAGES, BM, BN, BK,
            )  # fmt: skip
        elif PAIR:
            it = load_steps(
                it, steps, rows_desc, weight_desc, row, 0, local * D, n * BN_IN, F + n * BN_IN,
                a_bufs, b_halves, empty, full, False, True, True, STAGES, BM, BN, BK,
            )  # fmt: skip
        else:
            it = load_steps(
                it, steps, rows_desc, weight_desc, row, 0, local * D, n * BN_IN, 0,
                a_bufs, b_bufs, empty, full, False, True, False, STAGES, BM, BN, BK,
            )  # fmt: skip
    return it, j


@gluon.jit
def _load_out(
    it, j, tile, n, sound, rank, W, L, D, F, H, table_ptr, ready_ptr, max_polls, report_ptr,
    hidden_desc, weight_desc, a_bufs, b_bufs, b_across, empty, full, tasks, task_empty, task_full,
    HAS_IN: gl.constexpr, BACKWARD: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BN_IN: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, TASKS: gl.constexpr,
):  # fmt: skip
    """TILE_OUT: wait until the tile's columns of the first GEMM are ready, hand it over, load. -> it, j."""
    W, L, D, F, H, _ = opaque_sizes(W, L, D, F, H, L)
    FORM: gl.constexpr = NT if BACKWARD else NN
    local = gl.load(tile_ptr(table_ptr, W, W * L) + tile)
    _, first_row, first_tile = group(table_ptr, W, W * L, rank * L + local)
    here = sound != 0
    if HAS_IN:
        here = wait_ready(tile, gl.cdiv(F, BN_IN), rank, ready_ptr, max_polls, report_ptr, True)
    if here:
        row = first_row + (tile - first_tile) * BM
        steps = gl.cdiv(H if BACKWARD else F, BK)
        j = hand_over(j, tasks, task_empty, task_full, TILE_OUT, tile, n, 0, 0, FORM, steps, 1, TASKS, 1)
        if BACKWARD:
            it = load_steps(
                it, steps, hidden_desc, weight_desc, row, 0, local * D + n * BN, 0, 0,
                a_bufs, b_across, empty, full, False, False, False, STAGES, BM, BN, BK,
            )  # fmt: skip
        else:
            it = load_steps(
                it, steps, hidden_desc, weight_desc, row, 0, local * F, n * BN, 0,
                a_bufs, b_bufs, empty, full, False, True, False, STAGES, BM, BN, BK,
            )  # fmt: skip
    return it, j


@gluon.jit
def _load_wgrad(
    it, j, which, local, m, n, sound, epoch, earlier_use_ptr, rank, W, L, D, F, H, R, tiles, table_ptr,
    rows_ptr, hidden_ptr, ready_ptr, saved_rows_ptr, activated_ptr, max_polls, report_ptr,
    a_across, b_bufs, empty, full, tasks, task_empty, task_full,
    HAS_IN: gl.constexpr, BANKS: gl.constexpr, EARLIER_BANKS: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, BN_IN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, TASKS: gl.constexpr,
):  # fmt: skip
    """WGRAD: wait until all tiles of the expert are ready, hand it over, load its rows. -> it, j."""
    W, L, D, F, H, R = opaque_sizes(W, L, D, F, H, R)
    tiles = opaque(tiles)
    rows, first_row, _ = group(table_ptr, W, W * L, rank * L + local)
    here = sound != 0
    if HAS_IN:
        columns = gl.cdiv(rows, BM) * gl.cdiv(F, BN_IN)
        here = here & wait_ready(tiles + local, columns, rank, ready_ptr, max_polls, report_ptr, True)
    x_ptr, dy_ptr, A, B = wgrad_operands(
        which, first_row, epoch, earlier_use_ptr, D, F, H, R, rows_ptr, hidden_ptr, saved_rows_ptr,
        activated_ptr, BANKS, EARLIER_BANKS,
    )  # fmt: skip
    steps = gl.where(here, gl.cdiv(rows, BK), 0)
    j = hand_over(
        j, tasks, task_empty, task_full, WGRAD, which, local, m, n, TN, steps, here.to(gl.int32), TASKS, 1
    )  # fmt: skip
    if steps > 0:
        wait_for_loads(it, full, STAGES)
        x_desc = tma.make_tensor_descriptor(x_ptr, [rows, A], [A, 1], [BK, BM], a_across.layout)
        dy_desc = tma.make_tensor_descriptor(dy_ptr, [rows, B], [B, 1], [BK, BN], b_bufs.layout)
        it = load_steps(
            it, steps, x_desc, dy_desc, 0, m * BM, 0, n * BN, 0,
            a_across, b_bufs, empty, full, True, True, False, STAGES, BM, BN, BK,
        )  # fmt: skip
    return it, j


@gluon.jit
def _load_dense(
    it, j, problem, m, n, problems_ptr, like_ptr, a_bufs, b_bufs, a_across, b_across, empty, full,
    tasks, task_empty, task_full, KINDS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, TASKS: gl.constexpr,
):  # fmt: skip
    """DENSE: hand the tile over, and load its operands. -> it, j."""
    form, a_ptr, b_ptr, _, M, N, K = dense_problem(problems_ptr, problem, like_ptr, True)
    steps = gl.cdiv(K, BK)
    j = hand_over(
        j, tasks, task_empty, task_full, DENSE, problem, m, n, 0, form.to(gl.int32), steps, 1, TASKS, 1
    )  # fmt: skip
    wait_for_loads(it, full, STAGES)
    if KINDS & 1:
        if form == NN:
            a_desc = tma.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BM, BK], a_bufs.layout)
            b_desc = tma.make_tensor_descriptor(b_ptr, [K, N], [N, 1], [BK, BN], b_bufs.layout)
            it = load_steps(
                it, steps, a_desc, b_desc, m * BM, 0, 0, n * BN, 0,
                a_bufs, b_bufs, empty, full, False, True, False, STAGES, BM, BN, BK,
            )  # fmt: skip
    if KINDS & 2:
        if form == NT:
            a_desc = tma.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BM, BK], a_bufs.layout)
            b_desc = tma.make_tensor_descriptor(b_ptr, [N, K], [K, 1], [BN, BK], b_across.layout)
            it = load_steps(
                it, steps, a_desc, b_desc, m * BM, 0, n * BN, 0, 0,
                a_bufs, b_across, empty, full, False, False, False, STAGES, BM, BN, BK,
            )  # fmt: skip
    if KINDS & 4:
        if form == TN:
            a_desc = tma.make_tensor_descriptor(a_ptr, [K, M], [M, 1], [BK, BM], a_across.layout)
            b_desc = tma.make_tensor_descriptor(b_ptr, [K, N], [N, 1], [BK, BN], b_bufs.layout)
            it = load_steps(
                it, steps, a_desc, b_desc, 0, m * BM, 0, n * BN, 0,
                a_across, b_bufs, empty, full, True, True, False, STAGES, BM, BN, BK,
            )  # fmt: skip
    return it, j


@gluon.jit
def produce(
    use_ptr, counter, earlier_use_ptr, table_ptr, report_ptr, rank, max_polls, num_tasks, num_tiles,
    num_wgrad, epoch, sound, W, L, D, F, H, R, tiles, chunks, tiles_in, tiles_out, lag, dense_tiles,
    num_problems, rows_ptr, arrived_ptr, hidden_ptr, ready_ptr, saved_rows_ptr, activated_ptr,
    problems_ptr, rows_desc, weight_in_desc, hidden_desc, weight_out_desc,
    a_bufs, b_bufs, empty, full, tasks, task_empty, task_full,
    HAS_IN: gl.constexpr, HAS_OUT: gl.constexpr, HAS_WGRAD: gl.constexpr, DENSE_KINDS: gl.constexpr,
    BACKWARD: gl.constexpr, PAIR: gl.constexpr, BANKS: gl.constexpr, EARLIER_BANKS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BN_IN: gl.constexpr, BK: gl.constexpr, BW: gl.constexpr,
    STAGES: gl.constexpr, TASKS: gl.constexpr,
):  # fmt: skip
    """The producer's partition: all tasks but puts and reductions.

    num_tasks: of these kinds. Their numbers are those of `tasks.py` in a launch without puts.
    """
    element: gl.constexpr = a_bufs.dtype
    # The same bytes for operands that lie the other way, and for the halves of gate and up.
    across_a: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, BM], element)
    across_b: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BK], element)
    half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, BN // 2], element)
    a_across = view(a_bufs, [STAGES, BK, BM], across_a)
    b_across = view(b_bufs, [STAGES, BN, BK], across_b)
    b_halves = view(b_bufs, [2 * STAGES, BK, BN // 2], half)
    it = 0
    j = 0
    i = gl.atomic_add(use_ptr + counter, 1, sem="relaxed", scope="gpu").to(gl.int32)
    while i < num_tasks:
        kind, a, b, c, d = find_task(
            i, 0, num_tiles, num_wgrad, dense_tiles, opaque(num_problems), opaque(tiles_in),
            opaque(tiles_out), opaque(lag), 1, 1, problems_ptr, table_ptr, table_ptr, chunks,
            opaque(L), opaque_width(D), opaque_width(F), opaque_width(H),
            False, HAS_IN or HAS_OUT, HAS_WGRAD, DENSE_KINDS != 0, BM, BN,
        )  # fmt: skip
        if HAS_IN:
            if kind == TILE_IN:
                it, j = _load_in(
                    it, j, a, b, epoch, rank, W, L, D, F, R, tiles, table_ptr, arrived_ptr,
                    max_polls, report_ptr, rows_desc, weight_in_desc,
                    a_bufs, b_bufs, b_across, b_halves, empty, full,
                    tasks, task_empty, task_full, BACKWARD, PAIR, BANKS, BM, BN, BN_IN, BK, BW, STAGES, TASKS,
                )  # fmt: skip
        if HAS_OUT:
            if kind == TILE_OUT:
                it, j = _load_out(
                    it, j, a, b, sound, rank, W, L, D, F, H, table_ptr, ready_ptr, max_polls, report_ptr,
                    hidden_desc, weight_out_desc, a_bufs, b_bufs, b_across, empty, full, tasks, task_empty,
                    task_full, HAS_IN, BACKWARD, BM, BN, BN_IN, BK, STAGES, TASKS,
                )  # fmt: skip
        if HAS_WGRAD:
            if kind == WGRAD:
                it, j = _load_wgrad(
                    it, j, a, b, c, d, sound, epoch, earlier_use_ptr, rank, W, L, D, F, H, R, tiles,
                    table_ptr, rows_ptr, hidden_ptr, ready_ptr, saved_rows_ptr, activated_ptr, max_polls,
                    report_ptr, a_across, b_bufs, empty, full, tasks, task_empty, task_full,
                    HAS_IN, BANKS, EARLIER_BANKS, BM, BN, BN_IN, BK, STAGES, TASKS,
                )  # fmt: skip
        if DENSE_KINDS != 0:
            if kind == DENSE:
                it, j = _load_dense(
                    it, j, a, b, c, problems_ptr, rows_ptr, a_bufs, b_bufs, a_across, b_across, empty, full,
                    tasks, task_empty, task_full, DENSE_KINDS, BM, BN, BK, STAGES, TASKS,
                )  # fmt: skip
        i = gl.atomic_add(use_ptr + counter, 1, sem="relaxed", scope="gpu").to(gl.int32)
    hand_over(j, tasks, task_empty, task_full, NO_TASK, 0, 0, 0, 0, 0, 0, 0, TASKS, 1)
