"""Which variants of the grouped GEMM kernels must compile?"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from lancet_kernels.compiling.specimen import Specimen, pointers
from lancet_kernels.kernels.gemm_config import GemmConfig, default_config
from lancet_kernels.kernels.gemm_operands import DTYPES
from lancet_kernels.kernels.grouped_gemm_kernel import (
    grouped_gemm_dw_kernel,
    grouped_gemm_dx_kernel,
    grouped_gemm_forward_kernel,
)


def _forward_specimen(act: str, dtype: str, constexprs: dict) -> tuple:
    signature = dict.fromkeys(("x_ptr", "w_ptr", "bias_ptr", "pre_ptr", "out_ptr"), f"*{dtype}")
    signature |= {"offset_ptr": "*i64"} | dict.fromkeys(("R", "L", "K", "N"), "i32")
    constexprs |= {"ACT": act, "HAS_BIAS": True, "SAVE_PRE": True, "GROUPS": 64}
    return grouped_gemm_forward_kernel, signature, constexprs, ("K", "N")


def _dx_specimen(act: str, dtype: str, constexprs: dict) -> tuple:
    signature = dict.fromkeys(("dy_ptr", "w_ptr", "pre_ptr", "out_ptr"), f"*{dtype}")
    signature |= {"offset_ptr": "*i64"} | dict.fromkeys(("R", "L", "K", "N"), "i32")
    constexprs |= {"ACT": act, "GROUPS": 64}
    return grouped_gemm_dx_kernel, signature, constexprs, ("K", "N")


def _dw_specimen(act: str, dtype: str, constexprs: dict) -> tuple:
    signature = dict.fromkeys(("x_ptr", "dy_ptr", "dw_ptr", "dbias_ptr"), f"*{dtype}")
    signature |= {"offset_ptr": "*i64"} | dict.fromkeys(("R", "L", "A", "B"), "i32")
    constexprs |= {"HAS_DBIAS": True}
    return grouped_gemm_dw_kernel, signature, constexprs, ("A", "B")


# (what makes it, activation, dtypes); 16-bit types differ in nothing but the instruction's name.
_SPECIMENS = (
    (_forward_specimen, "none", (torch.bfloat16,)),
    (_forward_specimen, "gelu", (torch.bfloat16, torch.float16, torch.float32)),
    (_forward_specimen, "swiglu", (torch.bfloat16, torch.float32)),
    (_dx_specimen, "none", (torch.bfloat16, torch.float32)),
    (_dx_specimen, "gelu", (torch.bfloat16,)),
    (_dx_specimen, "swiglu", (torch.bfloat16, torch.float16, torch.float32)),
    (_dw_specimen, "none", (torch.bfloat16, torch.float16, torch.float32)),
)


def specimen(
    make: Callable, kind: str, dtype: torch.dtype, config: GemmConfig, arch: int, *, odd: bool = False
) -> Specimen:
    """One kernel of `_SPECIMENS` with one configuration. odd: widths that are aligned to nothing."""
    half = dtype.itemsize == 2
    tma = half and arch >= 90 and not odd
    constexprs = {"GROUP_M": config.group_m, "UPCAST": False, "TMA": tma}
    constexprs |= {"BM": config.block_m, "BN": config.block_n, "BK": config.block_k}
    kernel, signature, constexprs, widths = make(kind, DTYPES[dtype], constexprs)
    return Specimen(
        name=kernel.fn.__name__.removesuffix("_kernel"),
        config=f"{kind} {config} {DTYPES[dtype]}{' odd' if odd else ''}",
        kernel=kernel,
        signature=signature,
        constexprs=constexprs,
        aligned=pointers(signature) + (() if odd else widths),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        wgmma=half and arch == 90,
        tma=tma,
    )


# Name of the launcher -> what makes a specimen of its kernel.
SPECIMEN_OF = {
    "grouped_gemm_forward": _forward_specimen,
    "grouped_gemm_dx": _dx_specimen,
    "grouped_gemm_dw": _dw_specimen,
}


def specimens(arch: int) -> Iterator[Specimen]:
    """The kernels with the default configurations for many rows, narrow outputs, few rows, odd widths."""
    for make, kind, dtypes in _SPECIMENS:
        accumulators = 2 if kind == "swiglu" else 1
        for dtype in dtypes:
            shapes = ((4096, 4096), (4096, 64), (64, 4096))
            configs = {default_config(m, n, 4096, dtype, arch, accumulators) for m, n in shapes}
            for config in sorted(configs, key=str):
                yield specimen(make, kind, dtype, config, arch)
        if kind == "swiglu" or make is _dw_specimen:
            config = default_config(4096, 4096, 4096, torch.bfloat16, min(arch, 80), accumulators)
            yield specimen(make, kind, torch.bfloat16, config, arch, odd=True)
