"""The words of the shim, through pointers: rows arrive, in order, before the signal that names them."""

import time

import pytest
import torch

from tests.lancet_kernels.kernels.protocol.ping import arguments_of, ping

D, ROWS = 8, 4


def launch(regions, signals, row, **others):
    """Run ping as PE 0 of len(regions) -> (source, out, report)."""
    tables = [torch.tensor([tensor.data_ptr() for tensor in copies]) for copies in (regions, signals)]
    given = arguments_of(
        regions[0], signals[0], row, peers_ptr=tables[0], signal_peers_ptr=tables[1], NVSHMEM=False, **others
    )
    ping[(1,)](**given)
    return given["source_ptr"], given["out_ptr"], given["report_ptr"]


def memories(world):
    return [torch.full((ROWS, D), torch.nan) for _ in range(world)], [
        torch.zeros(3, dtype=torch.int64) for _ in range(world)
    ]


@pytest.mark.parametrize("row", [[3, 1], [9], [0, 0, 7, 2], []])
def test_rows_come_back_from_oneself(row):
    regions, signals = memories(1)
    source, out, report = launch(regions, signals, row, epoch=5)
    assert torch.equal(out[: len(row)], source[row])
    assert torch.equal(out[len(row) :], torch.zeros(ROWS - len(row), D))
    assert regions[0][len(row) :].isnan().all()
    assert signals[0].tolist() == [0, 5 << 32 | len(row), 0]
    assert not report.any()


def test_rows_reach_another():
    """And a signal that never comes is reported: rank, peer, op, index, expected, seen."""
    regions, signals = memories(2)
    signals[0][1] = 6 << 32 | 2
    begin = time.monotonic()
    others = {"to": 1, "origin": 1, "epoch": 7, "timeout_us": 500_000}
    source, out, report = launch(regions, signals, [4, 2], **others)
    assert time.monotonic() - begin > 0.2, "it waited about as long as it was asked to"
    assert torch.equal(regions[1][:2], source[[4, 2]])
    assert signals[1].tolist() == [0, 7 << 32 | 2, 0]
    assert regions[0].isnan().all()
    assert report.tolist() == [1, 0, 1, 0, 1, 7 << 32, 6 << 32 | 2, 0]
    assert not out.any()


def test_a_later_epoch_is_enough():
    regions, signals = memories(2)
    regions[0][:] = 1.5
    signals[0][1] = 9 << 32 | 3
    _, out, report = launch(regions, signals, [4], to=1, origin=1, epoch=7)
    assert not report.any()
    assert torch.equal(out, torch.tensor([1.5, 1.5, 1.5, 0.0])[:, None].expand(ROWS, D))
