"""All-reduce of gradients, several tensors as one bucket, as start and wait.

A bucket has one dtype. The sum is over the ranks of the group, in the order gloo and NCCL choose for a
buffer of that size: the same bucket gives the same bits in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lancet_kernels.ops.comm.link_group import link_group_of
from lancet_kernels.ops.comm.pending import Here, Pending, Result, Started

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


def start_all_reduce(gradients: list[Tensor], group: str) -> Started[list[Tensor]]:
    """Start to sum a bucket over the ranks of the group (a name from `group_name`). The sums come in the
    order of the bucket; they are views of one buffer."""
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    pieces = flat.split([gradient.numel() for gradient in gradients])
    sums = [piece.view(gradient.shape) for piece, gradient in zip(pieces, gradients, strict=True)]
    return start_sum(flat, group, lambda: sums) if group else Here(sums)


def start_sum(total: Tensor, group: str, finish: Callable[[], Result]) -> Pending[Result]:
    """Start to replace a contiguous tensor by its sum over the ranks. Args: finish: makes the result then."""
    work = dist.all_reduce(total, group=link_group_of(group), async_op=True)
    return Pending(work, finish)
