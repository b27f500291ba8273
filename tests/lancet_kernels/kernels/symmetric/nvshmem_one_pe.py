"""One PE of NVSHMEM with nothing but its wheel (nvidia-nvshmem): a program, run by test_nvshmem.py.

It calls the C library itself, where the package uses nvshmem4py: what it shows is that the words of the shim
(`protocol/device.py`) put and signal through NVSHMEM's device functions.
"""

import ctypes
import sys
from pathlib import Path

import torch

from lancet_kernels.kernels.symmetric import nvshmem
from tests.lancet_kernels.kernels.protocol.ping import arguments_of, ping

WITH_UNIQUEID = 1 << 3


def host_library() -> Path | None:
    """Where the wheel put libnvshmem_host.so.3, beside the bitcode."""
    found = nvshmem.find_bitcode(90)
    file = found and found.with_name("libnvshmem_host.so.3")
    return file if file and file.exists() else None


# Version 1 of each struct, which 3.8 takes beside its own version 2 (its headers nvshmem_uniqueid.h and
# nvshmem_types.h): `version` is 1 << 16 plus the size.
class UniqueId(ctypes.Structure):
    _fields_ = [("version", ctypes.c_int), ("internal", ctypes.c_char * 124)]


class UniqueIdArguments(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_int), ("id", ctypes.c_void_p), ("rank", ctypes.c_int), ("ranks", ctypes.c_int)
    ]  # fmt: skip


class Arguments(ctypes.Structure):
    _fields_ = [("version", ctypes.c_int), ("uid", UniqueIdArguments), ("content", ctypes.c_char * 96)]


class Attributes(ctypes.Structure):
    _fields_ = [("version", ctypes.c_int), ("mpi_comm", ctypes.c_void_p), ("arguments", Arguments)]


def version(struct: type[ctypes.Structure]) -> int:
    return (1 << 16) + ctypes.sizeof(struct)


def start(library: ctypes.CDLL) -> None:
    uid = UniqueId(version(UniqueId))
    check(library.nvshmemx_get_uniqueid(ctypes.byref(uid)), "nvshmemx_get_uniqueid")
    attributes = Attributes(version(Attributes))
    attributes.arguments.version = version(Arguments)
    attributes.arguments.uid.version = version(UniqueIdArguments)
    status = library.nvshmemx_set_attr_uniqueid_args(0, 1, ctypes.byref(uid), ctypes.byref(attributes))
    check(status, "nvshmemx_set_attr_uniqueid_args")
    status = library.nvshmemx_hostlib_init_attr(WITH_UNIQUEID, ctypes.byref(attributes))
    check(status, "nvshmemx_hostlib_init_attr")


def check(status: int, name: str) -> None:
    if status:
        sys.exit(f"{name}: status {status}")


def symmetric(library: ctypes.CDLL, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in NVSHMEM's heap. Not freed: the program ends."""
    count = torch.Size(shape).numel()
    library.nvshmem_malloc.restype = ctypes.c_void_p
    library.nvshmem_malloc.argtypes = [ctypes.c_size_t]
    address = library.nvshmem_malloc(count * dtype.itemsize)
    described = type("Described", (), {})()
    described.__cuda_array_interface__ = {
        "shape": (count * dtype.itemsize,), "typestr": "|u1", "data": (address, False), "version": 3,
    }  # fmt: skip
    raw = torch.as_tensor(described, device="cuda")
    assert raw.data_ptr() == address
    return raw.view(dtype).view(shape).zero_()


def main() -> None:
    from tests.lancet_kernels.kernels.symmetric.test_nvshmem import assert_arrived

    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    library = ctypes.CDLL(str(host_library()), mode=ctypes.RTLD_GLOBAL)
    start(library)
    major, minor = torch.cuda.get_device_capability()
    rows, stage = (symmetric(library, (4, 32), torch.float32) for _ in range(2))
    arguments = arguments_of(rows, symmetric(library, (2,), torch.int64), [7, 0, 3], stage_ptr=stage)
    arguments["extern_libs"] = nvshmem.extern_libs(10 * major + minor)
    kernel = ping.warmup(**arguments, grid=(1,))
    kernel._init_handles()
    check(library.nvshmemx_cumodule_init(ctypes.c_void_p(kernel.module)), "nvshmemx_cumodule_init")
    ping[(1,)](**arguments)
    assert_arrived(arguments)
    library.nvshmemx_hostlib_finalize()
    print("one PE: rows and signal arrived")


if __name__ == "__main__":
    main()
