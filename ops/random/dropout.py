"""Dropout whose mask depends on the identity of an element, not on the rank, time or chunk that draws it.

    x[..., D]  D features of tokens; "..." are the dimensions that tell tokens apart

Whether an element is kept is decided by a hash of (seed, call site, step, token, feature). Token and feature
are given as index tensors beside x: a plan that cuts x into parts slices them along with it, so
every part knows its place and the rule is the plain "... d, ..., d, - -> ... d".

Nothing is saved for the backward: it is the same op on the gradient, so the mask is drawn again. A saved
mask would have to be reassembled after every range that is cut, and would keep a byte (or bit) per element
until the backward.
"""

import torch
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.ops.random.splitmix import GOLDEN, mix_high_bits_, signed, splitmix64, splitmix64_of
from lancet_kernels.ops.registration import op

_BITS = 31
"""Random bits per element: p counts in steps of 2^-31."""
_BLOCK = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Elements that are drawn at once: what a core's cache holds; on a GPU, 256 MiB of counters."""


@op("lancet::dropout", like="x")
def dropout(
    x: Tensor, token: Tensor, feature: Tensor, step: Tensor, p: float, seed: int, site: int
) -> Tensor:
    """-> [..., D]: zero with probability p, else x / (1 - p).

    Args:
        token: int64, shaped like x without its last dimension: index in the global batch. feature: int64 [D].
        step: int64 scalar, the training step. site: which dropout of the model. 0 <= p < 1.
    """
    if token.shape != x.shape[:-1] or feature.shape != x.shape[-1:]:
        raise UserError(
            "indices of dropout",
            got=f"tokens {list(token.shape)}, features {list(feature.shape)}",
            expected=f"{list(x.shape[:-1])} and {list(x.shape[-1:])}, as x is {list(x.shape)}",
            do="give every token and every feature its index",
        )
    width = x.shape[-1]
    step_key = splitmix64(step + signed(splitmix64_of(splitmix64_of(seed) + site)))
    key_T = splitmix64(token.reshape(-1) + step_key)
    x_TD = x.reshape(len(key_T), width)
    y_TD = torch.empty(x_TD.shape, dtype=x.dtype, device=x.device)
    counter_D = (feature + 1) * signed(GOLDEN)
    # An element whose random bits, as a signed number, are at least this is kept.
    least = (round(p * (1 << _BITS)) - (1 << (_BITS - 1))) << (64 - _BITS)
    rows = max(1, _BLOCK.get(x.device.type, _BLOCK["cuda"]) // max(1, width))
    number, scratch = (
        torch.empty(min(rows, len(key_T)), width, dtype=torch.int64, device=x.device) for _ in range(2)
    )
    for first in range(0, len(key_T), rows):
        block = slice(first, first + rows)
        key_B = key_T[block]
        number_BD, scratch_BD = number[: len(key_B)], scratch[: len(key_B)]
        torch.add(key_B[:, None], counter_D, out=number_BD)
        mix_high_bits_(number_BD, scratch_BD)
        torch.mul(x_TD[block], number_BD >= least, out=y_TD[block]).mul_(1 / (1 - p))
    return y_TD.view(x.shape)


def _setup_context(ctx, inputs, output) -> None:
    _x, token, feature, step, *ctx.key = inputs
    ctx.save_for_backward(token, feature, step)


def _backward(ctx, dy):
    return torch.ops.lancet.dropout(dy, *ctx.saved_tensors, *ctx.key), None, None, None, None, None, None


dropout.register_autograd(_backward, setup_context=_setup_context)
