"""One phase of P(2^k x 2^k) in one persistent launch: GEMM tiles of a step beside the puts for the next one.

    S  steps      M, N  rows and columns of the result      K  contraction of one step
    a, b  the operands of this rank at step 0; later ones come into inboxes, one for each step

Every program claims the next task from one counter until the list is empty (`square_launch.square_tasks`). A
PUT sends a chunk of rows of an operand of step t to the rank that multiplies it at step t + 1, and signals;
it waits until the chunk is here itself. A TILE waits for the chunks that it reads and for the sum of the
steps before, and adds its product to it, in float32; the last step rounds. Where sums move on to another rank
(the last step of the gradient), the tile of the step before is stored there.

The product is, by KIND:

    NT  a [M, K] b [N, K]^T   forward,  O = I W^T (a weight as nn.Linear has it)
    NN  a [M, K] b [K, N]     backward, dI = dO W
    TN  a [K, M]^T b [K, N]   gradient, dW = dO^T I

A task waits only for puts and sums of earlier steps, which stand before it in every rank's list: so a launch
ends even with one program per rank. Inboxes are free again once their rank has sent a release, after the
launch (`exchange.release_kernel`); a PUT waits for the release of the epoch before.
"""

import triton
import triton.language as tl

from lancet_kernels.kernels import device
from lancet_kernels.kernels.failure_report import WAIT_INBOX, WAIT_STEP, WAIT_SUM, WAIT_TILE
from lancet_kernels.kernels.gemm_tile import (
    NN,
    NT,
    TN,
    add_outer_products,
    rows_times_transposed,
    rows_times_weight,
    store_added,
)

# A row of the routes, for what this rank multiplies at step t: whom it comes from, and, of its own tile of
# the step before, to whom that goes.
ROUTE_WORDS = tl.constexpr(6)
FROM = tl.constexpr(0)  # + operand; 2: the sum
TO = tl.constexpr(3)
# Kinds of tasks, and the words of one: its kind and three numbers.
PUT = tl.constexpr(0)
TILE = tl.constexpr(1)
TASK_WORDS = tl.constexpr(4)


@triton.jit
def _wait_chunks(
    arrived_ptr, t, first, end, chunks, operand, epoch, routes_ptr, rank, max_polls, report_ptr
):  # fmt: skip
    """Wait for chunks first <= i < end of an operand of step t > 0. -> are they all here?"""
    here = tl.full((), 1, tl.int1)
    source = tl.load(routes_ptr + t * ROUTE_WORDS + FROM + operand)
    expected = device.word(epoch, 0)
    for i in range(first, end):
        index = (t - 1) * chunks + i
        seen = device.wait(
            arrived_ptr + index, expected, max_polls, report_ptr, rank, source, WAIT_TILE, index
        )
        here = here & (seen >= expected)
    return here


@triton.jit
def _wait_release(released_ptr, peer, epoch, rank, max_polls, report_ptr):
    """Wait until a peer's inboxes are free of the epoch before. -> are they?"""
    expected = device.word(epoch - 1, 0)
    seen = device.wait(released_ptr + peer, expected, max_polls, report_ptr, rank, peer, WAIT_INBOX, peer)
    return seen >= expected


@triton.jit
def _put(
    t, chunk, operand, epoch, rank, routes_ptr, own_ptr, inbox_ptr, inbox_peers_ptr, arrived_ptr,
    arrived_peers_ptr, released_ptr, row_ptr, rows, width, chunk_rows, max_polls, report_ptr,
    PUT_ROWS: tl.constexpr, PUT_BLOCK: tl.constexpr,
):  # fmt: skip
    """PUT: a chunk of rows of this rank's operand of step t, to the inbox for step t + 1 of its next rank."""
    chunks = tl.cdiv(rows, chunk_rows)
    size = tl.cast(rows, tl.int64) * width
    source_ptr = own_ptr
    here = tl.full((), 1, tl.int1)
    if t > 0:
        source_ptr = inbox_ptr + (t - 1) * size
        here = _wait_chunks(
            arrived_ptr, t, chunk, chunk + 1, chunks, operand, epoch, routes_ptr, rank, max_polls, report_ptr
        )
    target = tl.load(routes_ptr + (t + 1) * ROUTE_WORDS + TO + operand)
    free = _wait_release(released_ptr, target, epoch, rank, max_polls, report_ptr)
    if here & free:
        end = tl.minimum(rows, (chunk + 1) * chunk_rows)
        for row in range(chunk * chunk_rows, end, PUT_ROWS):
            device.put_rows(
                inbox_ptr, inbox_peers_ptr, target, t * size + tl.cast(row, tl.int64) * width,
                source_ptr, row_ptr + row, end - row, width,
                NVSHMEM=False, ROWS=PUT_ROWS, BLOCK=PUT_BLOCK,
            )  # fmt: skip
        device.put_signal(
            arrived_ptr, arrived_peers_ptr, target, t * chunks + chunk, device.word(epoch, 1), False
        )


@triton.jit
def _product(
    a_ptr, b_ptr, m0, n0, M, N, K,
    KIND: tl.constexpr, UPCAST: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """-> float32 [BM, BN] of one step."""
    if KIND == NT:
        acc = rows_times_transposed(a_ptr, b_ptr, M, m0, n0, K, N, UPCAST, TMA, BM, BN, BK)
    elif KIND == NN:
        acc, _ = rows_times_weight(a_ptr, b_ptr, M, m0, n0, K, N, False, UPCAST, TMA, BM, BN, BK)
    else:
        acc = add_outer_products(
            tl.zeros((BM, BN), tl.float32), a_ptr, b_ptr, K, m0, n0, M, N, UPCAST, TMA, BM, BN, BK
        )
    return acc


@triton.jit(
    do_not_specialize=["num_tasks", "rank", "max_polls", "steps", "moved_at", "a_chunk_rows", "b_chunk_rows"]
)
def square_kernel(
    # What to do: int32 [num_tasks, 4]; a counter; the epoch; int32 [S, 6]; int32 [0, 1, 2, ...].
    tasks_ptr, num_tasks, counter_ptr, epoch_ptr, routes_ptr, row_ptr, report_ptr, rank, max_polls,
    # Operands: own tile, inboxes [S - 1, rows, width] and arrived words [S - 1, chunks], with their peers.
    a_ptr, a_inbox_ptr, a_inbox_peers_ptr, a_arrived_ptr, a_arrived_peers_ptr,
    b_ptr, b_inbox_ptr, b_inbox_peers_ptr, b_arrived_ptr, b_arrived_peers_ptr,
    # Sums: fp32 [M, N] of this rank, and those that came from another; words [2, tiles] of how far they are.
    acc_ptr, sums_ptr, sums_peers_ptr, ready_ptr, ready_peers_ptr, released_ptr, out_ptr,
    a_rows, a_width, b_rows, b_width, M, N, K, a_chunk_rows, b_chunk_rows, steps, moved_at,
    KIND: tl.constexpr, UPCAST: tl.constexpr, TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PUT_ROWS: tl.constexpr, PUT_BLOCK: tl.constexpr,
):  # fmt: skip
    """out [M, N] = the sum over S steps of the product of what this rank holds at each (see the module).

    moved_at: the step at which sums come from another rank; -1: they stay.
    Grid: (programs,), at most what is resident; one is enough.
    Floor: 2 * S * M * N * K FLOPs over the peak, or (S - 1) tiles of both operands over the link.
    Example, forward, 2 x 2 ranks: PUT(0, a, 0) sends 128 rows of I to the left, PUT(0, b, 0) of W upwards;
    TILE(0, m, n) multiply meanwhile; TILE(1, m, n) wait for what came from the right and from below.
    """
    epoch = tl.load(epoch_ptr)
    tiles_n = tl.cdiv(N, BN)
    tiles = tl.cdiv(M, BM) * tiles_n
    a_chunks = tl.cdiv(a_rows, a_chunk_rows)
    b_chunks = tl.cdiv(b_rows, b_chunk_rows)
    i = tl.atomic_add(counter_ptr, 1, sem="relaxed", scope="gpu")
    while i < num_tasks:
        p = tasks_ptr + i * TASK_WORDS
        t = tl.load(p + 1)
        if tl.load(p) == PUT:
            chunk = tl.load(p + 3)
            if tl.load(p + 2) == 0:
                _put(
                    t, chunk, 0, epoch, rank, routes_ptr, a_ptr, a_inbox_ptr, a_inbox_peers_ptr,
                    a_arrived_ptr, a_arrived_peers_ptr, released_ptr, row_ptr, a_rows, a_width, a_chunk_rows,
                    max_polls, report_ptr, PUT_ROWS, PUT_BLOCK,
                )  # fmt: skip
            else:
                _put(
                    t, chunk, 1, epoch, rank, routes_ptr, b_ptr, b_inbox_ptr, b_inbox_peers_ptr,
                    b_arrived_ptr, b_arrived_peers_ptr, released_ptr, row_ptr, b_rows, b_width, b_chunk_rows,
                    max_polls, report_ptr, PUT_ROWS, PUT_BLOCK,
                )  # fmt: skip
        else:
            m = tl.load(p + 2)
            n = tl.load(p + 3)
            tile = m * tiles_n + n
            here = tl.full((), 1, tl.int1)
            a_step_ptr = a_ptr
            b_step_ptr = b_ptr
            before_ptr = acc_ptr
            if t > 0:
                a_step_ptr = a_inbox_ptr + (t - 1) * tl.cast(a_rows, tl.int64) * a_width
                b_step_ptr = b_inbox_ptr + (t - 1) * tl.cast(b_rows, tl.int64) * b_width
                # Rows of the result are rows of a, but for TN; columns are rows of b for NT.
                a_first = 0 if KIND == TN else m
                a_end = a_chunks if KIND == TN else m + 1
                b_first = n if KIND == NT else 0
                b_end = n + 1 if KIND == NT else b_chunks
                here = _wait_chunks(
                    a_arrived_ptr, t, a_first, a_end, a_chunks, 0, epoch, routes_ptr, rank, max_polls,
                    report_ptr,
                )  # fmt: skip
                here = here & _wait_chunks(
                    b_arrived_ptr, t, b_first, b_end, b_chunks, 1, epoch, routes_ptr, rank, max_polls,
                    report_ptr,
                )  # fmt: skip
                source = rank
                index = tile
                if t == moved_at:
                    before_ptr = sums_ptr
                    source = tl.load(routes_ptr + t * ROUTE_WORDS + FROM + 2)
                    index = tiles + tile
                expected = device.word(epoch, t)
                op = tl.where(t == moved_at, WAIT_SUM, WAIT_STEP)
                seen = device.wait(
                    ready_ptr + index, expected, max_polls, report_ptr, rank, source, op, index
                )
                here = here & (seen >= expected)
                device.fence_tma(TMA)
            if here:
                acc = _product(
                    a_step_ptr, b_step_ptr, m * BM, n * BN, M, N, K, KIND, UPCAST, TMA, BM, BN, BK
                )  # fmt: skip
                if t == steps - 1:
                    store_added(out_ptr, acc, before_ptr, t > 0, m * BM, n * BN, M, N, BM, BN)
                else:
                    target = rank
                    target_ptr = acc_ptr
                    index = tile
                    free = here
                    if t + 1 == moved_at:
                        target = tl.load(routes_ptr + moved_at * ROUTE_WORDS + TO + 2)
                        target_ptr = device.remote_pointer(sums_ptr, sums_peers_ptr, target)
                        index = tiles + tile
                        free = _wait_release(released_ptr, target, epoch, rank, max_polls, report_ptr)
                    if free:
                        store_added(target_ptr, acc, before_ptr, t > 0, m * BM, n * BN, M, N, BM, BN)
                        device.put_signal(
                            ready_ptr, ready_peers_ptr, target, index, device.word(epoch, t + 1), False
                        )
        i = tl.atomic_add(counter_ptr, 1, sem="relaxed", scope="gpu")
