"""Which variants of the kernels that move rows, and of the activation, must compile?"""

from __future__ import annotations

from collections.abc import Iterator

from lancet_kernels.compiling.specimen import Specimen
from lancet_kernels.kernels.activation import WARPS, activation_backward_kernel, activation_kernel
from lancet_kernels.kernels.permute import combine_dweight_kernel, combine_kernel, permute_kernel
from lancet_kernels.kernels.rounding import UNFUSED
from lancet_kernels.kernels.row_config import RowConfig


def specimens(arch: int) -> Iterator[Specimen]:
    """Permute, combine and its weights' gradient; the activation and its backward."""
    yield from _row_specimens()
    yield from _activation_specimens()


_SIZES = {"T": "i32", "D": "i32"}
_INDICES = {"row_ptr": "*i64"}


def specimen(kernel: str, dtype: str, top_k: int, weighted: bool, config: RowConfig) -> Specimen:
    """ "permute", "combine" or "combine_dweight" for one dtype, number of choices and tile."""
    weights = {"weight_ptr": "*fp32" if weighted else "*i64"}
    x, rows = {"x_ptr": f"*{dtype}"}, {"rows_ptr": f"*{dtype}"}
    constexprs = {"K": top_k, "BT": config.block_tokens, "BD": config.block_width}
    if kernel == "combine_dweight":
        function, signature = (
            combine_dweight_kernel,
            {**x, **rows, **_INDICES, "dweight_ptr": "*fp32"},
        )
    else:
        constexprs |= {"WEIGHTED": weighted, "EMULATE_BF16": False}
        function, signature = (
            (permute_kernel, {**x, **_INDICES, **weights, **rows})
            if kernel == "permute"
            else (combine_kernel, {**rows, **_INDICES, **weights, "out_ptr": f"*{dtype}"})
        )
    return Specimen(
        name=kernel,
        config=f"{dtype} K{top_k}" + (" weighted" if weighted else ""),
        kernel=function,
        signature={**signature, **_SIZES},
        constexprs=constexprs,
        aligned=(*signature, "D"),
        num_warps=config.num_warps,
        options=UNFUSED,
    )


def _row_specimens() -> Iterator[Specimen]:
    """The three kernels for bf16 and float32 rows, two, eight and many choices."""
    config = RowConfig.default(4096)
    for dtype, top_k, weighted in (
        ("bf16", 8, True),
        ("bf16", 2, False),
        ("fp32", 2, True),
        ("bf16", 64, True),
    ):
        for kernel in ("permute", "combine", "combine_dweight"):
            yield specimen(kernel, dtype, top_k, weighted, config)


def _activation_specimens() -> Iterator[Specimen]:
    """Both kernels for bf16 and float32, with one and with two halves."""
    tile = {"EMULATE_BF16": False, "BR": 2, "BD": 1024}
    for dtype, kind in (("bf16", "gelu"), ("bf16", "swiglu"), ("fp32", "gelu"), ("fp32", "swiglu")):
        rows, sizes = f"*{dtype}", {"R": "i32", "F": "i32"}
        forward = {"h_ptr": rows, "count_ptr": "*i64", "a_ptr": rows}
        backward = {"da_ptr": rows, "h_ptr": rows, "count_ptr": "*i64", "dh_ptr": rows}
        for name, kernel, pointers in (
            ("activation", activation_kernel, forward),
            ("activation_backward", activation_backward_kernel, backward),
        ):
            yield Specimen(
                name=name,
                config=f"{dtype} {kind}",
                kernel=kernel,
                signature={**pointers, **sizes},
                constexprs={"KIND": kind, **tile},
                aligned=(*pointers, "F"),
                num_warps=WARPS,
                options=UNFUSED,
            )
