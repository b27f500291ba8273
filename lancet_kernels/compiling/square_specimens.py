"""Which variants of the square kernel must compile? Each phase, for every type and lack of alignment."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lancet_kernels.compiling.specimen import SHORT, Specimen
from lancet_kernels.kernels.gemm_tile import KINDS
from lancet_kernels.kernels.overlap_config import most_registers
from lancet_kernels.kernels.square_kernel import square_kernel
from lancet_kernels.kernels.square_launch import SquareConfig, square_tile

_PHASES = {"forward": "nt", "backward": "nn", "gradient": "tn"}


def specimens(arch: int) -> Iterator[Specimen]:
    """Of the launches that `SquarePhase` makes by default."""
    for dtype in SHORT:
        for phase in _PHASES:
            yield specimen(phase, dtype, arch, aligned=True)
            yield specimen(phase, dtype, arch, aligned=False)


def specimen(phase: str, dtype: torch.dtype, arch: int, *, aligned: bool) -> Specimen:
    """aligned: widths are multiples of 16 bytes; operands come through descriptors where there are any."""
    tile, tma = square_tile(dtype, arch, aligned)
    config = SquareConfig(tile)
    return Specimen.of(
        square_kernel,
        f"{phase} {SHORT[dtype]} {tile}" + ("" if aligned else " odd"),
        {
            "KIND": KINDS[_PHASES[phase]], "UPCAST": False, "TMA": tma,
            "BM": tile.block_m, "BN": tile.block_n, "BK": tile.block_k,
            "PUT_ROWS": config.put_rows, "PUT_BLOCK": config.put_block,
        },
        dict.fromkeys(("tasks", "routes", "row"), "i32")
        | dict.fromkeys(("acc", "sums"), "fp32")
        | dict.fromkeys(("a", "b", "a_inbox", "b_inbox", "out"), SHORT[dtype]),
        widths=("a_width", "b_width", "M", "N", "K") if aligned else (),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        options={"maxnreg": most_registers(tile)},
        wgmma=arch == 90 and dtype.itemsize == 2,
        tma=tma,
    )  # fmt: skip
