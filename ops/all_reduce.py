"""All-reduce of gradients, several tensors as one bucket, in one piece or as start and wait.

A bucket has one dtype. The sum is over the ranks of the group, in the order gloo and NCCL choose for a
buffer of that size: the same bucket gives the same bits in every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lancet_kernels.ops.groups import group_of
from lancet_kernels.ops.link import Transfer, link
from lancet_kernels.ops.waiting import waiting


@dataclass
class PendingAllReduce:
    """A bucket in flight."""

    flat: Tensor
    shapes: list[torch.Size]
    work: dist.Work | None
    group: dist.ProcessGroup | None = None
    transfer: Transfer | None = None

    def wait(self) -> list[Tensor]:
        """The sums, in the order of the bucket; views of one buffer. Raises: CommunicationError."""
        if self.work is not None:
            with waiting("all_reduce", self.group):
                self.work.wait()
                if self.transfer is not None:
                    self.transfer.pace()
        pieces = self.flat.split([shape.numel() for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


def start_all_reduce(gradients: list[Tensor], group: str) -> PendingAllReduce:
    """Start to sum a bucket over the ranks of the group (a name from `group_name`)."""
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    shapes = [gradient.shape for gradient in gradients]
    if not group:
        return PendingAllReduce(flat, shapes, None)
    process_group = group_of(group)
    with waiting("all_reduce", process_group):
        transfer = link.start_all_reduce(process_group, flat.numel() * flat.element_size(), flat.is_cuda)
        work = dist.all_reduce(flat, group=process_group, async_op=True)
    return PendingAllReduce(flat, shapes, work, process_group, transfer)


@torch.library.custom_op("lancet::all_reduce_bucket", mutates_args=())
def all_reduce_bucket(gradients: list[Tensor], group: str) -> list[Tensor]:
    """The sums over the ranks, after waiting for them."""
    # An op's results may not be views of each other.
    return [gradient.clone() for gradient in start_all_reduce(gradients, group).wait()]


@all_reduce_bucket.register_fake
def _(gradients, group):
    return [torch.empty_like(gradient, memory_format=torch.contiguous_format) for gradient in gradients]
