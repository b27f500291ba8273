"""No kernel reads or writes where it must not: small cases under compute-sanitizer, where it is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent
LIMIT_S = 90  # for a case
# One PE each: the sanitizer may let one kernel run at a time, so PEs that wait for another would not move.
CASES = {
    "fused": ("test_virtual_pes.py", "test_forward_and_backward and cuda and W1"),
    "permute": ("test_row_kernels.py", "cuda and (permute or combine or parts)"),
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
    # Errors of API calls that torch tries and handles are not what is looked for.
    command = [
        sanitizer(), "--tool", "memcheck", "--error-exitcode", "77", "--report-api-errors", "no",
        "--target-processes", "all",
        sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "gpu and not long",
        str(HERE / file), "-k", chosen,
    ]  # fmt: skip
    # Without torch's cache every tensor is an allocation of its own, and its end a border that is watched.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_MODULE_LOADING": "LAZY"}
    # `timeout` ends with the command all that it has started.
    done = subprocess.run(
        ["timeout", "-k", "5", str(LIMIT_S), *command], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode in (124, 137):
        pytest.skip(f"compute-sanitizer was not done within {LIMIT_S} s")
    assert " passed" in done.stdout, done.stdout[-4000:]
    assert done.returncode == 0, done.stdout[-4000:]
