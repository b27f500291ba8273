"""The persistent kernel in which puts, expert GEMMs, weight gradients and independent GEMMs share one launch.

Every program claims the next task number from one counter until there is none (`tasks.py` and `schedule.py`
have the order and the reason why it cannot deadlock); the bodies of GEMM tasks are in `tiles.py`, that of a
put in `protocol/steps.py`. What a launch lacks is None, and its code is not there.
"""

import triton
import triton.language as tl

from lancet_kernels.kernels.portable.tiles import dense_tile, tile_in, tile_out, tile_wgrad
from lancet_kernels.kernels.protocol import device, tasks
from lancet_kernels.kernels.protocol.arguments import Constants, Pointers, Sizes
from lancet_kernels.kernels.protocol.schedule import NUM_TILES
from lancet_kernels.kernels.protocol.steps import CLAIMS, claim, is_sound, num_put_tasks, put_part


@triton.jit
def _perform(ptrs, sizes, const):
    """Claim tasks until there is none, and do them."""
    epoch, sound = tl.load(ptrs.of_pass.words), is_sound(ptrs)
    num_tiles = tl.load(ptrs.of_pass.table + NUM_TILES)
    num_puts = num_put_tasks(ptrs)
    num_gemms = tasks.num_gemm_tasks(num_tiles, sizes, const)
    num_tasks = tl.minimum(num_puts + num_gemms, sizes.limit)
    # What a tile of the second GEMM needs is then behind what other programs are still at.
    lag = tasks.lag_of(tl.num_programs(0), tl.cdiv(sizes.F, const.BN_IN))
    i = claim(ptrs, CLAIMS)
    while i < num_tasks:
        if i < num_puts:
            put_part(i, epoch, ptrs, sizes, const)
        else:
            task = tasks.gemm_task(i - num_puts, num_tiles, lag, ptrs, sizes, const)
            if task.kind == tasks.TILE_IN:
                tile_in(task, epoch, ptrs, sizes, const)
            if task.kind == tasks.TILE_OUT:
                tile_out(task, epoch, ptrs, sizes, const)
            if const.BACKWARD:
                if task.kind == tasks.WGRAD:
                    tile_wgrad(task, sound, ptrs, sizes, const)
            if ptrs.problems is not None:
                if task.kind == tasks.DENSE:
                    dense_tile(task, ptrs, const)
        i = claim(ptrs, CLAIMS)
    # The network may still read the stage, which is the next launch's, too.
    device.quiet(const.NVSHMEM)


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
        Pointers(of_pass, arrivals, returns, stages, sending, gemms, gradients, problems_ptr),
        Sizes(rank, W, L, D, F, H, R, tiles, chunks, timeout_us, num_problems, dense_tiles, limit),
        Constants(BACKWARD, ACT, NVSHMEM, TMA, BM, BN, BN_IN, BK, BW, PUT_ROWS, PUT_BLOCK),
    )  # fmt: skip
