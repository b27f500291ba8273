"""The consumers of the Hopper kernel: two warpgroups that multiply, and store what the tasks are for.

    W  PEs, L experts on each    D  model width    F  hidden width    H  F, or 2F for swiglu
    R  most rows received                             BM, BN  the tile of the output

A tile is stored a quarter of its columns at a time. The accumulators' layout has 4 bytes of a row in a
thread, so a quarter goes through shared memory into the layout ROWS, 16 bytes a thread and at least 128
of a row together: results that go to peers cross NVLink in whole packets.

Stores are ordinary ones of all threads; the release that publishes them (`finish_ready`, `return_tile`)
comes after a barrier of the partition. What is stored here and loaded by TMA, `hidden`, changes from the
generic to the async proxy: a fence of the writer before the release, and one of the producer after the
acquire. There are no TMA stores, which a release would not cover.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lancet_kernels.kernels.hopper.pipeline import await_task, multiply_steps, take_task
from lancet_kernels.kernels.hopper.shim import view
from lancet_kernels.kernels.protocol import device
from lancet_kernels.kernels.protocol.schedule import group, tile_ptr
from lancet_kernels.kernels.protocol.steps import (
    finish_ready,
    poison_wgrad,
    result_rows,
    return_dots,
    return_tile,
)
from lancet_kernels.kernels.protocol.tasks import DENSE, TILE_IN, TILE_OUT, WGRAD
from lancet_kernels.kernels.reference.gemm import (
    DOT_BLOCK,
    NN,
    NT,
    TN,
    activate,
    dgelu,
    dsilu,
    quarters,
    silu,
)
from lancet_kernels.kernels.reference.tiles import dense_problem, wgrad_operands, wgrad_results


@gluon.jit
def _row_indices(BM: gl.constexpr, LAYOUT: gl.constexpr, PERIOD: gl.constexpr):
    """0 to BM. A thread's rows are PERIOD apart, and kept between tasks as one number, not as one each."""
    i = gl.arange(0, BM, gl.SliceLayout(1, LAYOUT))
    return device.opaque(i % PERIOD) + i // PERIOD * PERIOD


@gluon.jit
def _add_bias(value, bias_ptr, n0, N, WIDTH: gl.constexpr, QUARTER: gl.constexpr):
    i_n = n0 + gl.arange(0, WIDTH, gl.SliceLayout(0, QUARTER))
    b_bias = gl.load(bias_ptr + i_n, mask=i_n < N, other=0.0).to(gl.float32)
    return value + b_bias[None, :]


@gluon.jit
def _store(p_row, m_row, value, n0, N, WIDTH: gl.constexpr, ROWS: gl.constexpr):
    """value [BM, WIDTH], rounded once, to columns n0 on of the rows that start at p_row where m_row."""
    i_n = n0 + gl.arange(0, WIDTH, gl.SliceLayout(0, ROWS))
    value = gl.convert_layout(value.to(p_row.dtype.element_ty), ROWS)
    gl.store(p_row[:, None] + i_n[None, :], value, mask=m_row[:, None] & (i_n < N)[None, :])


@gluon.jit
def _load(p_row, m_row, n0, N, WIDTH: gl.constexpr, ROWS: gl.constexpr, QUARTER: gl.constexpr):
    """The same place as float32, in the layout of the accumulators; 0 where there is nothing."""
    i_n = n0 + gl.arange(0, WIDTH, gl.SliceLayout(0, ROWS))
    value = gl.load(p_row[:, None] + i_n[None, :], mask=m_row[:, None] & (i_n < N)[None, :], other=0.0)
    return gl.convert_layout(value, QUARTER).to(gl.float32)


@gluon.jit
def _rows(ptr, row, width):
    """Where the rows begin. Not computed ahead for several blocks of columns: an address is two registers."""
    return ptr + row.to(gl.int64) * device.opaque_width(width)


@gluon.jit
def _store_tile(
    acc, p_row, m_row, bias_ptr, n0, N, HAS_BIAS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, ROWS: gl.constexpr, QUARTER: gl.constexpr,
):  # fmt: skip
    """acc [BM, BN], plus bias [N], to columns n0 on of rows N wide, that may be anywhere."""
    WIDTH: gl.constexpr = BN // 4
    parts = quarters(acc, BM, BN)
    for q in gl.static_range(4):
        value = gl.convert_layout(parts[q], QUARTER, assert_trivial=True)
        if HAS_BIAS:
            value = _add_bias(value, bias_ptr, n0 + q * WIDTH, N, WIDTH, QUARTER)
        _store(p_row, m_row, value, n0 + q * WIDTH, N, WIDTH, ROWS)


@gluon.jit
def _finish_forward(
    acc, pre_ptr, hidden_ptr, row, m_row, bias_ptr, n0, F, ACT: gl.constexpr, HAS_BIAS: gl.constexpr,
    SAVE_PRE: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, ROWS: gl.constexpr, QUARTER: gl.constexpr,
):  # fmt: skip
    """TILE_IN forward: bias, pre-activation, activation. swiglu: the left half is gate, the right one up."""
    WIDTH: gl.constexpr = BN // 4
    PAIR: gl.constexpr = ACT == "swiglu"
    parts = quarters(acc, BM, BN)
    for q in gl.static_range(2 if PAIR else 4):
        n = n0 + q * WIDTH
        p_hidden, p_pre = _rows(hidden_ptr, row, F), _rows(pre_ptr, row, 2 * F if PAIR else F)
        value = gl.convert_layout(parts[q], QUARTER, assert_trivial=True)
        if HAS_BIAS:
            value = _add_bias(value, bias_ptr, n, F, WIDTH, QUARTER)
        if SAVE_PRE:
            _store(p_pre, m_row, value, n, F, WIDTH, ROWS)
        if PAIR:
            up = gl.convert_layout(parts[q + 2], QUARTER, assert_trivial=True)
            if HAS_BIAS:
                up = _add_bias(up, bias_ptr + F, n, F, WIDTH, QUARTER)
            if SAVE_PRE:
                _store(p_pre + F, m_row, up, n, F, WIDTH, ROWS)
            value = silu(value) * up
        else:
            value = activate(value, ACT)
        _store(p_hidden, m_row, value, n, F, WIDTH, ROWS)


@gluon.jit
def _finish_backward(
    acc, pre_ptr, dh_ptr, activated_ptr, row, b_weight, m_row, n0, F, ACT: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, ROWS: gl.constexpr, QUARTER: gl.constexpr,
):  # fmt: skip
    """TILE_IN backward: what `gemm.backward_tile` makes of acc. -> float32 [BM], as there.

    A sixteenth at a time: with swiglu, gate, up and their gradient are in registers beside the accumulators.
    """
    WIDTH: gl.constexpr = BN // 16
    parts = quarters(acc, BM, BN)
    dots = b_weight * 0.0
    for i in gl.static_range(16):
        n = n0 + i * WIDTH
        eighths = parts[i // 4].reshape(BM, 2, 2 * WIDTH).permute(0, 2, 1).split()
        halves = eighths[i // 2 % 2].reshape(BM, 2, WIDTH).permute(0, 2, 1).split()
        value = gl.convert_layout(halves[i % 2], QUARTER, assert_trivial=True)
        H = 2 * F if ACT == "swiglu" else F
        p_pre, p_dh = _rows(pre_ptr, row, H), _rows(dh_ptr, row, H)
        b_pre = _load(p_pre, m_row, n, F, WIDTH, ROWS, QUARTER)
        # What is needed longest comes last: most registers hold accumulators.
        if ACT == "swiglu":
            b_up = _load(p_pre + F, m_row, n, F, WIDTH, ROWS, QUARTER)
            b_silu = silu(b_pre)
            b_act = b_silu * b_up
        else:
            b_act = activate(b_pre, ACT)
        dots += gl.sum(value * b_act, 1)
        _store(_rows(activated_ptr, row, F), m_row, b_act * b_weight[:, None], n, F, WIDTH, ROWS)
        value = value * b_weight[:, None]
        if ACT == "swiglu":
            _store(p_dh + F, m_row, value * b_silu, n, F, WIDTH, ROWS)
            value = value * b_up * dsilu(b_pre)
        else:
            value = value * (dgelu(b_pre) if ACT == "gelu" else dsilu(b_pre))
        _store(p_dh, m_row, value, n, F, WIDTH, ROWS)
    return dots


@gluon.jit
def _add_row_dots(acc, p_row, m_row, b_ptr, K, ROWS: gl.constexpr):
    """`gemm.add_row_dots`: acc plus the rows of K numbers at p_row, each times b [K]."""
    i_k = gl.arange(0, DOT_BLOCK, gl.SliceLayout(0, ROWS))
    for k in range(0, K, DOT_BLOCK):
        m = m_row[:, None] & (i_k < K - k)[None, :]
        b_x = gl.load(p_row[:, None] + (k + i_k)[None, :], mask=m, other=0.0).to(gl.float32)
        b_b = gl.load(b_ptr + k + i_k, mask=i_k < K - k, other=0.0).to(gl.float32)
        acc += gl.sum(b_x * b_b[None, :], 1)
    return acc


@gluon.jit
def _store_bias_gradient(
    db_ptr, dy_ptr, weight_ptr, weighted, rows, n0, B, BN: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """db[n0:n0+BN] = the sums of dy [rows, B] down its columns, in a second look at what is in L2.

    weight: float32, by which the first `weighted` rows count; the others count once.
    """
    wide: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, WARPS], [1, 0])
    DEPTH: gl.constexpr = 2 * WARPS
    i_n = n0 + gl.arange(0, BN, gl.SliceLayout(0, wide))
    i_row = gl.arange(0, DEPTH, gl.SliceLayout(1, wide))
    sums = gl.zeros((DEPTH, BN), gl.float32, wide)
    for r in range(0, rows, DEPTH):
        p = dy_ptr + (r + i_row)[:, None].to(gl.int64) * B + i_n[None, :]
        m = (i_row < rows - r)[:, None] & (i_n < B)[None, :]
        b_weight = gl.load(weight_ptr + r + i_row, mask=i_row < weighted - r, other=1.0)
        sums += gl.load(p, mask=m, other=0.0).to(gl.float32) * b_weight[:, None]
    gl.store(db_ptr + i_n, gl.sum(sums, 0).to(db_ptr.dtype.element_ty), mask=i_n < B)


@gluon.jit
def _product(
    it, steps, form, a_bufs, b_bufs, a_across, b_across, empty, full,
    FORMS: gl.constexpr, MMA: gl.constexpr, STAGES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
):  # fmt: skip
    """-> the accumulators of a task, and the step that comes next. FORMS: bits of NN, NT and TN in use."""
    if FORMS == 1:
        acc, it = multiply_steps(it, steps, a_bufs, b_bufs, empty, full, False, True, MMA, STAGES, BM, BN)
    elif FORMS == 2:
        acc, it = multiply_steps(it, steps, a_bufs, b_across, empty, full, False, False, MMA, STAGES, BM, BN)
    elif FORMS == 4:
        acc, it = multiply_steps(it, steps, a_across, b_bufs, empty, full, True, True, MMA, STAGES, BM, BN)
    else:
        acc = gl.zeros((BM, BN), gl.float32, MMA)
        if FORMS & 1:
            if form == NN:
                acc, it = multiply_steps(
                    it, steps, a_bufs, b_bufs, empty, full, False, True, MMA, STAGES, BM, BN
                )  # fmt: skip
        if FORMS & 2:
            if form == NT:
                acc, it = multiply_steps(
                    it, steps, a_bufs, b_across, empty, full, False, False, MMA, STAGES, BM, BN
                )  # fmt: skip
        if FORMS & 4:
            if form == TN:
                acc, it = multiply_steps(
                    it, steps, a_across, b_bufs, empty, full, True, True, MMA, STAGES, BM, BN
                )  # fmt: skip
    return acc, it


@gluon.jit
def _finish_in(
    acc, tile, n, use_ptr, rank, W, L, D, F, H, R, tiles, table_ptr, rows_ptr, bias_ptr, pre_ptr, hidden_ptr,
    activated_ptr, row_weights_ptr, row_dots_ptr, ready_ptr,
    BACKWARD: gl.constexpr, ACT: gl.constexpr, HAS_BIAS: gl.constexpr, SAVE_PRE: gl.constexpr,
    BANKS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BN_IN: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """TILE_IN: the epilogue of its direction; then one more column of the tile is ready."""
    tiles = device.opaque(tiles)
    W, L, D, F, H, R = device.opaque_sizes(W, L, D, F, H, R)
    local = gl.load(tile_ptr(table_ptr, W, W * L) + tile)
    rows, first_row, first_tile = group(table_ptr, W, W * L, rank * L + local)
    m0 = (tile - first_tile) * BM
    if BACKWARD:
        SLICE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN // 16, 16])
        NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [WARPS, 1], [1, 0])
        i = m0 + gl.arange(0, BM, gl.SliceLayout(1, NARROW))
        row = first_row + i
        i_weight = m0 + _row_indices(BM, SLICE, 8)
        p_weight = row_weights_ptr + (gl.load(use_ptr) % BANKS) * R + first_row + i_weight
        b_weight = gl.load(p_weight, mask=i_weight < rows, other=0.0)
        dots = _finish_backward(
            acc, pre_ptr, hidden_ptr, activated_ptr, row, b_weight, i < rows, n * BN_IN, F, ACT, BM, BN,
            NARROW, SLICE,
        )  # fmt: skip
        dots = gl.convert_layout(dots, gl.SliceLayout(1, NARROW))
        if HAS_BIAS:
            if n == 0:
                p_row = rows_ptr + ((gl.load(use_ptr) % BANKS) * R + row) * D
                dots = _add_row_dots(dots, p_row, i < rows, bias_ptr + local * D, D, NARROW)
        gl.store(row_dots_ptr + gl.cast(n, gl.int64) * R + row, dots, mask=i < rows)
    else:
        QUARTER: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN // 4, 16])
        ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
        i = m0 + _row_indices(BM, ROWS, 4 * WARPS)
        _finish_forward(
            acc, pre_ptr, hidden_ptr, first_row + i, i < rows, bias_ptr + local * H, n * BN_IN, F, ACT,
            HAS_BIAS, SAVE_PRE, BM, BN, ROWS, QUARTER,
        )  # fmt: skip
    device.fence_tma(True)
    finish_ready(ready_ptr, tile, local, tiles)


@gluon.jit
def _finish_out(
    acc, tile, n, epoch, rank, W, L, D, F, R, tiles, chunks, table_ptr, bias_ptr, results_ptr,
    results_peers_ptr, row_dots_ptr, dots_ptr, dots_peers_ptr, returned_ptr, returned_peers_ptr, done_ptr,
    BACKWARD: gl.constexpr, HAS_BIAS: gl.constexpr, BANKS: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, BN_IN: gl.constexpr, ROWS: gl.constexpr, QUARTER: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """TILE_OUT: to the sources; with the last column of the tile, signal them."""
    W, L, D, F, _, R = device.opaque_sizes(W, L, D, F, F, R)
    chunks = device.opaque(chunks)
    local = gl.load(tile_ptr(table_ptr, W, W * L) + tile)
    expert = rank * L + local
    rows, first_row, first_tile = group(table_ptr, W, W * L, expert)
    m = tile - first_tile
    i_m = _row_indices(BM, ROWS, 4 * WARPS)
    p_row, m_row = result_rows(
        expert, m * BM + i_m, rows, first_row, W, L, D, table_ptr, results_ptr, results_ptr,
        results_peers_ptr, False,
    )  # fmt: skip
    bias_ptr += local * D
    _store_tile(acc, p_row, m_row, bias_ptr, n * BN, D, HAS_BIAS and not BACKWARD, BM, BN, ROWS, QUARTER)
    if BACKWARD:
        if n == 0:
            return_dots(
                expert, m, rows, first_row, gl.cdiv(F, BN_IN), W, L, R, table_ptr, row_dots_ptr, dots_ptr,
                dots_ptr, dots_peers_ptr, False, BM, i_m,
            )  # fmt: skip
    return_tile(
        tile, m, n, expert, first_row, epoch, rank, W, L, D, tiles, chunks, table_ptr, results_ptr,
        results_ptr, results_peers_ptr, dots_ptr, dots_ptr, returned_ptr, returned_peers_ptr, done_ptr,
        BACKWARD, BANKS, False, BM, BN,
    )  # fmt: skip


@gluon.jit
def _finish_wgrad(
    acc, which, local, m, n, sound, epoch, earlier_use_ptr, rank, W, L, D, F, H, R, table_ptr,
    rows_ptr, row_weights_ptr, hidden_ptr, saved_rows_ptr, activated_ptr,
    dweight_in_ptr, dbias_in_ptr, dweight_out_ptr, dbias_out_ptr,
    HAS_BIAS: gl.constexpr, BANKS: gl.constexpr, EARLIER_BANKS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, ROWS: gl.constexpr, QUARTER: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """WGRAD: the tile, and the bias gradient with m = 0; NaN if its rows did not come."""
    W, L, D, F, H, R = device.opaque_sizes(W, L, D, F, H, R)
    rows, first_row, _ = group(table_ptr, W, W * L, rank * L + local)
    _, dy_ptr, A, B = wgrad_operands(
        which, first_row, epoch, earlier_use_ptr, D, F, H, R, rows_ptr, hidden_ptr, saved_rows_ptr,
        activated_ptr, BANKS, EARLIER_BANKS,
    )  # fmt: skip
    dw_ptr, db_ptr = wgrad_results(
        which, local, A, B, dweight_in_ptr, dbias_in_ptr, dweight_out_ptr, dbias_out_ptr
    )  # fmt: skip
    if sound != 0:
        i = m * BM + _row_indices(BM, ROWS, 4 * WARPS)
        p_row = dw_ptr + i.to(gl.int64) * B
        _store_tile(acc, p_row, i < A, dw_ptr, n * BN, B, False, BM, BN, ROWS, QUARTER)
        if HAS_BIAS:
            if m == 0:
                p_weight = row_weights_ptr + (epoch % BANKS) * R + first_row
                weighted = gl.where(which == 0, rows, 0)
                _store_bias_gradient(db_ptr, dy_ptr, p_weight, weighted, rows, n * BN, B, BN, WARPS)
    else:
        poison_wgrad(
            dw_ptr, db_ptr, m * BM, n * BN, A, B, HAS_BIAS, BM, BN,
            gl.arange(0, BN, gl.BlockedLayout([1], [32], [WARPS], [0])),
        )  # fmt: skip


@gluon.jit
def consume(
    use_ptr, earlier_use_ptr, table_ptr, rank, W, L, D, F, H, R, tiles, chunks,
    results_ptr, results_peers_ptr, dots_ptr, dots_peers_ptr, returned_ptr, returned_peers_ptr,
    rows_ptr, row_weights_ptr, row_dots_ptr, bias_in_ptr, pre_ptr, hidden_ptr, bias_out_ptr,
    ready_ptr, done_ptr,
    saved_rows_ptr, activated_ptr, dweight_in_ptr, dbias_in_ptr, dweight_out_ptr, dbias_out_ptr,
    problems_ptr, a_bufs, b_bufs, empty, full, tasks, task_empty, task_full,
    HAS_IN: gl.constexpr, HAS_OUT: gl.constexpr, HAS_WGRAD: gl.constexpr, DENSE_KINDS: gl.constexpr,
    BACKWARD: gl.constexpr, ACT: gl.constexpr, HAS_BIAS: gl.constexpr, SAVE_PRE: gl.constexpr,
    BANKS: gl.constexpr, EARLIER_BANKS: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BN_IN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, TASKS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The consumers' partition: multiply the operands of each task that is handed over, and store."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN, 16])
    QUARTER: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BN // 4, 16])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    element: gl.constexpr = a_bufs.dtype
    across_a: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, BM], element)
    across_b: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BK], element)
    a_across = view(a_bufs, [STAGES, BK, BM], across_a)
    b_across = view(b_bufs, [STAGES, BN, BK], across_b)
    OF_TILES: gl.constexpr = (2 if BACKWARD else 1) if HAS_IN or HAS_OUT else 0
    FORMS: gl.constexpr = OF_TILES | (4 if HAS_WGRAD else 0) | DENSE_KINDS
    it = 0
    j = 0
    kind, form, steps = await_task(j, tasks, task_full, TASKS, WARPS)
    while kind >= 0:
        acc, it = _product(
            it, steps, form, a_bufs, b_bufs, a_across, b_across, empty, full, FORMS, MMA, STAGES, BM, BN
        )  # fmt: skip
        a, b, c, d, sound = take_task(j, tasks, task_empty, TASKS, WARPS)
        # Not held in registers while products run.
        epoch = gl.load(use_ptr)
        if HAS_IN:
            if kind == TILE_IN:
                _finish_in(
                    acc, a, b, use_ptr, rank, W, L, D, F, H, R, tiles, table_ptr, rows_ptr, bias_in_ptr,
                    pre_ptr, hidden_ptr, activated_ptr, row_weights_ptr, row_dots_ptr, ready_ptr,
                    BACKWARD, ACT, HAS_BIAS, SAVE_PRE, BANKS, BM, BN, BN_IN, WARPS,
                )  # fmt: skip
        if HAS_OUT:
            if kind == TILE_OUT:
                _finish_out(
                    acc, a, b, epoch, rank, W, L, D, F, R, tiles, chunks, table_ptr, bias_out_ptr,
                    results_ptr, results_peers_ptr, row_dots_ptr, dots_ptr, dots_peers_ptr, returned_ptr,
                    returned_peers_ptr, done_ptr, BACKWARD, HAS_BIAS, BANKS, BM, BN, BN_IN, ROWS, QUARTER,
                    WARPS,
                )  # fmt: skip
        if HAS_WGRAD:
            if kind == WGRAD:
                _finish_wgrad(
                    acc, a, b, c, d, sound, epoch, earlier_use_ptr, rank, W, L, D, F, H, R,
                    table_ptr, rows_ptr, row_weights_ptr, hidden_ptr, saved_rows_ptr, activated_ptr,
                    dweight_in_ptr, dbias_in_ptr, dweight_out_ptr, dbias_out_ptr, HAS_BIAS, BANKS,
                    EARLIER_BANKS, BM, BN, ROWS, QUARTER, WARPS,
                )  # fmt: skip
        if DENSE_KINDS != 0:
            if kind == DENSE:
                _, _, _, c_ptr, M, N, _ = dense_problem(problems_ptr, a, rows_ptr, True)
                i = b * BM + _row_indices(BM, ROWS, 4 * WARPS)
                p_row = c_ptr + i.to(gl.int64) * N
                _store_tile(acc, p_row, i < M, c_ptr, c * BN, N, False, BM, BN, ROWS, QUARTER)
        j += 1
        kind, form, steps = await_task(j, tasks, task_full, TASKS, WARPS)
