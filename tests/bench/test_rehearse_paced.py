"""Every launch of the paced measurements compiles for an H100, with the newest and the oldest Triton."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
OLDEST = ROOT / ".triton-oldest"


@pytest.mark.long
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="bench/gpu_measure.py rehearses for the GPU that is here"
)
@pytest.mark.parametrize("triton", ["newest", "oldest"])
def test_every_launch_compiles(tmp_path: Path, triton: str) -> None:
    if triton == "oldest" and not (OLDEST / "triton").is_dir():
        pytest.skip("no oldest Triton; bring it by: make .triton-oldest/.installed")
    first = [str(OLDEST)] if triton == "oldest" else []
    paths = os.pathsep.join([*first, str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("rehearse_paced.py"))],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # Forward: put, in, out, reduce, fused. Backward: the same, wgrad, dweight, and fused with riders.
    assert Counter(found["kernels"]) == {
        "overlap_kernel": 13, "send_kernel": 1, "receive_kernel": 1, "release_kernel": 1,
        "write_dense_row_kernel": 1,
    }  # fmt: skip
    # Only what is fused takes the wire in the overlap kernel.
    assert found["with a clock"] == [*["overlap_kernel"] * 3, "receive_kernel", "send_kernel"]
