"""A training step with FSDP and experts, all of whose communication is functional collectives.

    N ranks      W of them share one set of experts      T tokens of this rank, D width, F hidden width

Every parameter is a shard: it is gathered before each use, in the forward and again in the backward, and its
gradient is reduce-scattered. Routing is real, but every rank sends every other one the same number of rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lancet_kernels.ops.comm.link_group import link_group

collectives = torch.ops._c10d_functional
TOP_K, EXPERT_RANKS = 2, 2


def _gather(shard: Tensor, ranks: int, group: str) -> Tensor:
    return collectives.wait_tensor(collectives.all_gather_into_tensor(shard, ranks, group))


def _scatter(gradient: Tensor, ranks: int, group: str) -> Tensor:
    return collectives.wait_tensor(collectives.reduce_scatter_tensor(gradient, "avg", ranks, group))


class _ShardedProduct(torch.autograd.Function):
    """x[E, R, I] @ W[E, I, O], where W is gathered again in the backward; of one expert x[R, I] @ W[I, O].

    shard: [E * I / ranks, O].
    """

    @staticmethod
    def forward(ctx, x, shard, experts, ranks, group):
        ctx.save_for_backward(x, shard)
        ctx.experts, ctx.ranks, ctx.group = experts, ranks, group
        whole = _gather(shard, ranks, group)
        return torch.bmm(x, whole.view(experts, -1, shard.shape[1])) if experts > 1 else x @ whole

    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        whole = _gather(shard, ctx.ranks, ctx.group)
        if ctx.experts > 1:
            dx = torch.bmm(gradient, whole.view(ctx.experts, -1, shard.shape[1]).transpose(1, 2))
            dw = torch.bmm(x.transpose(1, 2), gradient).view(-1, shard.shape[1])
        else:
            dx, dw = gradient @ whole.t(), x.t() @ gradient
        return dx, _scatter(dw, ctx.ranks, ctx.group), None, None, None


class _AllToAll(torch.autograd.Function):
    """Equal splits: its own adjoint."""

    @staticmethod
    def forward(ctx, rows, splits, group):
        ctx.splits, ctx.group = splits, group
        return collectives.wait_tensor(collectives.all_to_all_single(rows, splits, splits, group))

    @staticmethod
    def backward(ctx, gradient):
        sent = collectives.all_to_all_single(gradient.contiguous(), ctx.splits, ctx.splits, ctx.group)
        return collectives.wait_tensor(sent), None, None


class _Product(nn.Module):
    """A weight in shards over the ranks of a group."""

    def __init__(self, inner: int, outer: int, group: str, ranks: int, experts: int = 1) -> None:
        super().__init__()
        self.group, self.ranks, self.experts = group, ranks, experts
        self.shard = nn.Parameter(0.1 * torch.randn(experts * inner // ranks, outer))

    def forward(self, x: Tensor) -> Tensor:
        return _ShardedProduct.apply(x, self.shard, self.experts, self.ranks, self.group)


class _Layer(nn.Module):
    """A dense product, and routed experts beside a shared one."""

    def __init__(self, width: int, hidden: int, experts: int, ranks: int, groups: list[str]) -> None:
        super().__init__()
        data, replica, self.group = groups
        self.local = experts // EXPERT_RANKS
        self.dense, self.shared = (_Product(width, width, data, ranks) for _ in range(2))
        self.router = _Product(width, experts, data, ranks)
        self.up = _Product(width, hidden, replica, ranks // EXPERT_RANKS, self.local)
        self.down = _Product(hidden, width, replica, ranks // EXPERT_RANKS, self.local)

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[1]
        x = x + torch.tanh(self.dense(F.rms_norm(x, (width,))))
        tokens = F.rms_norm(x, (width,))
        weight, expert = self.router(tokens).softmax(-1).topk(TOP_K)
        # [T * K]: rows by expert, and back.
        order = expert.flatten().argsort()
        sent = self._exchange(tokens[order // TOP_K])
        # From [source rank, local expert, row] to [local expert, source rank and row].
        received = sent.view(EXPERT_RANKS, self.local, -1, width).transpose(0, 1)
        done = self.down(F.silu(self.up(received.reshape(self.local, -1, width))))
        done = done.view(self.local, EXPERT_RANKS, -1, width).transpose(0, 1)
        returned = self._exchange(done.reshape(-1, width))[order.argsort()].view(-1, TOP_K, width)
        return x + (returned * weight.unsqueeze(-1)).sum(1) + self.shared(tokens)

    def _exchange(self, rows: Tensor) -> Tensor:
        return _AllToAll.apply(rows, [rows.shape[0] // EXPERT_RANKS] * EXPERT_RANKS, self.group)


class _Step(nn.Module):
    """x[T, D] -> loss."""

    def __init__(self, layers: list[_Layer]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def sharded_step(width: int, hidden: int, experts: int) -> nn.Module:
    """x[T, D] -> loss, in two layers, on the ranks of this job: each two consecutive ones share the experts.

    On gloo the groups are link groups, since torch's gather of functional collectives ends a process in which
    two are under way (how-to/overlap-pass.md).
    """
    ranks = dist.get_world_size()
    shape = (ranks // EXPERT_RANKS, EXPERT_RANKS)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "expert"))
    named = link_group if dist.get_backend() == "gloo" else str
    groups = [
        named(group.group_name)
        for group in (dist.group.WORLD, mesh.get_group("replica"), mesh.get_group("expert"))
    ]
    return _Step([_Layer(width, hidden, experts, ranks, groups) for _ in range(2)])
