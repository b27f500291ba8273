"""Which variants of the square kernel must compile? Each phase, for every type and lack of alignment."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lancet_kernels.compiling.specimen import Specimen, pointers
from lancet_kernels.kernels.gemm_tile import KINDS
from lancet_kernels.kernels.overlap_config import most_registers
from lancet_kernels.kernels.square_kernel import square_kernel
from lancet_kernels.kernels.square_launch import SquareConfig, square_tile

_WORDS = (
    "counter epoch report a_inbox_peers a_arrived a_arrived_peers b_inbox_peers b_arrived b_arrived_peers"
)
_WORDS += " sums_peers ready ready_peers released released_peers"
_TYPES = {f"{name}_ptr": "*i64" for name in _WORDS.split()}
_TYPES |= dict.fromkeys(("tasks_ptr", "routes_ptr", "row_ptr"), "*i32")
_TYPES |= dict.fromkeys(("acc_ptr", "sums_ptr"), "*fp32") | {"max_polls": "i64"}
_DATA = ("a_ptr", "b_ptr", "a_inbox_ptr", "b_inbox_ptr", "out_ptr")
_PHASES = {"forward": "nt", "backward": "nn", "gradient": "tn"}
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def specimens(arch: int) -> Iterator[Specimen]:
    """Of the launches that `SquarePhase` makes by default."""
    for dtype in _SHORT:
        for phase in _PHASES:
            yield specimen(phase, dtype, arch, aligned=True)
            yield specimen(phase, dtype, arch, aligned=False)


def specimen(phase: str, dtype: torch.dtype, arch: int, *, aligned: bool) -> Specimen:
    """aligned: widths are multiples of 16 bytes; operands come through descriptors where there are any."""
    tile, tma = square_tile(dtype, arch, aligned)
    config = SquareConfig(tile)
    constexprs = {
        "KIND": KINDS[_PHASES[phase]], "UPCAST": False, "TMA": tma,
        "BM": tile.block_m, "BN": tile.block_n, "BK": tile.block_k,
        "PUT_ROWS": config.put_rows, "PUT_BLOCK": config.put_block,
    }  # fmt: skip
    arguments = [name for name in square_kernel.arg_names if name not in constexprs]
    types = _TYPES | dict.fromkeys(_DATA, f"*{_SHORT[dtype]}")
    signature = {name: types.get(name, "i32") for name in arguments}
    widths = ("a_width", "b_width", "M", "N", "K") if aligned else ()
    return Specimen(
        name="square",
        config=f"{phase} {_SHORT[dtype]} {tile}" + ("" if aligned else " odd"),
        kernel=square_kernel,
        signature=signature,
        constexprs=constexprs,
        aligned=(*pointers(signature), *widths),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        options={"maxnreg": most_registers(tile)},
        wgmma=arch == 90 and dtype.itemsize == 2,
        tma=tma,
    )
