"""Gradients across ranks: replicated ones all-reduced in buckets while backward runs, expert ones left alone.

The loss of each rank is divided by W before backward, so that sums are what everything needs: the
all-reduce sums replicated gradients, and the backward all-to-all has already summed those of the experts.

Why not DistributedDataParallel: it re-cuts its buckets after the first step, so a resumed run would add
its floating-point numbers in another order than the run it continues. Here the buckets are fixed by the
parameters alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lancet_kernels.layer import expert_parameters
from lancet_kernels.ops.all_reduce import PendingAllReduce, start_all_reduce
from lancet_kernels.ops.groups import group_name
from lancet_kernels.ops.waiting import waiting


@dataclass
class _Bucket:
    parameters: list[nn.Parameter]
    missing: int
    pending: PendingAllReduce | None = None


def replicated_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are the same on every rank and are trained."""
    return [p for p in _replicated(model) if p.requires_grad]


def _replicated(model: nn.Module) -> list[nn.Parameter]:
    experts = {id(p) for p in expert_parameters(model)}
    return [p for p in model.parameters() if id(p) not in experts]


def cut_into_buckets(parameters: list[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Parameters in reverse order (about the order in which backward finishes them), one dtype per bucket.

    A bucket closes when it has reached `bucket_bytes`.
    """
    buckets: list[list[nn.Parameter]] = []
    size = bucket_bytes
    for parameter in reversed(parameters):
        if size >= bucket_bytes or buckets[-1][0].dtype != parameter.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return buckets


class GradientBuckets:
    """Sums the gradients of replicated parameters over `group`, each bucket as soon as it is complete.

    Args:
        group: its own process group, so that no all-reduce stands in an all-to-all's way in NCCL's queue.
        bucket_bytes: larger buckets use the wire better, smaller ones start earlier (DDP's default is 25
        MiB).
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, bucket_bytes: int = 4 << 20) -> None:
        self._group = group_name(group)
        cuts = cut_into_buckets(replicated_parameters(model), bucket_bytes)
        self._buckets = [_Bucket(cut, len(cut)) for cut in cuts]
        self._next = 0
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(lambda _, bucket=bucket: self._ready(bucket))

    def _ready(self, bucket: _Bucket) -> None:
        if bucket.pending is not None:
            # What is under way was copied from the first backward: the second gradient would be lost.
            raise RuntimeError("second backward before GradientBuckets.finish; call finish after each one")
        bucket.missing -= 1
        # In bucket order on every rank, whatever order backward finished them in: collectives must match.
        while self._next < len(self._buckets) and self._buckets[self._next].missing <= 0:
            self._start(self._buckets[self._next])
            self._next += 1

    def _start(self, bucket: _Bucket) -> None:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket.parameters]
        bucket.pending = start_all_reduce(gradients, self._group)

    def finish(self) -> None:
        """Wait for all buckets and put the sums into `.grad`. Parameters without a gradient count as zero."""
        for bucket in self._buckets[self._next :]:
            self._start(bucket)
        for bucket in self._buckets:
            for parameter, gradient in zip(bucket.parameters, bucket.pending.wait(), strict=True):
                parameter.grad = gradient
            bucket.pending, bucket.missing = None, len(bucket.parameters)
        self._next = 0


def call_with_summed_gradients(module: nn.Module, inputs: Sequence[object], group: str) -> object:
    """`module(*inputs)`, whose backward sums the gradients of replicated parameters over `group`, one by one.

    For calls now and then: nothing is bucketed, and computation waits for each sum.
    """
    wanted = {id(parameter) for parameter in replicated_parameters(module)}
    summed = {
        name: _SumOverRanks.apply(parameter, group)
        for name, parameter in module.named_parameters()
        if id(parameter) in wanted
    }
    return torch.func.functional_call(module, summed, tuple(inputs))


class _SumOverRanks(torch.autograd.Function):
    """The tensor itself; the sum over the ranks for its gradient."""

    @staticmethod
    def forward(ctx, tensor: Tensor, group: str) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return start_all_reduce([grad], ctx.group).wait()[0], None


@torch.no_grad()
def clip_gradients(model: nn.Module, largest_norm: float | None, group: dist.ProcessGroup | None) -> Tensor:
    """Scale all gradients so that the norm of the whole model's is at most `largest_norm` (None: leave them).

    Replicated gradients count once, expert shards are summed over the ranks of `group` (None: one rank).
    Returns: the norm before clipping, the same on every rank.
    """
    square = _sum_of_squares(replicated_parameters(model))
    shard = _sum_of_squares(expert_parameters(model))
    if group is not None:
        with waiting("norm of the gradients", group):
            dist.all_reduce(shard, group=group)
    norm = (square + shard).sqrt()
    if largest_norm is not None:
        scale = (largest_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale.to(parameter.grad))
    return norm


def _sum_of_squares(parameters: list[nn.Parameter]) -> Tensor:
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        device = parameters[0].device if parameters else None
        return torch.zeros((), dtype=torch.float64, device=device)
    # In its own dtype the norm of a bf16 gradient would have 8 bits, and an fp16 one would overflow.
    wide = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
    norms = torch._foreach_norm(gradients, 2, wide)
    return torch.stack([n.double() for n in norms]).square().sum()


def broadcast_replicated(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Make replicated parameters (also those that are not trained) and buffers equal those of rank 0."""
    with torch.no_grad(), waiting("broadcast of the replicated parameters", group):
        for tensor in [*_replicated(model), *model.buffers()]:
            dist.broadcast(tensor, src=dist.get_global_rank(group, 0), group=group)
