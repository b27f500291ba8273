"""Collectives that take a tensor of a sharded model from one form to another, and their gradients.

HiDup, section 4.1. W ranks; the shard of the rank in place w is slice w of W equal ones.

    op                  this rank's shape: before -> after             gradient
    all_gather          [.., n/W, ..] -> [.., n, ..]                   reduce_scatter
    reduce_scatter      [.., n, ..] (summand) -> [.., n/W, ..]         all_gather
    exchange_shards     [.., n/W, .., m, ..] -> [.., n, .., m/W, ..]   exchange_shards, dimensions swapped
    all_reduce          [..] (summand) -> [..]                         all_reduce
    take_shard          [.., n, ..] -> [.., n/W, ..] (local)           place_shard: zeros around it (local)

The gradient of a shard is a shard, of a summand the whole, and of a whole tensor a summand: every rank knows
what its own readers add to it. Only what the model returns is different: every rank goes on with the same
value, so its gradient is whole (`gradient_is_whole`), and nothing is communicated for it: a rank takes its
slice of a gathered result's, and everything of an all-reduced one's. `share_gradient` is for results that
were whole already.

The first four are torch's functional collectives with their waits, and copies that bring slices together; a
traced graph has these, for the gradients, too. Groups go by the names from `group_name`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lancet_kernels.ops.comm.groups import group_rank, group_size
from lancet_kernels.ops.comm.link_group import link_group
from lancet_kernels.ops.registration import op

functional = torch.ops._c10d_functional
_LIBRARY = torch.library.Library("lancet", "FRAGMENT")


def shard_of(whole: Tensor, dim: int, group: str) -> Tensor:
    """This rank's slice of a tensor, a view of it."""
    size = whole.shape[dim] // group_size(group)
    return whole.narrow(dim, size * group_rank(group), size)


def _composite(signature: str) -> Callable[[Callable[..., Tensor]], Any]:
    """Decorator: the function as an op that is traced as what it calls."""

    def defined(function: Callable[..., Tensor]) -> Any:
        _LIBRARY.define(f"{function.__name__}{signature}")
        _LIBRARY.impl(function.__name__, function, "CompositeImplicitAutograd")
        return getattr(torch.ops.lancet, function.__name__)

    return defined


class _Collective(torch.autograd.Function):
    """A function of a tensor, and the one that its gradient goes through."""

    @staticmethod
    def forward(ctx, tensor: Tensor, forward: Callable, backward: Callable) -> Tensor:
        ctx.of_gradient = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.of_gradient(grad), None, None


@_composite("(Tensor shard, int dim, str group, bool gradient_is_whole=False) -> Tensor")
def all_gather(shard: Tensor, dim: int, group: str, gradient_is_whole: bool = False) -> Tensor:
    """The shards of all ranks along a dimension."""

    def gathered(shard: Tensor) -> Tensor:
        ranks, shard = group_size(group), shard.contiguous()
        joined = functional.all_gather_into_tensor(shard, ranks, link_group(group))
        return _joined(functional.wait_tensor(joined).view(ranks, *shard.shape), dim)

    back = partial(take_shard if gradient_is_whole else reduce_scatter, dim=dim, group=group)
    return _Collective.apply(shard, gathered, back) if group else shard.clone()


@_composite("(Tensor summand, int dim, str group) -> Tensor")
def reduce_scatter(summand: Tensor, dim: int, group: str) -> Tensor:
    """This rank's slice of the sum over the ranks."""

    def scattered(summand: Tensor) -> Tensor:
        ranks = group_size(group)
        slices = _slices(summand, dim, ranks)
        total = functional.reduce_scatter_tensor(slices, "sum", ranks, link_group(group))
        return functional.wait_tensor(total).view(slices.shape[1:])

    back = partial(all_gather, dim=dim, group=group)
    return _Collective.apply(summand, scattered, back) if group else summand.clone()


@_composite("(Tensor shard, int source, int target, str group) -> Tensor")
def exchange_shards(shard: Tensor, source: int, target: int, group: str) -> Tensor:
    """A slice along `target` of a tensor of which this rank has a slice along `source`: an all-to-all."""

    def exchanged(shard: Tensor) -> Tensor:
        ranks = group_size(group)
        each = [1] * ranks
        arrived = functional.all_to_all_single(_slices(shard, target, ranks), each, each, link_group(group))
        return _joined(functional.wait_tensor(arrived), source)

    back = partial(exchange_shards, source=target, target=source, group=group)
    return _Collective.apply(shard, exchanged, back) if group else shard.clone()


@_composite("(Tensor summand, str group, bool gradient_is_whole=False) -> Tensor")
def all_reduce(summand: Tensor, group: str, gradient_is_whole: bool = False) -> Tensor:
    """The sum over the ranks."""

    def summed(summand: Tensor) -> Tensor:
        return functional.wait_tensor(functional.all_reduce(summand, "sum", link_group(group)))

    back = torch.clone if gradient_is_whole else partial(all_reduce, group=group)
    return _Collective.apply(summand, summed, back) if group else summand.clone()


def _slices(tensor: Tensor, dim: int, ranks: int) -> Tensor:
    """[.., n, ..] -> [W, .., n/W, ..]: what goes to one rank is one block."""
    return tensor.unflatten(dim, (ranks, -1)).movedim(dim, 0).contiguous()


def _joined(shards: Tensor, dim: int) -> Tensor:
    """[W, .., n/W, ..] -> [.., n, ..]."""
    return shards.movedim(0, dim).flatten(dim, dim + 1).contiguous()


@op("lancet::take_shard")
def take_shard(whole: Tensor, dim: int, group: str) -> Tensor:
    """This rank's slice. An op with a group, not a slice with numbers: all ranks run one graph."""
    return shard_of(whole, dim, group).clone(memory_format=torch.contiguous_format)


take_shard.register_fake(take_shard.function)


@op("lancet::place_shard")
def place_shard(shard: Tensor, dim: int, group: str) -> Tensor:
    """This rank's slice in its place, zeros around it."""
    shape = list(shard.shape)
    shape[dim] *= group_size(group)
    whole = shard.new_zeros(shape)
    shard_of(whole, dim, group).copy_(shard)
    return whole


place_shard.register_fake(place_shard.function)


@op("lancet::share_gradient", like="result")
def share_gradient(result: Tensor, group: str) -> Tensor:
    """The tensor itself, which every rank has whole, and whose whole gradient is a sum of equal shares."""
    return result.clone(memory_format=torch.contiguous_format)


def _keep_arguments(ctx, inputs, output) -> None:
    ctx.arguments = inputs[1:]


def _take_shard_backward(ctx, grad):
    return torch.ops.lancet.place_shard(grad, *ctx.arguments), None, None


def _share_gradient_backward(ctx, grad):
    (group,) = ctx.arguments
    return grad / group_size(group), None


take_shard.register_autograd(_take_shard_backward, setup_context=_keep_arguments)
share_gradient.register_autograd(_share_gradient_backward, setup_context=_keep_arguments)
