"""One process stands for one of W ranks, which are alike, to measure a plan for all of them.

Its collectives return its own values (`stand_in_group`), after the time that an emulated wire needs for them
(`link`). The layers, kernels, streams and plans are those of a rank among W.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.ops.comm.groups import Groups
from lancet_kernels.ops.comm.link import emulate_link
from lancet_kernels.ops.comm.link_group import link_group_of
from lancet_kernels.ops.comm.stand_in_group import StandInGroup

_BACKEND = "lancet_stand_in"


def standing_for(
    ranks: int, expert_ranks: int | None = None, link_gbps: float | None = None, timeout_s: float = 300.0
) -> Groups:
    """Let this process stand for one of `ranks` ranks that are alike, and give its groups.

    Layers created afterwards hold the experts of one rank. So one GPU, or one CPU core, measures what a plan
    gains on `ranks` of them, except for skewed routing, stragglers and contention.

    Args: expert_ranks: how many of them share one set of experts (None: all). link_gbps: messages take as
        long as on an emulated wire of so many Gbit/s in each direction of this rank; None: as long as a copy.
    Raises: UserError where this process is a rank of another job, or for ranks that do not divide.
    """
    expert_ranks = expert_ranks or ranks
    if ranks < 2 or expert_ranks < 1 or ranks % expert_ranks:
        raise UserError(
            "ranks that one process stands for",
            got=f"{ranks}, of which {expert_ranks} share experts",
            expected="two or more, in groups of one size",
            do="use a multiple of the ranks that share experts",
        )
    _start(ranks, timedelta(seconds=timeout_s))
    emulate_link(link_gbps)
    return Groups.of_consecutive(ranks, expert_ranks)


def _start(ranks: int, timeout: timedelta) -> None:
    if dist.is_initialized():
        if isinstance(dist.group.WORLD, StandInGroup) and dist.get_world_size() == ranks:
            return
        raise UserError(
            "process group",
            got=f"{dist.get_backend()}, {dist.get_world_size()} ranks",
            expected=f"a process outside of any job, which can stand for one of {ranks} ranks",
            do="leave init_process_group out, or end it with destroy_process_group",
        )
    if _BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(_BACKEND, _new_group, devices=["cpu", "cuda"])
    dist.init_process_group(_BACKEND, store=dist.HashStore(), rank=0, world_size=ranks, timeout=timeout)


def _new_group(store: dist.Store, rank: int, ranks: int, timeout: timedelta) -> dist.ProcessGroup:
    return _OverLink(rank, ranks, timeout)


class _OverLink(StandInGroup):
    """FSDP's collectives outside of a plan go over the link, too."""

    def _allgather_base(self, received: Tensor, sent: Tensor, opts: Any = None) -> dist.Work:
        return link_group_of(self.group_name).allgather_into_tensor_coalesced([received], [sent], opts)

    def _reduce_scatter_base(self, received: Tensor, sent: Tensor, opts: Any = None) -> dist.Work:
        return link_group_of(self.group_name).reduce_scatter_tensor_coalesced([received], [sent], opts)

    # Their names since torch 2.13.
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base  # type: ignore[assignment]
