"""Which variants of the Hopper kernel must compile? Every one that the launcher uses."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from triton.experimental.gluon import language as gl

from lancet_kernels.compiling.overlap_specimens import DENSE, FUSED, PES, STAGES, TYPES
from lancet_kernels.compiling.specimen import SHORT, Specimen
from lancet_kernels.kernels.hopper.config import (
    COPY_REGISTERS,
    COPY_WARPS,
    PTX_OPTIONS,
    TASKS,
    boxes,
    hopper_config,
    put_slots,
    total_warps,
)
from lancet_kernels.kernels.hopper.kernel import gluon_overlap_kernel
from lancet_kernels.kernels.overlap_config import OverlapConfig, first_columns

_ELEMENT = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def specimens(arch: int) -> Iterator[Specimen]:
    """On sm_90 every combination of stages, activations and riders that the launchers use; elsewhere none."""
    if arch != 90:
        return
    for fused in FUSED:
        for riders in DENSE if "HAS_PUT" in FUSED[fused][0] else ("",):
            yield specimen(fused, riders)
    for fused in ("forward", "backward"):
        yield specimen(fused, "", bias=False)
        yield specimen(fused, "", activation="silu")
        yield specimen(fused, "", activation="swiglu")
        yield specimen(fused, "", dtype=torch.float16)


def specimen(
    fused: str,
    riders: str,
    *,
    activation: str = "gelu",
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = True,
    config: OverlapConfig | None = None,
) -> Specimen:
    """The Hopper kernel with the stages `fused` and independent GEMMs `riders`."""
    stages, backward = FUSED[fused]
    config = config or hopper_config()
    tile = config.gemm
    columns_in = first_columns(tile, activation, backward=backward)
    slots = put_slots(
        tile.num_stages, (tile.block_m + tile.block_n) * tile.block_k, config.put_rows * config.put_block
    )
    constexprs: dict[str, object] = {stage: stage in stages for stage in (*STAGES, *stages)}
    constexprs |= {
        "DENSE_KINDS": DENSE[riders], "BACKWARD": backward, "ACT": activation, "HAS_BIAS": bias,
        "SAVE_PRE": True, "BANKS": 2, "EARLIER_BANKS": 2,
        "BM": tile.block_m, "BN": tile.block_n, "BN_IN": columns_in, "BK": tile.block_k, "BW": PES,
        "STAGES": tile.num_stages, "PUT_SLOTS": slots,
        "PUT_ROWS": config.put_rows, "PUT_BLOCK": config.put_block,
        "BT": config.reduce_tokens, "BD": config.reduce_block, "TASKS": TASKS, "WARPS": tile.num_warps,
        "COPY_WARPS": COPY_WARPS, "COPY_REGISTERS": COPY_REGISTERS,
    }  # fmt: skip
    sizes = boxes(tile.block_m, tile.block_n, columns_in, tile.block_k, backward=backward)
    descriptors = {}
    for name, box in sizes.items():
        layout = gl.NVMMASharedLayout.get_default_for(box, _ELEMENT[dtype])
        descriptors[name] = f"tensordesc<{SHORT[dtype]}{box},{layout!r}>"
    return Specimen.of(
        gluon_overlap_kernel,
        f"{fused}{riders} {activation} {SHORT[dtype]} {tile}{'' if bias else ' no bias'}",
        constexprs,
        TYPES | descriptors,
        SHORT[dtype],
        "DFH",
        name="gluon_overlap",
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        total_warps=total_warps(tile),
        wgmma=True,
        tma=True,
        options={"ptx_options": PTX_OPTIONS},
    )
