"""Every launch of the paced measurements compiles for an H100, with the newest and the oldest Triton."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.rehearsals import ROOT, rehearse

OLDEST = ROOT / ".triton-oldest"


@pytest.mark.long
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="bench/gpu_measure.py rehearses for the GPU that is here"
)
@pytest.mark.parametrize("triton", ["newest", "oldest"])
def test_every_launch_compiles(tmp_path: Path, triton: str) -> None:
    if triton == "oldest" and not (OLDEST / "triton").is_dir():
        pytest.skip("no oldest Triton; bring it by: make .triton-oldest/.installed")
    script = Path(__file__).with_name("rehearse_paced.py")
    found = rehearse(script, tmp_path, *([OLDEST] if triton == "oldest" else []), timeout_s=600)
    # Forward: put, in, out, reduce, fused. Backward: the same, wgrad, and fused with riders.
    assert Counter(found["kernels"]) == {
        "overlap_kernel": 12, "relay_kernel": 1, "receive_kernel": 1, "release_kernel": 1,
        "write_dense_row_kernel": 1, "exchange_counts_kernel": 1, "schedule_kernel": 1,
    }  # fmt: skip
    assert found["with a clock"] == ["relay_kernel"], "the kernels know nothing of the wire"
