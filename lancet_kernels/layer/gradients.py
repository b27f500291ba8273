"""Gradients across ranks: the group over which each is summed.

The backward all-to-all has already summed the gradients of experts over their expert group; they are summed
over their replica group, all other gradients over the data group.

`Replicas` compares replicated parameters in some of the steps, overlapped with them. They drift apart without
an error where ranks update them differently: torch's `clip_grad_norm_` scales by another norm on each rank,
because experts differ; or a learning rate follows the loss of one rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lancet_kernels.errors import UserError, check_name, class_name
from lancet_kernels.graph.capture.fsdp_parameters import copies_of_shard, group_of_copies
from lancet_kernels.layer.model_layers import (
    check_placement,
    expert_buffers,
    expert_parameters,
    groups_of,
)
from lancet_kernels.ops.comm.groups import (
    AnyGroups,
    Groups,
    data_group_name,
    group_of,
    group_ranks,
    group_size,
    over_ranks,
    values_of_ranks,
)
from lancet_kernels.ops.comm.link_group import LinkWork, Pending
from lancet_kernels.ops.comm.waiting import waiting

_MARK = "_lancet_gradient_groups"


def set_gradient_group(
    module: nn.Module, groups: AnyGroups | None, names: Collection[str] | None = None
) -> None:
    """Set the ranks over which the gradients of a module's own parameters are summed.

    For parameters that are sharded by hand (tensor parallel): by default their gradients are summed over
    ranks that hold other shards. Copies of the module keep the setting.

    Args: groups: ranks with the same shard and different tokens (of `Groups` the data group); None: this rank
        alone. names: parameters of `module` itself, not of its submodules; None: all of them.
    Raises: UserError for a name that is no parameter of the module.
    """
    own = [name for name, _ in module.named_parameters(recurse=False)]
    what = f"parameter of {type(module).__name__}"
    for name in names or ():
        check_name(what, name, own, do="name a parameter of the module itself, not of a submodule")
    marks = dict(getattr(module, _MARK, {}))
    name = "" if groups is None else data_group_name(groups)
    setattr(module, _MARK, marks | dict.fromkeys(own if names is None else names, name))


def ranks_that_hold(model: nn.Module, groups: Groups) -> dict[nn.Parameter, str]:
    """For every parameter, trained or frozen, the group that holds the same values; for those that FSDP
    shards, the ranks that share the shards. Raises: UserError, as `check_placement`."""
    experts = set(expert_parameters(model))
    group_of = {p: groups.replica if p in experts else groups.data for p in model.parameters()}
    marked: dict[nn.Parameter, str] = {}
    for module in model.modules():
        marks: Mapping[str, str] = getattr(module, _MARK, {})
        marked |= {p: marks[name] for name, p in module.named_parameters(recurse=False) if name in marks}
    check_placement(model, experts | marked.keys())
    return group_of | marked


def gradient_groups(model: nn.Module, groups: Groups) -> dict[nn.Parameter, str]:
    """For every parameter, trained or frozen, the group that sums its gradient; "" where FSDP shards it, and
    reduces and scatters its gradient. Raises: UserError, as `ranks_that_hold`."""
    holders = ranks_that_hold(model, groups)
    return {p: "" if isinstance(p, DTensor) else group for p, group in holders.items()}


def as_backward_finishes(
    group_of_parameter: Mapping[nn.Parameter, str],
) -> Iterator[tuple[nn.Parameter, torch.dtype, str, int]]:
    """(parameter, dtype, group, bytes) of those whose gradient is summed, the last parameter first: about the
    order of the backward."""
    for parameter, group in reversed([*group_of_parameter.items()]):
        if parameter.requires_grad and group:
            yield parameter, parameter.dtype, group, parameter.nbytes


@torch.no_grad()
def clip_gradients(model: nn.Module, largest_norm: float | None, groups: AnyGroups | None = None) -> Tensor:
    """Scale all gradients so that the norm over the whole model is at most `largest_norm` (None: do not
    scale).

    Collective over the data group. Args: groups: as for `optimize`.
    Returns: the norm before clipping, the same on every rank.
    Raises: UserError with tensor-parallel ranks, because it is unknown which parameters they share.
    """
    if not isinstance(model, nn.Module):
        raise UserError(
            "model", got=class_name(model), expected="a module", do="give the model, not its parameters"
        )
    groups = groups_of(model) if groups is None else Groups.of(groups)
    if group_size(groups.world) != group_size(groups.data):
        raise UserError(
            "groups",
            got=f"{group_size(groups.world)} ranks, {group_size(groups.data)} of them with different tokens",
            expected="no tensor-parallel ranks",
            do="clip the gradients yourself",
        )
    over = gradient_groups(model, groups)
    # A parameter on n ranks counts once: each of them adds an n-th.
    held: dict[int, list[nn.Parameter]] = {}
    for parameter, group in over.items():
        held.setdefault(group_size(group) * copies_of_shard(parameter), []).append(parameter)
    squares = [_sum_of_squares(parameters) / ranks for ranks, parameters in held.items()]
    square = torch.stack(squares).sum() if squares else _sum_of_squares([])
    if groups.data:
        with waiting("norm of the gradients", group_of(groups.data)):
            dist.all_reduce(square, group=group_of(groups.data))
    norm = square.sqrt()
    if largest_norm is not None:
        scale = (largest_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in _local_gradients(model.parameters()):
            gradient.mul_(scale.to(gradient.device))  # which is not rounded to 16 bits
    return norm


def _local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Those that are not None; of sharded parameters, this rank's shard."""
    return [local_tensor(p.grad) for p in parameters if p.grad is not None]


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sum_of_squares(parameters: list[nn.Parameter]) -> Tensor:
    gradients = _local_gradients(parameters)
    if not gradients:
        device = parameters[0].device if parameters else None
        return torch.zeros((), dtype=torch.float64, device=device)
    # In its own dtype the norm of a bf16 gradient would have 8 bits, and an fp16 one would overflow.
    wide = torch.float64 if any(g.dtype == torch.float64 for g in gradients) else torch.float32
    norms = torch._foreach_norm(gradients, 2, wide)
    return torch.stack([n.double() for n in norms]).square().sum()


def broadcast_replicated(model: nn.Module, groups: Groups) -> None:
    """Broadcast parameters (also frozen ones) and buffers from the first rank of each group."""
    over = gradient_groups(model, groups)
    with torch.no_grad():
        on_experts = set(expert_buffers(model))
        buffers = ((b, groups.replica if b in on_experts else groups.data) for b in model.buffers())
        for tensor, group in [*over.items(), *buffers]:
            broadcast_first(tensor, group, "broadcast of the replicated parameters")


def broadcast_first(tensor: Tensor, group: str, what: str) -> None:
    """Give the tensor the values that it has on the first rank of a group. Args: what: for messages."""
    if group:
        process_group = group_of(group)
        with waiting(what, process_group):
            dist.broadcast(tensor, src=dist.get_global_rank(process_group, 0), group=process_group)


_WHAT = "comparison of parameters"
_PIECE = {"cpu": 1 << 16}
"""Elements of a parameter per launch: on a CPU they fit in its cache, which is several times as fast."""
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Replicas:
    """Compares replicated parameters, copies of shards (HSDP) among them, in one of `every` calls; the next
    call raises the error.

    A digest reads each parameter once; 16 bytes of each are sent, overlapped with the step.
    """

    def __init__(self, module: nn.Module, groups: Groups, every: int) -> None:
        over = gradient_groups(module, groups)
        held_by = {p: group or group_of_copies(p) for p, group in over.items()}
        self._parameters = [(name, p, held_by[p]) for name, p in module.named_parameters() if held_by[p]]
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
        """Start to compare the parameters of one group. -> the indices of those that differ."""
        places = [i for i, (_, _, other) in enumerate(self._parameters) if other == group]
        digests = torch.stack([digest(local_tensor(self._parameters[i][1])) for i in places])
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
        """Raise UserError on all ranks for the first parameter that differs on any of them."""
        data, nowhere = self._groups.data, len(self._parameters)
        first = int(over_ranks(torch.tensor(min(places, default=nowhere)), data, "min", _WHAT))
        if first == nowhere:
            return
        name, parameter, group = self._parameters[first]
        own = sorted(group_ranks(group)), int(digest(local_tensor(parameter)))
        by_rank = dict(zip(group_ranks(data), values_of_ranks(own, data, _WHAT), strict=True))
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

    The sum of w + w * w over the words w: in a plain sum two changes can cancel.
    """
    words = tensor.detach().reshape(-1).view(torch.uint8).view(_WORDS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in words.split(_PIECE.get(tensor.device.type, 1 << 24)):
        total += torch.addcmul(piece, piece, piece).sum()
    return total
