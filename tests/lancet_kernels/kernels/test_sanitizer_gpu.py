"""No kernel reads or writes where it must not: small cases under compute-sanitizer, where it is installed."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent
LIMIT_S = 90.0  # for a case
# One PE each: the sanitizer may let one kernel run at a time, so PEs that wait for another would not move.
CASES = {
    "fused": ("test_virtual_pes.py", "test_forward_and_backward and cuda and W1"),
    "permute": ("moe/test_permute.py", "cuda and (by_hand or given_rows or parts)"),
}


def sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer"
    )


def run_for(command: list[str], environment: dict[str, str], limit_s: float) -> tuple[int, str] | None:
    """-> exit code and output; None if it was not done in time. With it ends all that it has started."""
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit_s)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            return None
        raise
    return process.returncode, output


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
    done = run_for(command, environment, LIMIT_S)
    if done is None:
        pytest.skip(f"compute-sanitizer was not done within {LIMIT_S:.0f} s")
    status, output = done
    assert " passed" in output, output[-4000:]
    assert status == 0, output[-4000:]
