"""The combine: waits for the results of a token's rows, and adds them up. A kernel of its own.

Why of its own. A token's last result comes with the last tiles, so nearly all sums wait for the end of the
GEMMs. T = 8192 tokens with K = 8 rows of D = 2048 in bfloat16 are 302 MB, 0.1 ms at 3 TB/s, for which at a
latency of 1 us 23 KB must be on their way in each of 132 multiprocessors. Two copy warps of the Hopper kernel
have room for 8 KB, 0.3 ms; four programs of four warps have 64 KB, and a launch costs some 4 us.

Why it ends. It waits for tiles of peers only, whose launches wait for nothing that it makes: the next pass
stands behind it in the stream. PEs that share a GPU must leave room for each other's launches: there the grid
is one program for each multiprocessor that the PE has; four for each would stand on those of all PEs.
"""

import triton
import triton.language as tl

from lancet_kernels.kernels.protocol import device
from lancet_kernels.kernels.protocol.device import WAIT_RESULTS
from lancet_kernels.kernels.protocol.schedule import VOID, chunk_number, segment
from lancet_kernels.kernels.rows import add_row, place_row

# Programs on a multiprocessor of a PE that has the GPU to itself.
PROGRAMS, WARPS = 4, 4
# As many as these leave to a thread. Set explicitly: ptxas would take 32, and load two rows at a time.
REGISTERS = 128


@triton.jit(do_not_specialize=["rank", "W", "L", "T", "timeout_us", "limit"])
def combine_results_kernel(
    of_pass, returns, expert_ptr, row_ptr, weight_ptr, out_ptr, dweight_ptr,
    rank, W, L, D, T, timeout_us, limit,
    K: tl.constexpr, NVSHMEM: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over k, in order, of weight[t, k] * results[row[t, k]], float32.

    In a backward (dweight is not None, weight is) without weights, and dweight[t, k] = dots[row[t, k]].
    expert, row int64 [T, K]; weight, dweight float32. Dropped choices (row < 0) are zero, whatever the
    buffers hold. NaN if the table is void, and then nothing is waited for, or if any wait of this PE failed:
    in this exchange or, before, in another one with these buffers (`poisoned`), since what comes too late for
    that pass lands among the results of a later one.

    Grid: (programs,), each takes every programs-th block of BT tokens. BK: K, as a power of two. limit: no
    more blocks than that. All words of a block are waited for at once.
    """
    BACKWARD: tl.constexpr = dweight_ptr is not None
    # So many choices of a token are unrolled: all their rows are on their way before the first is added.
    UNROLLED: tl.constexpr = BK if BK < 8 else 8
    word = device.word(tl.load(of_pass.words), 0)
    sound = (device.failed(of_pass.report) == 0) & (tl.load(of_pass.table + VOID) == 0)
    first_kept = tl.where(sound, 0, 0x7FFFFFFF)
    blocks = tl.minimum(tl.cdiv(T, BT), limit)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        # [BT * BK], the choices of the tokens of the block
        i = tl.arange(0, BT * BK)
        t, k = block * BT + i // BK, i % BK
        m_choice = (t < T) & (k < K)
        row = tl.load(row_ptr + t * K + k, mask=m_choice, other=-1).to(tl.int32)
        kept = row >= first_kept
        expert = tl.load(expert_ptr + t * K + k, mask=kept, other=0).to(tl.int32)
        _, before, first_send = segment(of_pass.table, W, W * L, rank, expert, kept)
        m = (before + row - first_send) // BM
        index = chunk_number(first_send, before, expert, m, BM)
        device.wait_all(
            returns.returned + index, kept, word, timeout_us, of_pass.report, rank, expert // L,
            WAIT_RESULTS, index, NVSHMEM,
        )  # fmt: skip
        failed = device.failed(of_pass.report)
        poisoned = tl.load(returns.poisoned) != 0
        # A void pass has put nothing, so that nobody returns anything.
        if failed & (tl.load(of_pass.table + VOID) == 0):
            tl.store(returns.poisoned, 1)
        poison = tl.where(failed | (sound == 0) | poisoned, float("nan"), 0.0)
        if BACKWARD:
            dot = tl.load(returns.dots + row, mask=m_choice & (row >= 0), other=0.0)
            tl.store(dweight_ptr + t * K + k, dot + poison, mask=m_choice)
        i_t = block * BT + tl.arange(0, BT)
        m_t = i_t < T
        for d in range(0, D, BD):
            i_d = d + tl.arange(0, BD)
            m_d = i_d < D
            # [BT, BD]
            b_sum = tl.zeros([BT, BD], tl.float32)
            for first in range(0, K, UNROLLED):
                for j in tl.static_range(UNROLLED):
                    choice = first + j
                    place, m_kept = place_row(row_ptr, i_t * K + choice, m_t & (i_t * 0 + choice < K), D)
                    b_sum = add_row(
                        b_sum, returns.rows, weight_ptr, i_t * K + choice, place, m_kept, i_d, m_d
                    )
            out = (b_sum + poison).to(out_ptr.dtype.element_ty)
            p_out = out_ptr + i_t[:, None].to(tl.int64) * D + i_d[None, :]
            tl.store(p_out, out, mask=m_t[:, None] & m_d[None, :])
