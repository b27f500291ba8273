"""Random numbers that do not depend on how a batch is cut: a counter, the indices of tokens, dropout.

A number is a hash of its key, splitmix64 (Steele et al. 2014), without a stream or a state. Gates that route
by a key and dropout use it. Tensors are int64 and hold the bits of uint64; arithmetic wraps.

The indices of this rank's T tokens in the global batch are an op of their own (T may differ by rank), so that
every rank captures the same graph: the rank is looked up when it runs.

    x[..., D]  D features of tokens; "..." are the dimensions that tell tokens apart

Dropout keeps an element by a hash of (seed, call site, step, token, feature). Token and feature are index
tensors beside x: a plan that cuts x into parts slices them along with it, and the rule is the plain
"... d, ..., d, - -> ... d". The backward is the same op on the gradient and draws the mask again: a saved
mask would have to be reassembled after every range that is cut, and would keep a byte (or bit) per element.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.ops.base import op
from lancet_kernels.ops.comm.groups import group_device, group_of, group_rank, group_size

GOLDEN = 0x9E3779B97F4A7C15
"""The increment of the counter."""
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

    Enough for 31 random bits. z: counters, GOLDEN already added. scratch: shaped like z.
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


@op("lancet::token_index")
def token_index(num_tokens: int, group: str, device: torch.device, equal_ranks: bool = False) -> Tensor:
    """-> [T] int64: how many tokens the ranks before this one have, and the T - 1 numbers behind that.

    Collective: ranks tell each other how many tokens they have.

    Args:
        group: a name from `group_name`.
        equal_ranks: assume that all ranks have T tokens, without communication. If they have not, two
            tokens may get the same index.
    Example: 2 tokens on rank 0, T = 3 on rank 1 gives [2, 3, 4].
    """
    index_T = torch.arange(num_tokens, device=device)
    if not group:
        return index_T
    if equal_ranks:
        return index_T + group_rank(group) * num_tokens
    own = torch.tensor([num_tokens], device=group_device(group))
    tokens_W = [torch.empty_like(own) for _ in range(group_size(group))]
    dist.all_gather(tokens_W, own, group=group_of(group))
    return index_T + sum(tokens_W[: group_rank(group)], torch.zeros_like(own)).to(device)


@token_index.register_fake
def _(num_tokens, group, device, equal_ranks=False):
    return torch.empty(num_tokens, dtype=torch.int64, device=device)


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
