"""Which roundings happen: those of torch, the same in the interpreter and compiled."""

import triton
import triton.language as tl

from lancet_kernels.kernels.protocol.device import INTERPRETED

# Launch options: a product is rounded before it is added, as torch does. Set everywhere, because the default
# changes between Triton 3.9 (fused) and 3.10.
UNFUSED = {"enable_fp_fusion": False}


@triton.jit
def round_to(b_x, dtype: tl.constexpr):
    """Round to `dtype`, to nearest, ties to even.

    Compiled code does that by itself; the interpreter cuts the low bits of float32 off to get bfloat16
    (Triton 3.6 to 3.9), half a unit too small on average. There the rounding is done in integers:
    0x3F80_8001 -> 0x3F81, 0x3F80_8000 -> 0x3F80, 0x3F81_8000 -> 0x3F82.
    """
    if INTERPRETED and dtype == tl.bfloat16:
        bits = b_x.to(tl.int32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        # Rounding could carry a NaN into infinity; any NaN will do.
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, nearest)
        b_x = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        b_x = b_x.to(dtype)
    return b_x
