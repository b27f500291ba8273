"""Two processes put rows to each other from kernels: put_rows, put_signal and wait over shared memory."""

import time

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from lancet_kernels.kernels import runtime
from lancet_kernels.kernels.protocol import device
from lancet_kernels.symmetric import SharedMemory

ROWS, D = 4, 40
OP = 3

pytestmark = pytest.mark.skipif(not runtime.INTERPRETED, reason="CPU processes need Triton's interpreter")


@triton.jit
def swap_rows(
    rows_ptr, row_peers_ptr, signals_ptr, signal_peers_ptr, source_ptr, order_ptr, out_ptr, report_ptr,
    rank, peer, epoch, num_rows, polls, D, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put source[order[i]] to the peer, signal how many there are, wait for its rows, copy them to out.

    Grid: (1,). Of the two words of a bank of a PE's signals number `rank` is for what `rank` puts there.
    """
    bank = epoch % 2
    base = bank * ROWS * D
    device.put_rows(
        rows_ptr, row_peers_ptr, peer, base, source_ptr, order_ptr, num_rows, D,
        NVSHMEM=False, ROWS=ROWS, BLOCK=BLOCK,
    )  # fmt: skip
    value = device.word(epoch, num_rows)
    device.put_signal(signals_ptr, signal_peers_ptr, peer, 2 * bank + rank, value, NVSHMEM=False)
    at_least = device.word(epoch, num_rows * 0)
    # A bank's own word: a peer that is ahead has signalled the next epoch, but in the other one.
    index = 2 * bank + peer
    seen = device.wait(signals_ptr + index, at_least, polls, report_ptr, rank, peer, 3, index)
    arrived = (seen & 0xFFFFFFFF).to(tl.int32)
    i_row = tl.arange(0, ROWS)
    for d in range(0, D, BLOCK):
        i_d = d + tl.arange(0, BLOCK)
        m = (i_row < arrived)[:, None] & (i_d < D)[None, :]
        offset = i_row[:, None] * D + i_d[None, :]
        b_x = tl.load(rows_ptr + base + offset, mask=m)
        tl.store(out_ptr + offset, b_x, mask=m)


def source_of(rank: int, epoch: int) -> torch.Tensor:
    return torch.randn(ROWS, D, generator=torch.Generator().manual_seed(10 * epoch + rank))


def order_of(rank: int, epoch: int) -> torch.Tensor:
    """Which rows travel: none to all of them."""
    generator = torch.Generator().manual_seed(100 + 10 * epoch + rank)
    count = (epoch + rank) % (ROWS + 1)
    return torch.randperm(ROWS, generator=generator)[:count].to(torch.int32)


def swap_on_rank(epochs: int, absent: bool) -> tuple[list[torch.Tensor], list[int], float]:
    """-> (what arrived in each epoch, the report, seconds). absent: rank 1 launches nothing."""
    rank = dist.get_rank()
    outs, report = [], torch.zeros(8, dtype=torch.int64)
    with SharedMemory(timeout_s=30) as memory:
        rows = memory.allocate("rows", (2, ROWS, D), torch.float32)
        arrived = memory.signals("arrived", 4)
        begin = time.monotonic()
        for epoch in range(1, 1 + (0 if absent and rank == 1 else epochs)):
            out = torch.full((ROWS, D), torch.nan)
            order = order_of(rank, epoch)
            swap_rows[(1,)](
                rows.local, rows.peers, arrived.local, arrived.peers, source_of(rank, epoch),
                torch.cat([order, order.new_full((1,), 1 << 20)]), out, report,
                rank, 1 - rank, epoch, len(order), runtime.max_polls(0.5 if absent else 30.0), D,
                ROWS=ROWS, BLOCK=16,
            )  # fmt: skip
            outs.append(out)
        seconds = time.monotonic() - begin
        memory.barrier()
    return outs, report.tolist(), seconds


def test_rows_travel_both_ways(pool):
    epochs = 6
    for rank, (outs, report, _) in enumerate(pool.run(swap_on_rank, epochs, False)):
        assert report == [0] * 8
        for epoch, out in enumerate(outs, start=1):
            order = order_of(1 - rank, epoch)
            assert torch.equal(out[: len(order)], source_of(1 - rank, epoch)[order.long()])
            assert out[len(order) :].isnan().all(), "more came than was sent"


@pytest.mark.alone
def test_wait_for_a_peer_that_puts_nothing(pool):
    _, report, seconds = pool.run(swap_on_rank, 1, True)[0]
    # Bank 1, PE 1.
    assert report[:7] == [1, 0, 1, OP, 3, 1 << 32, 0]
    # It waited, about as long as it was asked to (half a second).
    assert seconds > 0.2
