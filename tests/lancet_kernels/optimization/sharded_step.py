"""A training step with FSDP and experts, all of whose communication is functional collectives.

    N ranks      W of them share one set of experts      T tokens of this rank, D width, F hidden width

Every parameter is a shard: it is gathered before each use, in the forward and again in the backward, and its
gradient is reduce-scattered. Routing is real, but every rank sends every other one the same number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lancet_kernels.ops.comm.link_group import link_group

collectives = torch.ops._c10d_functional


@dataclass(frozen=True)
class Shape:
    """A model and the ranks that train it."""

    name: str
    layers: int
    width: int
    heads: int
    experts: int
    top_k: int
    expert_hidden: int
    shared_hidden: int
    """Hidden width of the expert that sees every token; 0: none."""
    dense_hidden: int
    """Hidden width of the first layer's feed-forward, as in DeepSeek; 0: an MoE layer like the others."""
    sequence: int
    batch: int
    vocabulary: int = 32768
    ranks: int = 64
    expert_ranks: int = 8


def _gather(shard: Tensor, ranks: int, group: str) -> Tensor:
    return collectives.wait_tensor(collectives.all_gather_into_tensor(shard, ranks, group))


def _scatter(gradient: Tensor, ranks: int, group: str) -> Tensor:
    return collectives.wait_tensor(collectives.reduce_scatter_tensor(gradient, "avg", ranks, group))


class _ShardedLinear(torch.autograd.Function):
    """x[.., I] @ W[O, I]^T, or per expert x[E, R, I] @ W[E, I, O]; W is gathered again in the backward.

    shard: [O / ranks, I], or [E * I / ranks, O].
    """

    @staticmethod
    def forward(ctx, x, shard, experts, ranks, group):
        ctx.save_for_backward(x, shard)
        ctx.experts, ctx.ranks, ctx.group = experts, ranks, group
        whole = _gather(shard, ranks, group)
        return torch.bmm(x, whole.view(experts, -1, shard.shape[1])) if experts else x @ whole.t()

    @staticmethod
    def backward(ctx, gradient):
        x, shard = ctx.saved_tensors
        whole = _gather(shard, ctx.ranks, ctx.group)
        if ctx.experts:
            dx = torch.bmm(gradient, whole.view(ctx.experts, -1, shard.shape[1]).transpose(1, 2))
            dw = torch.bmm(x.transpose(1, 2), gradient).view(-1, shard.shape[1])
        else:
            dx = gradient @ whole
            dw = gradient.reshape(-1, gradient.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
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


@dataclass(frozen=True)
class _Ranks:
    """Names and sizes of the groups."""

    data: str
    ranks: int
    expert: str
    expert_ranks: int
    replica: str
    replicas: int


class _Linear(nn.Module):
    """A weight in shards: over all ranks (shared), or over the replicas of an expert."""

    def __init__(self, inner: int, outer: int, ranks: _Ranks, experts: int = 0, shared: bool = True) -> None:
        super().__init__()
        self.experts = experts
        self.group, self.ranks = (ranks.data, ranks.ranks) if shared else (ranks.replica, ranks.replicas)
        rows, columns = (experts * inner, outer) if experts else (outer, inner)
        self.shard = nn.Parameter(torch.empty(_divided(rows, self.ranks), columns))

    def forward(self, x: Tensor) -> Tensor:
        return _ShardedLinear.apply(x, self.shard, self.experts, self.ranks, self.group)


class _FeedForward(nn.Module):
    """SwiGLU: dense, or of experts whose rows come as [E, R, D]."""

    def __init__(self, width: int, hidden: int, ranks: _Ranks, experts: int = 0) -> None:
        super().__init__()
        self.gate, self.up = (_Linear(width, hidden, ranks, experts, not experts) for _ in range(2))
        self.down = _Linear(hidden, width, ranks, experts, not experts)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class _Experts(nn.Module):
    """Routed experts beside a shared one."""

    def __init__(self, shape: Shape, ranks: _Ranks) -> None:
        super().__init__()
        self.shape, self.ranks = shape, ranks
        self.local = _divided(shape.experts, ranks.expert_ranks)
        # As one expert, so that it is cut along the width: there may be fewer experts than ranks.
        self.router = _Linear(shape.width, shape.experts, ranks, experts=1)
        self.experts = _FeedForward(shape.width, shape.expert_hidden, ranks, self.local)
        self.shared = _FeedForward(shape.width, shape.shared_hidden, ranks) if shape.shared_hidden else None

    def forward(self, x: Tensor) -> Tensor:
        tokens, k = x.reshape(-1, x.shape[-1]), self.shape.top_k
        weight, expert = self.router(tokens.unsqueeze(0))[0].float().softmax(-1).topk(k)
        # [T * K]: rows by expert, and back.
        order = expert.flatten().argsort()
        back = order.argsort()
        sent = self._exchange(tokens[order // k])
        # From [source rank, local expert, row] to [local expert, source rank and row].
        peers = self.ranks.expert_ranks
        received = sent.view(peers, self.local, -1, x.shape[-1]).transpose(0, 1)
        done = self.experts(received.reshape(self.local, -1, x.shape[-1]))
        done = done.view(self.local, peers, -1, x.shape[-1]).transpose(0, 1)
        returned = self._exchange(done.reshape(-1, x.shape[-1]))[back].view(-1, k, x.shape[-1])
        mixed = (returned * weight.to(x.dtype).unsqueeze(-1)).sum(1)
        return (mixed if self.shared is None else mixed + self.shared(tokens)).view_as(x)

    def _exchange(self, rows: Tensor) -> Tensor:
        share = _divided(rows.shape[0], self.ranks.expert_ranks)
        return _AllToAll.apply(rows, [share] * self.ranks.expert_ranks, self.ranks.expert)


class _Attention(nn.Module):
    def __init__(self, shape: Shape, ranks: _Ranks) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query, self.key, self.value, self.out = (
            _Linear(shape.width, shape.width, ranks) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        q, k, v = (
            linear(x).view(batch, sequence, self.heads, -1).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        # On the meta device torch would take attention apart.
        attended = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
        return self.out(attended.transpose(1, 2).reshape(batch, sequence, width))


class _Step(nn.Module):
    """tokens [B, S] -> loss (against the tokens themselves: nothing runs)."""

    def __init__(self, shape: Shape, ranks: _Ranks) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(_divided(shape.vocabulary, ranks.ranks), shape.width))
        self.ranks, self.width = ranks, shape.width
        self.attention = nn.ModuleList(_Attention(shape, ranks) for _ in range(shape.layers))
        self.feed_forward = nn.ModuleList(
            _FeedForward(shape.width, shape.dense_hidden, ranks)
            if shape.dense_hidden and not layer
            else _Experts(shape, ranks)
            for layer in range(shape.layers)
        )
        self.head = _Linear(shape.width, shape.vocabulary, ranks)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, _Gathered.apply(self.embedding, self.ranks.ranks, self.ranks.data))
        for attention, feed_forward in zip(self.attention, self.feed_forward, strict=True):
            x = x + attention(F.rms_norm(x, (self.width,)))
            x = x + feed_forward(F.rms_norm(x, (self.width,)))
        logits = self.head(F.rms_norm(x, (self.width,)))
        return -logits.float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).mean()


class _Gathered(torch.autograd.Function):
    """A parameter from its shards; its gradient is scattered."""

    @staticmethod
    def forward(ctx, shard, ranks, group):
        ctx.ranks, ctx.group = ranks, group
        return _gather(shard, ranks, group)

    @staticmethod
    def backward(ctx, gradient):
        return _scatter(gradient, ctx.ranks, ctx.group), None, None


def _divided(size: int, ranks: int) -> int:
    if size % ranks:
        raise ValueError(f"a dimension of {size} on {ranks} ranks: it must be divisible")
    return size // ranks


def _groups(shape: Shape) -> _Ranks:
    """The groups of this rank: consecutive ranks share the experts.

    On gloo they are link groups, since torch's gather of functional collectives ends a process in which two
    are under way (how-to/overlap-pass.md).
    """
    world = dist.group.WORLD
    assert world is not None
    named = link_group if dist.get_backend() == "gloo" else str
    replicas, apart = _divided(shape.ranks, shape.expert_ranks), shape.expert_ranks
    mesh = init_device_mesh("cpu", (replicas, apart), mesh_dim_names=("replica", "expert"))
    data, expert, replica = (
        named(group.group_name) for group in (world, mesh.get_group("expert"), mesh.get_group("replica"))
    )
    return _Ranks(data, shape.ranks, expert, apart, replica, replicas)


def real_step(shape: Shape) -> nn.Module:
    """tokens [B, S] -> loss, in float32, on the ranks of this job, which are as many as the shape's."""
    model = _Step(shape, _groups(shape))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model
