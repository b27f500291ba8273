"""The consumers of the Hopper kernel: two warpgroups that multiply, and store what the tasks are for.

A tile is stored a quarter of its columns at a time. The accumulators' layout has 4 bytes of a row in a
thread, so a quarter goes through shared memory into the layout ROWS, 16 bytes a thread and at least 128
of a row together: results that go to peers cross NVLink in whole packets.

Stores are ordinary ones of all threads, since a release would not cover TMA's; it comes from the signal warp,
which also says where each row of a tile goes, for all kinds but TILE_IN. What is stored here and loaded by
TMA, `hidden`, changes from the generic to the async proxy: a fence before the release, and one of the
producer after the acquire.

The loop over the contraction, in machine code (sm_90, 2026-11-26; `lancet kernels` says so of each variant,
and fails where it is not so): a product is always in flight, as each step waits for the one before its own.
Triton 3.9: 56 instructions a step of 64 in a forward, 62 in a backward, 4 of them HGMMA; no local memory;
one barrier of the 256 threads, with 3.6 two. In a backward also a MEMBAR and a fence of the async proxy: of a
`view` the compiler does not see that TMA has filled it. All of it, tens of cycles, runs while the product of
the step before does: 128 x 256 x 64 at 4,096 FLOP a cycle is 1,024.

Why both warpgroups have one tile. With a tile each, one's epilogue would hide behind the other's products.
But 128 x 256 accumulators fill the registers of two warpgroups, so a tile would be 128 x 128 or 64 x 256,
and loads for the same products 64 or 80 bytes a cycle instead of 48; the 5,120 bytes a cycle that NVIDIA
states for the L2 of an A100 are 39 for each of 132 multiprocessors. So loops would take 1.33 or 1.67 times
as long wherever L2 is what they wait for, and that is what 48 bytes do already, while the epilogues, 64 to
320 KB each, are 8 % of the loops of a forward of Qwen3-30B-A3B (D 2048, F 768) and 11 % of a backward without
weight gradients; of Mixtral (4096, 14336) 1 to 2 %.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from lancet_kernels.kernels.hopper.pipeline import (
    TASKS,
    await_task,
    barrier,
    multiply_steps,
    read_task,
    result_columns,
    views_of,
)
from lancet_kernels.kernels.portable.gemm import DOT_BLOCK, activate, dgelu, dsilu, quarters, silu
from lancet_kernels.kernels.protocol import device
from lancet_kernels.kernels.protocol.device import opaque_sizes
from lancet_kernels.kernels.protocol.schedule import group
from lancet_kernels.kernels.protocol.steps import base_of, bias_result, expert_of_tile, wgrad_operands
from lancet_kernels.kernels.protocol.tasks import TILE_IN, TILE_OUT, WGRAD


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
    acc, p_row, m_row, bias_ptr, bias_columns, n0, N, BM: gl.constexpr, BN: gl.constexpr, ROWS: gl.constexpr,
    QUARTER: gl.constexpr,
):  # fmt: skip
    """acc [BM, BN], plus bias [bias_columns] or None, to columns n0 on of rows N wide, which lie anywhere."""
    WIDTH: gl.constexpr = BN // 4
    parts = quarters(acc, BM, BN)
    for q in gl.static_range(4):
        value = gl.convert_layout(parts[q], QUARTER, assert_trivial=True)
        if bias_ptr is not None:
            value = _add_bias(value, bias_ptr, n0 + q * WIDTH, bias_columns, WIDTH, QUARTER)
        _store(p_row, m_row, value, n0 + q * WIDTH, N, WIDTH, ROWS)


@gluon.jit
def _finish_forward(
    acc, pre_ptr, hidden_ptr, row, base, m_row, bias_ptr, n0, F, ACT: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, ROWS: gl.constexpr, QUARTER: gl.constexpr,
):  # fmt: skip
    """TILE_IN forward: bias, pre-activation, activation. swiglu: the left half is gate, the right one up."""
    WIDTH: gl.constexpr = BN // 4
    PAIR: gl.constexpr = ACT == "swiglu"
    parts = quarters(acc, BM, BN)
    for q in gl.static_range(2 if PAIR else 4):
        n = n0 + q * WIDTH
        p_hidden, p_pre = _rows(hidden_ptr, row, F), _rows(pre_ptr, base + row, 2 * F if PAIR else F)
        value = gl.convert_layout(parts[q], QUARTER, assert_trivial=True)
        if bias_ptr is not None:
            value = _add_bias(value, bias_ptr, n, F, WIDTH, QUARTER)
        _store(p_pre, m_row, value, n, F, WIDTH, ROWS)
        if PAIR:
            up = gl.convert_layout(parts[q + 2], QUARTER, assert_trivial=True)
            if bias_ptr is not None:
                up = _add_bias(up, bias_ptr + F, n, F, WIDTH, QUARTER)
            _store(p_pre + F, m_row, up, n, F, WIDTH, ROWS)
            value = silu(value) * up
        else:
            value = activate(value, ACT)
        _store(p_hidden, m_row, value, n, F, WIDTH, ROWS)


@gluon.jit
def _finish_backward(
    acc, pre_ptr, dh_ptr, activated_ptr, row, base, b_weight, m_row, n0, F, ACT: gl.constexpr,
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
        p_pre = _rows(pre_ptr, base + row, H)
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
        p_dh = _rows(dh_ptr, row, H)
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
    db_ptr, dy_ptr, weight_ptr, weighted, rows, n0, B, sound, BN: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """db[n0:n0+BN] = the sums of dy [rows, B] down its columns, in a second look at what is in L2.

    weight: float32, by which the first `weighted` rows count; the others count once. NaN if not sound.
    """
    wide: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, WARPS], [1, 0])
    DEPTH: gl.constexpr = 2 * WARPS
    i_n = n0 + gl.arange(0, BN, gl.SliceLayout(0, wide))
    i_row = gl.arange(0, DEPTH, gl.SliceLayout(1, wide))
    sums = gl.zeros((DEPTH, BN), gl.float32, wide)
    if sound == 0:
        sums += float("nan")
        rows = 0
    for r in range(0, rows, DEPTH):
        p = dy_ptr + (r + i_row)[:, None].to(gl.int64) * B + i_n[None, :]
        m = (i_row < rows - r)[:, None] & (i_n < B)[None, :]
        b_weight = gl.load(weight_ptr + r + i_row, mask=i_row < weighted - r, other=1.0)
        sums += gl.load(p, mask=m, other=0.0).to(gl.float32) * b_weight[:, None]
    gl.store(db_ptr + i_n, gl.sum(sums, 0).to(db_ptr.dtype.element_ty), mask=i_n < B)


@gluon.jit
def _finish_in(acc, task, ptrs, sizes, const):
    """TILE_IN: the epilogue of its direction."""
    BM: gl.constexpr = const.BM
    BN: gl.constexpr = const.BN
    sizes = opaque_sizes(sizes)
    D, F, R = sizes.D, sizes.F, sizes.R
    local, _, m, rows, first_row = expert_of_tile(task.index, ptrs, sizes)
    m0, n0 = m * BM, task.n * const.BN_IN
    base = base_of(ptrs, False)
    if const.BACKWARD:
        SLICE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [const.WARPS, 1], [16, BN // 16, 16])
        NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [const.WARPS, 1], [1, 0])
        i = m0 + gl.arange(0, BM, gl.SliceLayout(1, NARROW))
        row = first_row + i
        i_weight = m0 + _row_indices(BM, SLICE, 8)
        p_weight = ptrs.arrivals.weights + first_row + i_weight
        b_weight = gl.load(p_weight, mask=i_weight < rows, other=0.0)
        dots = _finish_backward(
            acc, ptrs.gemms.pre, ptrs.gemms.hidden, ptrs.gemms.activated, row, base, b_weight, i < rows, n0,
            F, const.ACT, BM, BN, NARROW, SLICE,
        )  # fmt: skip
        dots = gl.convert_layout(dots, gl.SliceLayout(1, NARROW))
        if ptrs.gemms.bias_in is not None:
            if task.n == 0:
                p_row = ptrs.arrivals.rows + row.to(gl.int64) * D
                dots = _add_row_dots(dots, p_row, i < rows, ptrs.gemms.bias_in + local * D, D, NARROW)
        gl.store(ptrs.gemms.row_dots + gl.cast(task.n, gl.int64) * R + row, dots, mask=i < rows)
    else:
        HAS_BIAS: gl.constexpr = ptrs.gemms.bias_in is not None
        bias_ptr = ptrs.gemms.bias_in + local * sizes.H if HAS_BIAS else None
        QUARTER: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [const.WARPS, 1], [16, BN // 4, 16])
        ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [const.WARPS, 1], [1, 0])
        i = m0 + _row_indices(BM, ROWS, 4 * const.WARPS)
        _finish_forward(
            acc, ptrs.gemms.pre, ptrs.gemms.hidden, first_row + i, base, i < rows, bias_ptr, n0, F, const.ACT,
            BM, BN, ROWS, QUARTER,
        )  # fmt: skip


@gluon.jit
def _finish_rest(acc, j, task, ptrs, sizes, rings, const):
    """What is no TILE_IN: to rows at the addresses that the signal warp has put down; 0: there is no row."""
    BM: gl.constexpr = const.BM
    BN: gl.constexpr = const.BN
    QUARTER: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [const.WARPS, 1], [16, BN // 4, 16])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [const.WARPS, 1], [1, 0])
    HAS_BIAS: gl.constexpr = not const.BACKWARD and ptrs.gemms.bias_out is not None
    bias_ptr = None
    bias_columns = 0
    if HAS_BIAS:
        if task.kind == TILE_OUT:
            here = opaque_sizes(sizes)
            local, _, _, _, _ = expert_of_tile(task.index, ptrs, here)
            bias_columns += here.D
            bias_ptr = ptrs.gemms.bias_out + local * here.D
        else:
            bias_ptr = ptrs.gemms.bias_out
    mbarrier.wait(rings.targets_full.index(j % TASKS), (j // TASKS) & 1)
    address = rings.targets.load(gl.SliceLayout(1, ROWS))
    p_row = gl.multiple_of(address.to(ptrs.returns.rows.dtype), 16)
    N = result_columns(j, rings, const.WARPS) // 8 * 8
    _store_tile(acc, p_row, address != 0, bias_ptr, bias_columns, task.n * BN, N, BM, BN, ROWS, QUARTER)


@gluon.jit
def _finish_bias(task, sound, ptrs, sizes, const):
    """WGRAD: with m = 0 also the gradient of the bias; NaN if rows of its sums did not come."""
    sizes = opaque_sizes(sizes)
    expert = sizes.rank * sizes.L + task.index
    rows, first_row, _ = group(ptrs.of_pass.table, sizes.W, sizes.W * sizes.L, expert)
    _, dy_ptr, _, B = wgrad_operands(task, first_row, ptrs, sizes)
    _store_bias_gradient(
        bias_result(task, B, ptrs), dy_ptr, ptrs.arrivals.weights + first_row,
        gl.where(task.which == 0, rows, 0), rows, task.n * const.BN, B, sound, const.BN, const.WARPS,
    )  # fmt: skip


@gluon.jit
def consume(ptrs, sizes, rings, const):
    """The consumers' partition: multiply the operands of each task that is handed over, and store."""
    BM: gl.constexpr = const.BM
    BN: gl.constexpr = const.BN
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [const.WARPS, 1], [16, BN, 16])
    ACROSS: gl.constexpr = const.BACKWARD or ptrs.problems is not None
    views = views_of(rings, const)
    b_of_tiles = views.b_across if const.BACKWARD else views.b
    it = 0
    j = 0
    kind, steps = await_task(j, rings, const.WARPS)
    while kind >= 0:
        if ACROSS:
            acc = gl.zeros((BM, BN), gl.float32, MMA)
            if kind >= WGRAD:
                acc, it = multiply_steps(it, steps, views.a_across, views.b, rings, True, True, MMA, const)
            else:
                acc, it = multiply_steps(
                    it, steps, views.a, b_of_tiles, rings, False, not const.BACKWARD, MMA, const
                )
        else:
            acc, it = multiply_steps(it, steps, views.a, views.b, rings, False, True, MMA, const)
        task, sound = read_task(j, kind, rings, const.WARPS)
        if kind == TILE_IN:
            _finish_in(acc, task, ptrs, sizes, const)
        else:
            if const.BACKWARD:
                if sound == 0:
                    # Of a weight gradient whose rows did not come.
                    acc += float("nan")
            # Always so. Without a branch ptxas spills 76 bytes instead of 16 (forward of swiglu with
            # independent GEMMs, Triton 3.9, 2026-11-26).
            if sound >= 0:
                _finish_rest(acc, j, task, ptrs, sizes, rings, const)
        if const.BACKWARD:
            if ptrs.gradients.bias_in is not None:
                if (kind == WGRAD) & (task.m == 0):
                    _finish_bias(task, sound, ptrs, sizes, const)
        # One thread says it for all.
        barrier()
        mbarrier.arrive(rings.stored.index(j % TASKS), count=1)
        j += 1
        kind, steps = await_task(j, rings, const.WARPS)
