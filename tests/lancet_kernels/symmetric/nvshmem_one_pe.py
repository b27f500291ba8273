"""One PE of NVSHMEM with nothing but its wheel (nvidia-nvshmem): a program, run by test_nvshmem_wheel.py.

It calls the C library itself, where the package uses nvshmem4py: what it shows is that kernels of the shim
(`kernels/device.py`) put and signal through NVSHMEM's device functions.
"""

import ctypes
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from test_nvshmem import put_to_itself

WITH_UNIQUEID = 1 << 3
ROWS, WIDTH = 4, 32


def library_folder() -> Path | None:
    """Where the wheel put libnvshmem_host.so.3 and the bitcode."""
    folders = (Path(path) / "nvidia/nvshmem/lib" for path in sys.path)
    return next((folder for folder in folders if (folder / "libnvshmem_host.so.3").exists()), None)


def bitcode(folder: Path, arch: int) -> Path:
    """The file for this architecture or the next older one; until NVSHMEM 3.7 one file serves all."""
    files = {int(f.stem.rpartition("_")[2]): f for f in folder.glob("libnvshmem_device_sm_*.bc")}
    older = [a for a in files if a <= arch]
    return files[max(older)] if older else folder / "libnvshmem_device.bc"


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


def arguments_of_put(make: Callable[..., torch.Tensor], device: str) -> tuple:
    """Arguments of put_to_itself: regions by make(shape, dtype), a table of zeros in place of the peers."""
    rows, stage = make((ROWS, WIDTH), torch.float32), make((ROWS, WIDTH), torch.float32)
    signals = make((2,), torch.int64)
    source = torch.randn(8, WIDTH, device=device)
    order = torch.tensor([7, 0, 3], dtype=torch.int32, device=device)
    nowhere = torch.zeros(1, dtype=torch.int64, device=device)
    return rows, nowhere, signals, source, order, stage, 0, 3, 1 << 33 | 3, WIDTH


def main() -> None:
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    folder = library_folder()
    library = ctypes.CDLL(str(folder / "libnvshmem_host.so.3"), mode=ctypes.RTLD_GLOBAL)
    start(library)
    major, minor = torch.cuda.get_device_capability()
    libraries = (("libnvshmem_device", str(bitcode(folder, 10 * major + minor))),)
    arguments = arguments_of_put(partial(symmetric, library), "cuda")
    rows, _, signals, source, order, *_ = arguments
    kernel = put_to_itself.warmup(*arguments, grid=(1,), NVSHMEM=True, extern_libs=libraries)
    kernel._init_handles()
    check(library.nvshmemx_cumodule_init(ctypes.c_void_p(kernel.module)), "nvshmemx_cumodule_init")
    put_to_itself[(1,)](*arguments, NVSHMEM=True, extern_libs=libraries)
    torch.cuda.synchronize()
    assert torch.equal(rows[:3], source[order.long()])
    assert not rows[3].any()
    assert signals.tolist() == [1 << 33 | 3, 0]
    library.nvshmemx_hostlib_finalize()
    print("one PE: rows and signal arrived")


if __name__ == "__main__":
    main()
