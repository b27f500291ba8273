"""Collectives of dense tensors: all-reduces of gradient buckets, split into start and wait; and those that
redistribute a tensor of a sharded model.

A bucket has one dtype. The sum is over the ranks of the group, in the order gloo and NCCL choose for a
buffer of that size: the same bucket gives the same bits in every step.

Gradients of several microbatches are summed over the ranks once. Without sums, a backward leaves the
gradients of this rank: what is whole on every rank in `.grad`, and what FSDP shards in a `GradientSum`, since
`.grad` has room for a shard only. The next backward with sums adds them before it sums over the ranks. A
gradient that is in `.grad` before the first of them is summed already: it is set aside, and the sum added.

    backward 1    .grad = a                 held = A          (gradients of this rank)
    backward 2    .grad = sum(a + b)        .grad = this rank's shard of sum(A + B)

Sharded models (HiDup, section 4.1): W ranks; the shard of the rank in place w is slice w of W equal ones.

    op                  this rank's shape: before -> after             gradient
    all_gather          [.., n/W, ..] -> [.., n, ..]                   reduce_scatter
    reduce_scatter      [.., n, ..] (summand) -> [.., n/W, ..]         all_gather
    exchange_shards     [.., n/W, .., m, ..] -> [.., n, .., m/W, ..]   exchange_shards, dimensions swapped
    all_reduce          [..] (summand) -> [..]                         all_reduce
    take_shard          [.., n, ..] -> [.., n/W, ..] (local)           place_shard: zeros around it (local)

The gradient of a shard is a shard, of a summand the whole, and of a whole tensor a summand: every rank knows
what its own readers add to it. What the model returns is used alike on every rank, so its gradient is whole
(`gradient_is_whole`) and needs no communication: a rank takes its slice of the gradient of a gathered result,
and all of it for an all-reduced one. `share_gradient` is for results that were whole already.

The first four are torch's functional collectives with their waits, and copies that bring slices together; a
traced graph has these, for the gradients, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lancet_kernels.ops.base import context_of, op
from lancet_kernels.ops.comm.groups import group_rank, group_size
from lancet_kernels.ops.comm.link_group import Pending, Result, link_group, link_group_of

Gradient = TypeVar("Gradient")


def cut_into_buckets(
    gradients: Iterable[tuple[Gradient, torch.dtype, str, int]], bucket_bytes: int
) -> list[tuple[str, list[Gradient]]]:
    """Gradients in buckets, each with its group. One dtype and one group per bucket; a bucket closes when it
    has reached `bucket_bytes`, so that its sum can start.

    Args: gradients: (gradient, dtype, group, bytes), in the order in which they are finished.
    """
    buckets: list[tuple[str, list[Gradient]]] = []
    open_bucket: dict[tuple[torch.dtype, str], tuple[list[Gradient], int]] = {}
    for gradient, dtype, group, num_bytes in gradients:
        bucket, size = open_bucket.get((dtype, group), ([], bucket_bytes))
        if size >= bucket_bytes:
            bucket, size = [], 0
            buckets.append((group, bucket))
        bucket.append(gradient)
        open_bucket[dtype, group] = bucket, size + num_bytes
    return buckets


def start_all_reduce(gradients: list[Tensor], group: str) -> Pending[list[Tensor]]:
    """Start to sum a bucket over the ranks of the group (a name from `group_name`). The sums come in the
    order of the bucket; they are views of one buffer."""
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    pieces = flat.split([gradient.numel() for gradient in gradients])
    sums = [piece.view(gradient.shape) for piece, gradient in zip(pieces, gradients, strict=True)]
    return start_sum(flat, group, lambda: sums) if group else Pending.here(sums)


def start_sum(total: Tensor, group: str, finish: Callable[[], Result]) -> Pending[Result]:
    """Start to replace a contiguous tensor by its sum over the ranks. Args: finish: makes the result then."""
    work = dist.all_reduce(total, group=link_group_of(group), async_op=True)
    return Pending(work, finish)


class Accumulation:
    """Whether gradients are summed over the ranks now (`sums`), and what is set aside until they are."""

    # By parameter whose `.grad` is of this rank alone: what was there before, summed. Steps may share
    # parameters, so it is one table for all.
    _aside: ClassVar[MutableMapping[Tensor, Tensor | None]] = WeakTensorKeyDictionary()

    def __init__(self) -> None:
        self.sums = True
        self._by_key: dict[object, GradientSum] = {}
        self.parameters: set[Tensor] = set()
        """All parameters of the step."""

    @property
    def unsummed(self) -> bool:
        """Are there gradients of this rank alone?"""
        in_grad = any(parameter.grad is not None for parameter in self._own_aside())
        return in_grad or any(one.held is not None for one in self._by_key.values())

    @contextlib.contextmanager
    def without_sums(self) -> Iterator[None]:
        """A context in which backwards do not sum."""
        before, self.sums = self.sums, False
        try:
            yield
        finally:
            self.sums = before

    def of(self, key: object, parameters: Sequence[Tensor] = ()) -> GradientSum:
        """The sum with this key, created on first use.

        Args: parameters: those whose `.grad` has the gradients of earlier backwards, if they are not held.
        """
        self.parameters.update(parameters)
        if key not in self._by_key:
            self._by_key[key] = GradientSum(self, parameters)
        return self._by_key[key]

    def forget(self) -> None:
        """After a failure: drop the gradients of this rank alone; `.grad` is what it was before them."""
        for parameter in self._own_aside():
            self.take(parameter)
        for one in self._by_key.values():
            one.held = None

    def take_held(self) -> list[tuple[Any, Tensor]]:
        """Take out what sums hold, gradients of this rank alone. -> (key, gradient) of each."""
        held = [(key, one.held) for key, one in self._by_key.items() if one.held is not None]
        for one in self._by_key.values():
            one.held = None
        return held

    def _own_aside(self) -> list[Tensor]:
        """The parameters of this step whose `.grad` is of this rank alone."""
        return [parameter for parameter in self.parameters if parameter in self._aside]

    def keep(self, parameter: Tensor) -> None:
        """Before a gradient of this rank alone is added to `.grad`: set aside what is summed."""
        # None: the gradients were set to zero since, or there are none yet.
        if parameter.grad is None or parameter not in self._aside:
            self._aside[parameter], parameter.grad = parameter.grad, None

    def take(self, parameter: Tensor) -> Tensor | None:
        """The gradient of this rank alone, to be summed; `.grad` becomes what was set aside."""
        if parameter not in self._aside:
            return None
        summed, gradient = self._aside.pop(parameter), parameter.grad
        # None: the gradients were set to zero since.
        parameter.grad = None if gradient is None else summed
        return gradient


class GradientSum:
    """One sum of a graph, and what it holds of earlier backwards."""

    def __init__(self, accumulation: Accumulation, parameters: Sequence[Tensor]) -> None:
        self.accumulation, self.parameters = accumulation, tuple(parameters)
        self.held: Tensor | None = None

    def add(self, summand: Tensor) -> Tensor | None:
        """The summand plus what is held; None: that is held, and nothing is summed over the ranks yet."""
        total = summand if self.held is None else self.held.add_(summand)
        # A copy: the summand may be a view of what the graph still reads.
        self.held = None if self.accumulation.sums else total.clone() if total is summand else total
        return total if self.accumulation.sums else None


def sum_when_due(op: Callable[..., Any], context: int, key: object, summand: Any, *arguments: Any) -> Any:
    """A functional collective that sums. Without sums a bucket (a list) stays as it is: `.grad` has room for
    it; a single summand is held, and the result is zeros.

    Args: context: the number of the step's. key: of the sum in its accumulation.
    """
    one: GradientSum = context_of(context).accumulation.of(key)
    if isinstance(summand, list):
        if not one.accumulation.sums:
            for parameter in one.parameters:
                one.accumulation.keep(parameter)
            return summand
        earlier = [one.accumulation.take(parameter) for parameter in one.parameters]
        return op([g if e is None else g + e for g, e in zip(summand, earlier, strict=True)], *arguments)
    total = one.add(summand)
    if total is not None:
        return op(total, *arguments)
    scatters = op is torch.ops._c10d_functional.reduce_scatter_tensor.default
    rows = summand.shape[0] // (group_size(arguments[-1]) if scatters else 1)
    return summand.new_zeros(rows, *summand.shape[1:])


functional = torch.ops._c10d_functional
_LIBRARY = torch.library.Library("lancet", "FRAGMENT")


def shard_of(whole: Tensor, dim: int, group: str) -> Tensor:
    """This rank's slice of a tensor, a view of it."""
    size = whole.shape[dim] // group_size(group)
    return whole.narrow(dim, size * group_rank(group), size)


def _composite(signature: str) -> Callable[[Callable[..., Tensor]], Any]:
    """Decorator: the function as an op; a trace shows the ops that it calls."""

    def defined(function: Callable[..., Tensor]) -> Any:
        _LIBRARY.define(f"{function.__name__}{signature}")
        _LIBRARY.impl(function.__name__, function, "CompositeImplicitAutograd")
        return getattr(torch.ops.lancet, function.__name__)

    return defined


class _Collective(torch.autograd.Function):
    """A function of a tensor, and that of its gradient."""

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


@op("lancet::take_shard", is_own_fake=True)
def take_shard(whole: Tensor, dim: int, group: str) -> Tensor:
    """This rank's slice. An op with a group, not a slice with numbers: all ranks run one graph."""
    return shard_of(whole, dim, group).clone(memory_format=torch.contiguous_format)


@op("lancet::place_shard", is_own_fake=True)
def place_shard(shard: Tensor, dim: int, group: str) -> Tensor:
    """This rank's slice in its place, zeros around it."""
    shape = list(shard.shape)
    shape[dim] *= group_size(group)
    whole = shard.new_zeros(shape)
    shard_of(whole, dim, group).copy_(shard)
    return whole


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
