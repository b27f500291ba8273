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

`start_all_gather` and the like give the same in two halves, so that computation can run in between.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from lancet_kernels.ops.comm.all_reduce import start_sum
from lancet_kernels.ops.comm.groups import group_of, group_rank, group_size
from lancet_kernels.ops.comm.link import link
from lancet_kernels.ops.comm.link_group import LinkWork
from lancet_kernels.ops.comm.pending import Here, Pending, Started, apart
from lancet_kernels.ops.comm.waiting import waiting

# As torch 2.13 and older ones call them.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def shard_of(whole: Tensor, dim: int, group: str) -> Tensor:
    """This rank's slice of a tensor, a view of it."""
    size = whole.shape[dim] // group_size(group)
    return whole.narrow(dim, size * group_rank(group), size)


def start_all_gather(shard: Tensor, dim: int, group: str, gradient_is_whole: bool = False) -> Started[Tensor]:
    """Start to gather the shards of all ranks along a dimension."""
    if not group:
        return Here(shard)
    sent = shard.contiguous()
    received = sent.new_empty(group_size(group), *sent.shape)

    def joined(shards: Tensor) -> Tensor:
        return shards.movedim(0, dim).flatten(dim, dim + 1).contiguous()

    return _started("all_gather", _ALL_GATHER, received, sent, joined, group)


def start_reduce_scatter(summand: Tensor, dim: int, group: str) -> Started[Tensor]:
    """Start to add up the summands of all ranks, of which each gets its slice along a dimension."""
    if not group:
        return Here(summand)
    sent = _slices(summand, dim, group_size(group))
    received = sent.new_empty(sent.shape[1:])
    return _started("reduce_scatter", _REDUCE_SCATTER, received, sent, _itself, group)


def start_exchange_shards(shard: Tensor, source: int, target: int, group: str) -> Started[Tensor]:
    """Start to make slices along `target` of slices along `source`."""
    if not group:
        return Here(shard)
    sent = _slices(shard, target, group_size(group))

    def joined(shards: Tensor) -> Tensor:
        return shards.movedim(0, source).flatten(source, source + 1).contiguous()

    return _started("exchange_shards", dist.all_to_all_single, torch.empty_like(sent), sent, joined, group)


def start_all_reduce_summands(
    summand: Tensor, group: str, gradient_is_whole: bool = False
) -> Started[Tensor]:
    """Start to add up the summands of all ranks."""
    if not group:
        return Here(summand)
    total = summand.clone(memory_format=torch.contiguous_format)
    return start_sum(total, group, lambda: total)


def _started(
    what: str,
    collective: Callable[..., dist.Work],
    received: Tensor,
    sent: Tensor,
    finish: Callable[[Tensor], Tensor],
    group: str,
) -> Pending[Tensor]:
    """Start it. All of the larger tensor but this rank's own slice travels, in both directions."""
    process_group = group_of(group)
    size = max(_bytes(sent), _bytes(received))
    size -= size // process_group.size()
    # Not every backend has collectives of truth values.
    wires = [(t.view(torch.uint8) if t.dtype == torch.bool else t).view(-1) for t in (received, sent)]
    with waiting(what, process_group):
        transfer = link.start(process_group, sent=size, received=size, cuda=sent.is_cuda)
        work = collective(*wires, group=process_group, async_op=True)
    transfer.watch(work, sent)
    return Pending(LinkWork(what, process_group, work, transfer), partial(finish, received))


def _slices(tensor: Tensor, dim: int, ranks: int) -> Tensor:
    """[.., n, ..] -> [W, .., n/W, ..]: what goes to one rank is one block."""
    return tensor.unflatten(dim, (ranks, -1)).movedim(dim, 0).contiguous()


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _resized(tensor: Tensor, sizes: dict[int, int]) -> Tensor:
    shape = [sizes.get(dim, int(size)) for dim, size in enumerate(tensor.shape)]
    return tensor.new_empty(shape)


@torch.library.custom_op("lancet::all_gather", mutates_args=())
def all_gather(shard: Tensor, dim: int, group: str, gradient_is_whole: bool = False) -> Tensor:
    """The shards of all ranks along a dimension, after waiting for them."""
    return apart(start_all_gather(shard, dim, group).wait(), shard)


@all_gather.register_fake
def _(shard, dim, group, gradient_is_whole=False):
    return _resized(shard, {dim: shard.shape[dim] * group_size(group)})


@torch.library.custom_op("lancet::reduce_scatter", mutates_args=())
def reduce_scatter(summand: Tensor, dim: int, group: str) -> Tensor:
    """This rank's slice of the sum over the ranks, after waiting for it."""
    return apart(start_reduce_scatter(summand, dim, group).wait(), summand)


@reduce_scatter.register_fake
def _(summand, dim, group):
    return _resized(summand, {dim: summand.shape[dim] // group_size(group)})


@torch.library.custom_op("lancet::exchange_shards", mutates_args=())
def exchange_shards(shard: Tensor, source: int, target: int, group: str) -> Tensor:
    """A slice along `target` of a tensor of which this rank has a slice along `source`: an all-to-all."""
    return apart(start_exchange_shards(shard, source, target, group).wait(), shard)


@exchange_shards.register_fake
def _(shard, source, target, group):
    ranks = group_size(group)
    return _resized(shard, {source: shard.shape[source] * ranks, target: shard.shape[target] // ranks})


@torch.library.custom_op("lancet::all_reduce", mutates_args=())
def all_reduce(summand: Tensor, group: str, gradient_is_whole: bool = False) -> Tensor:
    """The sum over the ranks, after waiting for it."""
    return apart(start_all_reduce_summands(summand, group).wait(), summand)


@all_reduce.register_fake
def _(summand, group, gradient_is_whole=False):
    return torch.empty_like(summand, memory_format=torch.contiguous_format)


@torch.library.custom_op("lancet::take_shard", mutates_args=())
def take_shard(whole: Tensor, dim: int, group: str) -> Tensor:
    """This rank's slice. An op with a group, not a slice with numbers: all ranks run one graph."""
    return shard_of(whole, dim, group).clone(memory_format=torch.contiguous_format)


@take_shard.register_fake
def _(whole, dim, group):
    return _resized(whole, {dim: whole.shape[dim] // group_size(group)})


@torch.library.custom_op("lancet::place_shard", mutates_args=())
def place_shard(shard: Tensor, dim: int, group: str) -> Tensor:
    """This rank's slice in its place, zeros around it."""
    whole = _resized(shard, {dim: shard.shape[dim] * group_size(group)}).zero_()
    shard_of(whole, dim, group).copy_(shard)
    return whole


@place_shard.register_fake
def _(shard, dim, group):
    return _resized(shard, {dim: shard.shape[dim] * group_size(group)})


@torch.library.custom_op("lancet::share_gradient", mutates_args=())
def share_gradient(result: Tensor, group: str) -> Tensor:
    """The tensor itself, which every rank has whole, and whose whole gradient is a sum of equal shares."""
    return result.clone(memory_format=torch.contiguous_format)


@share_gradient.register_fake
def _(result, group):
    return torch.empty_like(result, memory_format=torch.contiguous_format)


def _keep_arguments(ctx, inputs, output) -> None:
    ctx.arguments = inputs[1:]


def _all_gather_backward(ctx, grad):
    dim, group, is_whole = ctx.arguments
    op = torch.ops.lancet.take_shard if is_whole else torch.ops.lancet.reduce_scatter
    return op(grad, dim, group), None, None, None


def _reduce_scatter_backward(ctx, grad):
    return torch.ops.lancet.all_gather(grad, *ctx.arguments), None, None


def _exchange_shards_backward(ctx, grad):
    source, target, group = ctx.arguments
    return torch.ops.lancet.exchange_shards(grad, target, source, group), None, None, None


def _all_reduce_backward(ctx, grad):
    group, is_whole = ctx.arguments
    return grad if is_whole else torch.ops.lancet.all_reduce(grad, group), None, None


def _take_shard_backward(ctx, grad):
    return torch.ops.lancet.place_shard(grad, *ctx.arguments), None, None


def _share_gradient_backward(ctx, grad):
    (group,) = ctx.arguments
    return grad / group_size(group), None


all_gather.register_autograd(_all_gather_backward, setup_context=_keep_arguments)
reduce_scatter.register_autograd(_reduce_scatter_backward, setup_context=_keep_arguments)
exchange_shards.register_autograd(_exchange_shards_backward, setup_context=_keep_arguments)
all_reduce.register_autograd(_all_reduce_backward, setup_context=_keep_arguments)
take_shard.register_autograd(_take_shard_backward, setup_context=_keep_arguments)
share_gradient.register_autograd(_share_gradient_backward, setup_context=_keep_arguments)
