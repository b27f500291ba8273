"""Small Gluon kernels with what the Hopper kernel is made of, to test the emulator with: right ones.

What is wrong with their mutants is in `test_gluon_emulator.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from lancet_kernels.kernels.hopper.pipeline import barrier, load_tile
from lancet_kernels.kernels.protocol import device


@gluon.jit
def load_operands(
    a_desc, b_desc, a_bufs, b_bufs, empty, full, num_tiles, grid_n, K,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    it = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        for k in range(0, K, BK):
            place = it % STAGES
            mbarrier.wait(empty.index(place), ((it // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(place), (BM + BN) * BK * 2)
            load_tile(a_desc, [(tile // grid_n) * BM, k], full.index(place), a_bufs.index(place))
            load_tile(b_desc, [k, (tile % grid_n) * BN], full.index(place), b_bufs.index(place))
            it += 1


@gluon.jit
def multiply(
    c_ptr, a_bufs, b_bufs, empty, full, num_tiles, grid_n, M, N, K,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    it = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        acc = gl.zeros((BM, BN), gl.float32, MMA)
        for k in range(0, K, BK):
            place = it % STAGES
            mbarrier.wait(full.index(place), (it // STAGES) & 1)
            acc = warpgroup_mma(a_bufs.index(place), b_bufs.index(place), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1, pred=k > 0)
            it += 1
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
        i_m = (tile // grid_n) * BM + gl.arange(0, BM, gl.SliceLayout(1, MMA))
        i_n = (tile % grid_n) * BN + gl.arange(0, BN, gl.SliceLayout(0, MMA))
        p = c_ptr + i_m[:, None].to(gl.int64) * N + i_n[None, :]
        gl.store(p, acc, mask=(i_m < M)[:, None] & (i_n < N)[None, :])


@gluon.jit
def gemm_kernel(
    a_desc, b_desc, c_ptr, M, N, K,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """c [M, N] float32 = a [M, K] @ b [K, N]. Grid: (programs,), each takes every programs-th tile."""
    a_bufs = gl.allocate_shared_memory(gl.float16, [STAGES, BM, BK], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(gl.float16, [STAGES, BK, BN], b_desc.layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(full.index(i), count=1)
    grid_n = gl.cdiv(N, BN)
    num_tiles = gl.cdiv(M, BM) * grid_n
    gl.warp_specialize([
        (multiply, (c_ptr, a_bufs, b_bufs, empty, full, num_tiles, grid_n, M, N, K, BM, BN, BK, STAGES)),
        (load_operands, (
            a_desc, b_desc, a_bufs, b_bufs, empty, full, num_tiles, grid_n, K, BM, BN, BK, STAGES,
        )),
    ], [1], [24])  # fmt: skip


@gluon.jit
def relay_kernel(x_ptr, middle_ptr, middle_desc, out_ptr, flag_ptr, N: gl.constexpr):
    """Program 0 copies x [16, N] to middle and says so; program 1 loads that by TMA and stores it to out."""
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    i_m = gl.arange(0, 16, gl.SliceLayout(1, rows))
    i_n = gl.arange(0, N, gl.SliceLayout(0, rows))
    buffer = gl.allocate_shared_memory(gl.float16, [16, N], middle_desc.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(arrived.index(0), count=1)
    place = i_m[:, None] * N + i_n[None, :]
    if gl.program_id(0) == 0:
        gl.store(middle_ptr + place, gl.load(x_ptr + place))
        barrier()
        gl.atomic_xchg(flag_ptr, 1, sem="release", scope="gpu")
    else:
        while gl.atomic_add(flag_ptr, 0, sem="acquire", scope="gpu") == 0:
            pass
        device.fence_tma(True)
        mbarrier.expect(arrived.index(0), 16 * N * 2)
        load_tile(middle_desc, [0, 0], arrived.index(0), buffer)
        mbarrier.wait(arrived.index(0), 0)
        gl.store(out_ptr + place, buffer.load(rows))
