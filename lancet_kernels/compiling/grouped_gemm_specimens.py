"""Which variants of the grouped GEMM kernels must compile?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lancet_kernels.compiling.specimen import SHORT, Specimen
from lancet_kernels.kernels.gemm_config import GemmConfig, default_config
from lancet_kernels.kernels.grouped_gemm_kernel import (
    grouped_gemm_dw_kernel,
    grouped_gemm_dx_kernel,
    grouped_gemm_forward_kernel,
)

# Name of the launcher -> its kernel, its constexprs beside the tile, and the widths of its matrices.
KERNELS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "grouped_gemm_forward": (
        grouped_gemm_forward_kernel, {"HAS_BIAS": True, "SAVE_PRE": True, "GROUPS": 64}, "KN"
    ),
    "grouped_gemm_dx": (grouped_gemm_dx_kernel, {"GROUPS": 64}, "KN"),
    "grouped_gemm_dw": (grouped_gemm_dw_kernel, {}, "AB"),
}  # fmt: skip
# (launcher, activation, dtypes); 16-bit types differ in nothing but the instruction's name.
_SPECIMENS = (
    ("grouped_gemm_forward", "none", (torch.bfloat16,)),
    ("grouped_gemm_forward", "gelu", (torch.bfloat16, torch.float16, torch.float32)),
    ("grouped_gemm_forward", "swiglu", (torch.bfloat16, torch.float32)),
    ("grouped_gemm_dx", "none", (torch.bfloat16, torch.float16, torch.float32)),
    ("grouped_gemm_dw", "none", (torch.bfloat16, torch.float16, torch.float32)),
)


def specimens(arch: int) -> Iterator[Specimen]:
    """The kernels with the default configurations for many rows, narrow outputs, few rows, odd widths."""
    for name, kind, dtypes in _SPECIMENS:
        accumulators = 2 if kind == "swiglu" else 1
        for dtype in dtypes:
            shapes = ((4096, 4096), (4096, 64), (64, 4096))
            configs = {default_config(m, n, 4096, dtype, arch, accumulators) for m, n in shapes}
            for config in sorted(configs, key=str):
                yield specimen(name, kind, dtype, config, arch)
        if kind == "swiglu" or name != "grouped_gemm_forward":
            config = default_config(4096, 4096, 4096, torch.bfloat16, min(arch, 80), accumulators)
            yield specimen(name, kind, torch.bfloat16, config, arch, odd=True)


def specimen(
    name: str, kind: str, dtype: torch.dtype, config: GemmConfig, arch: int, *, odd: bool = False
) -> Specimen:
    """One kernel with one configuration. odd: widths that are aligned to nothing."""
    half = dtype.itemsize == 2
    tma = half and arch >= 90 and not odd
    kernel, constexprs, widths = KERNELS[name]
    constexprs = constexprs | {
        "GROUP_M": config.group_m, "UPCAST": False, "TMA": tma,
        "BM": config.block_m, "BN": config.block_n, "BK": config.block_k,
    }  # fmt: skip
    return Specimen.of(
        kernel,
        f"{kind} {config} {SHORT[dtype]}{' odd' if odd else ''}",
        constexprs | ({"ACT": kind} if name == "grouped_gemm_forward" else {}),
        {"offset": "i64"},
        SHORT[dtype],
        () if odd else widths,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        wgmma=half and arch == 90,
        tma=tma,
    )
