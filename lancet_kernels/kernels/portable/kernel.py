"""The persistent kernel in which puts, expert GEMMs, weight gradients and independent GEMMs share one launch.

Every program claims the next task number from one counter until there is none (`tasks.py` and `schedule.py`
have the order and the reason why it cannot deadlock); the bodies of GEMM tasks are in `tiles.py`, that of a
put in `protocol/steps.py`. What a launch lacks is None, and its code is not there.
"""

import triton
import triton.language as tl

from lancet_kernels.kernels.portable.tiles import dense_tile, tile_in, tile_out, tile_wgrad
from lancet_kernels.kernels.protocol import device, tasks
from lancet_kernels.kernels.protocol.arguments import Blocks, Sizes
from lancet_kernels.kernels.protocol.schedule import NUM_TILES, VOID
from lancet_kernels.kernels.protocol.steps import num_put_tasks, put_part

# Which word of a pass counts the claims.
COUNTER = tl.constexpr(1)


@triton.jit
def _perform(
    of_pass, arrivals, returns, stages, sending, gemms, gradients, problems_ptr, sizes, blocks,
    num_problems, dense_tiles, limit,
    BACKWARD: tl.constexpr, ACT: tl.constexpr, NVSHMEM: tl.constexpr, TMA: tl.constexpr,
    PUT_ROWS: tl.constexpr, PUT_BLOCK: tl.constexpr,
):  # fmt: skip
    """Claim tasks until there is none, and do them."""
    epoch = tl.load(of_pass.words)
    # Of a pass whose counts did not come, or did not fit, nothing is true.
    sound = ((device.failed(of_pass.report) == 0) & (tl.load(of_pass.table + VOID) == 0)).to(tl.int32)
    num_tiles = tl.load(of_pass.table + NUM_TILES)
    num_puts = num_put_tasks(of_pass)
    num_gemms = tasks.num_gemm_tasks(num_tiles, dense_tiles, sizes, blocks, BACKWARD)
    num_tasks = tl.minimum(num_puts + num_gemms, limit)
    # What a tile of the second GEMM needs is then behind what other programs are still at.
    lag = tasks.lag_of(tl.num_programs(0), tl.cdiv(sizes.F, blocks.BN_IN))
    i = tl.atomic_add(of_pass.words + COUNTER, 1, sem="relaxed", scope="gpu").to(tl.int32)
    while i < num_tasks:
        if i < num_puts:
            put_part(
                i, epoch, of_pass, sizes, sending, arrivals, stages,
                BACKWARD, NVSHMEM, blocks.BM, PUT_ROWS, PUT_BLOCK,
            )  # fmt: skip
        else:
            task = tasks.gemm_task(
                i - num_puts, num_tiles, lag, of_pass, sizes, problems_ptr, num_problems, dense_tiles, blocks,
                BACKWARD,
            )  # fmt: skip
            if task.kind == tasks.TILE_IN:
                tile_in(task, epoch, of_pass, sizes, arrivals, gemms, blocks, BACKWARD, ACT, NVSHMEM, TMA)
            if task.kind == tasks.TILE_OUT:
                tile_out(
                    task, epoch, of_pass, sizes, returns, stages, gemms, blocks, BACKWARD, NVSHMEM, TMA
                )  # fmt: skip
            if BACKWARD:
                if task.kind == tasks.WGRAD:
                    tile_wgrad(task, sound, of_pass, sizes, arrivals, gemms, gradients, blocks, TMA)
            if problems_ptr is not None:
                if task.kind == tasks.DENSE:
                    dense_tile(task, problems_ptr, arrivals.rows, blocks, TMA)
        i = tl.atomic_add(of_pass.words + COUNTER, 1, sem="relaxed", scope="gpu").to(tl.int32)
    # The network may still read the stage, which is the next launch's, too.
    device.quiet(NVSHMEM)


# Not a variant for each size, and none in which a 1 is a constant.
@triton.jit(
    do_not_specialize=[
        "rank", "W", "L", "R", "tiles", "chunks", "timeout_us", "num_problems", "dense_tiles", "limit",
    ]
)  # fmt: skip
def overlap_kernel(
    of_pass, arrivals, returns, stages, sending, gemms, gradients, problems_ptr,
    rank, W, L, D, F, R, tiles, chunks, timeout_us, num_problems, dense_tiles, limit,
    BACKWARD: tl.constexpr, ACT: tl.constexpr, NVSHMEM: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BN_IN: tl.constexpr, BK: tl.constexpr, BW: tl.constexpr,
    PUT_ROWS: tl.constexpr, PUT_BLOCK: tl.constexpr,
):  # fmt: skip
    """One launch: a forward, or with `gradients` a backward. `arguments.py` says what the tuples hold.

    Grid: (programs,), at most what is resident; one is enough. limit: no more than so many tasks.
    Floor: FLOPs of the GEMMs (2 * rows * D * H and 2 * rows * F * D forward) over the peak, or the bytes put
    (rows * D * element size, each direction) over the link, whichever is longer.
    Example, backward, 2 PEs: PUT sends dy of 6 rows to expert 1; the peer's TILE_IN makes dh of them with
    W2^T, TILE_OUT dx with W1^T, stored here; WGRAD tiles of dW2, dW1 fill the way back.
    """
    H = 2 * F if ACT == "swiglu" else F
    # Not assigned to a name, which would make tensors of constants.
    _perform(
        of_pass, arrivals, returns, stages, sending, gemms, gradients, problems_ptr,
        Sizes(rank, W, L, D, F, H, R, tiles, chunks, timeout_us),
        Blocks(BM, BN, BN_IN, BK, BW),
        num_problems, dense_tiles, limit, BACKWARD, ACT, NVSHMEM, TMA, PUT_ROWS, PUT_BLOCK,
    )  # fmt: skip
