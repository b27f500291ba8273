"""NVSHMEM in our kernels, with one PE, where its wheel is installed; nvshmem4py need not be."""

import ctypes
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.lancet_kernels.symmetric import nvshmem_one_pe

PROGRAM = Path(nvshmem_one_pe.__file__)


def test_structs_are_as_large_as_nvshmem_says():
    """By the static_asserts in its headers (3.8)."""
    sizes = {"UniqueId": 128, "UniqueIdArguments": 24, "Arguments": 128, "Attributes": 144}
    assert {name: ctypes.sizeof(getattr(nvshmem_one_pe, name)) for name in sizes} == sizes


def test_bitcode_of_the_architecture_or_the_next_older_one(tmp_path):
    assert nvshmem_one_pe.bitcode(tmp_path, 90).name == "libnvshmem_device.bc"
    for arch in (80, 90, 100):
        (tmp_path / f"libnvshmem_device_sm_{arch}.bc").touch()
    names = [nvshmem_one_pe.bitcode(tmp_path, arch).stem for arch in (86, 90, 103)]
    assert names == ["libnvshmem_device_sm_80", "libnvshmem_device_sm_90", "libnvshmem_device_sm_100"]


def test_the_program_calls_the_kernel_as_it_is_declared():
    arguments = nvshmem_one_pe.arguments_of_put(lambda shape, dtype: torch.zeros(shape, dtype=dtype), "cpu")
    signature = inspect.signature(nvshmem_one_pe.put_to_itself.fn)
    bound = signature.bind(*arguments, NVSHMEM=True).arguments
    assert [name for name, value in bound.items() if isinstance(value, torch.Tensor)] == [
        name for name in signature.parameters if name.endswith("_ptr")
    ]
    assert (bound["pe"], bound["num_rows"], bound["D"]) == (0, 3, nvshmem_one_pe.WIDTH)


@pytest.mark.gpu
def test_one_pe():
    """In a process of its own: NVSHMEM may end the process that it does not like."""
    if nvshmem_one_pe.library_folder() is None:
        pytest.skip("no libnvshmem_host.so.3 (package nvidia-nvshmem-cu13)")
    alone = {"NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo"}
    alone["NVSHMEM_SYMMETRIC_SIZE"] = "64M"
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], env=os.environ | alone, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "rows and signal arrived" in done.stdout
