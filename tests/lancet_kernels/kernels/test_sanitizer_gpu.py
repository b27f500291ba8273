"""No kernel reads or writes where it must not: small cases under compute-sanitizer, where it is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent
# One PE each: the sanitizer may let one kernel run at a time, so PEs that wait for another would not move.
CASES = {
    "fused": ("test_virtual_pes.py", "test_forward_and_backward and cuda and W1"),
    "grouped GEMM": ("test_grouped_gemm_kernel.py", "cuda and several"),
    "permute": ("test_permute_kernel.py", "cuda and (by_hand or given_buffer or parts)"),
    "routing": ("test_routing_kernel.py", "cuda and (by_hand or local_slots or prefix)"),
}


def sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer"
    )


@pytest.mark.parametrize("name", CASES)
def test_memcheck(name):
    if sanitizer() is None:
        pytest.skip("no compute-sanitizer on this machine (part of the CUDA toolkit)")
    file, chosen = CASES[name]
    command = [sanitizer(), "--tool", "memcheck", "--error-exitcode", "77", "--target-processes", "all"]
    command += [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu and not long",
    ]
    command += [str(HERE / file), "-k", chosen]
    # Without torch's cache every tensor is an allocation of its own, and its end a border that is watched.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_MODULE_LOADING": "LAZY"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    except subprocess.TimeoutExpired:
        pytest.skip("compute-sanitizer was not done within 90 s")
    said = done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout, said
    assert done.returncode == 0, said
