"""Which variants of the kernels that move rows, and of the activation, must compile?"""

from __future__ import annotations

from collections.abc import Iterator

from lancet_kernels.compiling.specimen import Specimen
from lancet_kernels.kernels.moe.activation import WARPS, activation_backward_kernel, activation_kernel
from lancet_kernels.kernels.moe.permute import combine_dweight_kernel, combine_kernel, permute_kernel
from lancet_kernels.kernels.moe.rounding import UNFUSED
from lancet_kernels.kernels.moe.row_config import RowConfig

_KERNELS = {"permute": permute_kernel, "combine": combine_kernel, "combine_dweight": combine_dweight_kernel}


def specimens(arch: int) -> Iterator[Specimen]:
    """Permute, combine and its weights' gradient for bf16 and float32 rows, two, eight and many choices; the
    activation and its backward for both types, with one and with two halves."""
    config = RowConfig.default(4096)
    for dtype, top_k, weighted in (
        ("bf16", 8, True),
        ("bf16", 2, False),
        ("fp32", 2, True),
        ("bf16", 64, True),
    ):
        for kernel in _KERNELS:
            yield specimen(kernel, dtype, top_k, weighted, config)
    for dtype, kind in (("bf16", "gelu"), ("bf16", "swiglu"), ("fp32", "gelu"), ("fp32", "swiglu")):
        for kernel in (activation_kernel, activation_backward_kernel):
            yield Specimen.of(
                kernel, f"{dtype} {kind}", {"KIND": kind, "EMULATE_BF16": False, "BR": 2, "BD": 1024},
                {"count": "i64"}, dtype, ["F"], num_warps=WARPS, options=UNFUSED,
            )  # fmt: skip


def specimen(kernel: str, dtype: str, top_k: int, weighted: bool, config: RowConfig) -> Specimen:
    """ "permute", "combine" or "combine_dweight" for one dtype, number of choices and tile."""
    constexprs = {"K": top_k, "BT": config.block_tokens, "BD": config.block_width}
    if kernel != "combine_dweight":
        constexprs |= {"WEIGHTED": weighted, "EMULATE_BF16": False}
    return Specimen.of(
        _KERNELS[kernel],
        f"{dtype} K{top_k}" + (" weighted" if weighted else ""),
        constexprs,
        {"row": "i64", "weight": "fp32" if weighted else "i64", "dweight": "fp32"},
        dtype,
        ["D"],
        num_warps=config.num_warps,
        options=UNFUSED,
    )
