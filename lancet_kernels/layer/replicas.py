"""Are parameters that several ranks hold still equal? Compared now and then, while the step runs.

They drift apart without an error where ranks update them differently: torch's `clip_grad_norm_` scales by
another norm on each rank, because experts differ; or a learning rate follows the loss of one rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lancet_kernels.errors import UserError
from lancet_kernels.layer.gradients import gradient_groups
from lancet_kernels.ops.comm.groups import Groups, group_device, group_of, values_of_ranks
from lancet_kernels.ops.comm.link_group import LinkWork
from lancet_kernels.ops.comm.pending import Pending
from lancet_kernels.ops.comm.waiting import waiting

_WHAT = "comparison of parameters"
_PIECE = {"cpu": 1 << 16}
"""Elements of a parameter that are read at once: so many stay in a CPU's cache, several times as fast;
elsewhere few launches are better."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Replicas:
    """Compares the parameters that several ranks hold in one of `every` calls, with the result in the next.

    A digest reads each parameter once; 16 bytes of each travel, beside the step.
    """

    def __init__(self, module: nn.Module, groups: Groups, every: int) -> None:
        over = gradient_groups(module, groups)
        self._parameters = [(name, p, over[p]) for name, p in module.named_parameters() if over[p]]
        self._groups, self._every, self._calls = groups, every, 0
        self._on_gpu = any(p.is_cuda for _, p, _ in self._parameters)
        self._pending: list[Pending[list[int]]] = []

    def call(self) -> None:
        """At the start of a call. Raises: UserError on all ranks for a parameter that has differed."""
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            return  # a replay neither counts calls nor raises
        if self._pending:
            pending, self._pending = self._pending, []
            self._raise_first([place for each in pending for place in each.wait()])
        self._calls += 1
        if self._every and self._calls % self._every == 0:
            self._pending = [self._start(group) for group in sorted({g for _, _, g in self._parameters})]

    def _start(self, group: str) -> Pending[list[int]]:
        """Start to compare the parameters of one group. -> the places of those that differ."""
        places = [i for i, (_, _, other) in enumerate(self._parameters) if other == group]
        digests = torch.stack([digest(self._parameters[i][1]) for i in places])
        # The largest digest, and by its complement the smallest: equal if all are.
        extremes, process_group = torch.cat([digests, ~digests]), group_of(group)
        with waiting(_WHAT, process_group):
            work = dist.all_reduce(extremes, dist.ReduceOp.MAX, process_group, async_op=True)

        def finish() -> list[int]:
            largest, smallest = extremes.chunk(2)
            differ = (largest != ~smallest).tolist()
            return [place for place, other in zip(places, differ, strict=True) if other]

        return Pending(LinkWork(_WHAT, process_group, work, None, kept=extremes), finish)

    def _raise_first(self, places: list[int]) -> None:
        """Raise UserError on all ranks if any of them has a place."""
        data, nowhere = group_of(self._groups.data), len(self._parameters)
        first = torch.tensor(min(places, default=nowhere), device=group_device(self._groups.data))
        with waiting(_WHAT, data):
            dist.all_reduce(first, dist.ReduceOp.MIN, data)
        if int(first) == nowhere:
            return
        name, parameter, group = self._parameters[int(first)]
        own = sorted(dist.get_process_group_ranks(group_of(group))), int(digest(parameter))
        of_ranks = values_of_ranks(own, self._groups.data, _WHAT)
        by_rank = dict(zip(dist.get_process_group_ranks(data), of_ranks, strict=True))
        others = [r for r, (ranks, own) in sorted(by_rank.items()) if own != by_rank[ranks[0]][1]]
        raise UserError(
            f"parameter {name} after {self._calls} calls of the optimized module",
            got=f"another value on rank(s) {', '.join(map(str, others))}",
            expected="the same on all ranks that hold it",
            do="clip with lancet_kernels.clip_gradients, and update it alike on all ranks",
        )


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """A number (int64, on the tensor's device) that changes with any bit, and is the same for equal bits.

    The sum of w + w * w over the words w: a plain sum would miss one that grew and one that shrank.
    """
    words = tensor.detach().reshape(-1).view(torch.uint8).view(_WORDS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in words.split(_PIECE.get(tensor.device.type, 1 << 24)):
        total += torch.addcmul(piece, piece, piece).sum()
    return total
