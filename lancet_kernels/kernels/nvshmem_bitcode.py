"""Where is NVSHMEM's device bitcode, which kernels that put over the network are linked with?"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

from lancet_kernels.errors import UserError

PACKAGE = "nvidia-nvshmem-cu13"
# The architectures whose bitcode NVSHMEM 3.8 brings; a GPU takes the newest that is not newer than itself.
ARCHITECTURES = (100, 90, 89, 80, 75)


def find_bitcode(arch: int) -> Path | None:
    """The bitcode for GPUs of `arch` (90 for sm_90), or None.

    In $NVSHMEM_HOME/lib if that is set, else in the wheel nvidia-nvshmem-cu13: one file per architecture
    since 3.8, one for all before.
    """
    names = [f"libnvshmem_device_sm_{a}.bc" for a in ARCHITECTURES if a <= arch] + ["libnvshmem_device.bc"]
    for folder in _folders():
        for name in names:
            if (folder / name).is_file():
                return folder / name
    return None


def bitcode(arch: int) -> Path:
    """As `find_bitcode`. Raises UserError if there is none."""
    file = find_bitcode(arch)
    if file is None:
        raise UserError(
            "NVSHMEM's device bitcode",
            got=f"none for sm_{arch} in {' or '.join(map(str, _folders())) or 'any folder'}",
            expected="libnvshmem_device*.bc",
            do=f"pip install --no-deps {PACKAGE}, or set NVSHMEM_HOME",
        )
    return file


def extern_libs(arch: int) -> tuple[tuple[str, str], ...]:
    """The launch option of kernels with NVSHMEM=True. Raises UserError if there is no bitcode."""
    return (("libnvshmem_device", str(bitcode(arch))),)


def version() -> str | None:
    """The version of the wheel that the bitcode comes from; None if it comes from elsewhere or is missing."""
    if os.environ.get("NVSHMEM_HOME"):
        return None
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None


def _folders() -> list[Path]:
    home = os.environ.get("NVSHMEM_HOME")
    if home:
        return [Path(home) / "lib"]
    # Not by importing nvidia.nvshmem: other wheels share that namespace, and some make it a package.
    folders = [Path(entry) / "nvidia" / "nvshmem" / "lib" for entry in sys.path if entry]
    return [folder for folder in folders if folder.is_dir()]
