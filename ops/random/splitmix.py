"""Numbers from a counter: splitmix64 (Steele et al. 2014), without a stream and without a state.

The number depends on its key alone, never on what was drawn before or on how the batch was cut. Gates that
route by a key and dropout draw from it. Tensors are int64 and hold the bits of uint64; arithmetic wraps.
"""

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
"""What the counter grows by."""
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 0xFFFFFFFFFFFFFFFF


def signed(value: int) -> int:
    """The int64 with the same low 64 bits."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def splitmix64(x: Tensor) -> Tensor:
    """The number of each counter, int64 [...] -> int64 [...]."""
    z = x + signed(GOLDEN)
    mix_high_bits_(z, torch.empty_like(z))
    return z ^ ((z >> 31) & ((1 << 33) - 1))  # a logical shift, as below


def mix_high_bits_(z: Tensor, scratch: Tensor) -> None:
    """The finalizer but for its last step, which only changes the low 33 bits, in place.

    For who needs no more than 31 random bits. z: counters, GOLDEN already added. scratch: shaped like z.
    """
    for bits, factor in ((30, _FIRST), (27, _SECOND)):
        torch.bitwise_right_shift(z, bits, out=scratch)
        # A logical shift: torch's copies the sign bit.
        scratch.bitwise_and_((1 << (64 - bits)) - 1)
        z.bitwise_xor_(scratch).mul_(signed(factor))


def splitmix64_of(x: int) -> int:
    """The number of one counter, as uint64."""
    x = (x + GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _FIRST) & _MASK
    x = ((x ^ (x >> 27)) * _SECOND) & _MASK
    return x ^ (x >> 31)
