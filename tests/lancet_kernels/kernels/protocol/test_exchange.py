"""What the host makes of a kernel's report: nothing without a failure, else who waited for whom, in words."""

import torch
import triton

from lancet_kernels.kernels.protocol import device as shim
from lancet_kernels.kernels.protocol.device import WAIT_RESULTS
from lancet_kernels.kernels.protocol.exchange import REPORTED, Failure, FailureReport


@triton.jit
def report_kernel(report_ptr, peer):
    shim.report_failure(report_ptr, 1, peer, WAIT_RESULTS, 5, 9, 8)


def test_the_first_failure_is_kept(device: torch.device) -> None:
    report = FailureReport(device)
    assert not report.is_failed()
    assert report.first() is None
    for peer in (3, 2):
        report_kernel[(1,)](report.words, peer)
    assert report.first() == Failure(rank=1, peer=3, op=WAIT_RESULTS.value, signal=5, expected=9, seen=8)
    # On a GPU the call before has asked for the words.
    report.is_failed()
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert report.is_failed()


def test_every_wait_has_its_words() -> None:
    waits = {name: value for name, value in vars(shim).items() if name.startswith("WAIT_")}
    assert sorted(value.value for value in waits.values()) == list(range(len(REPORTED)))
    assert shim.TOO_MANY_ROWS.value == len(REPORTED)
