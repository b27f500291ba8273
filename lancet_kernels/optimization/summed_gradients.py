"""Sums of gradients over the ranks in a step that runs without its plan.

Another rank may run the plan in the same step, or leave out a layer. So the sums do not depend on what a
module does in a call: they are those of the plan, with the same buckets in the same order, and start when all
gradients are there.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lancet_kernels.graph.capture.captured_graph import tensors_restored
from lancet_kernels.ops.comm.all_reduce import start_all_reduce
from lancet_kernels.ops.comm.groups import Groups, group_device, group_of, group_size, subgroup
from lancet_kernels.ops.comm.waiting import waiting
from lancet_kernels.optimization.outside_gradients import GradientWatch
from lancet_kernels.training.gradients import gradient_groups


class PlannedSums:
    """The sums of gradients that a plan has. A backward in which a gradient has a part that is not in its sum
    raises a UserError.

    Collective over the groups of parameters that are trained and have no gradient in the plan.
    Args: buckets: group and parameters of each, in the order in which the plan sums them.
    """

    def __init__(
        self, module: nn.Module, groups: Groups, buckets: Sequence[tuple[str, Sequence[str]]]
    ) -> None:
        over = gradient_groups(module, groups)
        planned = {module.get_parameter(name) for _, names in buckets for name in names}
        beyond = {
            name: over[p]
            for name, p in module.named_parameters()
            if p.requires_grad and over[p] and p not in planned
        }
        self._buckets = [(group, len(names)) for group, names in buckets]
        # On a communicator of its own, a sum that the plan does not have cannot be taken for one that it has.
        self._beyond = [subgroup(range(group_size(group)), group) for group in beyond.values()]
        self._names = [name for _, names in buckets for name in names] + [*beyond]
        self.watch = GradientWatch({name: module.get_parameter(name) for name in self._names})

    def call(self, module: nn.Module, inputs: Sequence[object], by_name: Mapping[str, object]) -> object:
        """`module(*inputs, **by_name)`, whose backward sums the gradients."""
        summed = _Summed.apply(self, *(module.get_parameter(name) for name in self._names))
        replaced = dict(zip(self._names, summed, strict=True))
        with tensors_restored(module, buffers=False):
            return torch.func.functional_call(module, replaced, tuple(inputs), dict(by_name))

    def of(self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The sums of the gradients of all parameters; None where no rank has a gradient.

        The sums of the plan do not depend on which gradients there are; a parameter that it does not train is
        summed if this rank has a gradient of one of those.
        """
        number = sum(size for _, size in self._buckets)
        sums = _sum_buckets(self._buckets, tensors[:number], grads[:number])
        sums += _sum_used(self._beyond, tensors[number:], grads[number:])
        self.watch.give(zip(self._names, sums, strict=True))
        return sums


class _Summed(torch.autograd.Function):
    """The tensors themselves; the sums over the ranks for their gradients, once all of them are there."""

    @staticmethod
    def forward(ctx, sums: PlannedSums, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sums, ctx.tensors = sums, tensors
        # Not as views: what a forward changes in place (without gradients) may not be one of several.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *ctx.sums.of(ctx.tensors, grads)


def _sum_buckets(
    buckets: Sequence[tuple[str, int]], tensors: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    # A rank without a gradient adds -0.0, the others none: only a sum of nothing else is -0.0.
    given = [
        torch.zeros_like(tensor).neg_() if grad is None else grad + 0.0
        for tensor, grad in zip(tensors, grads, strict=True)
    ]
    rest = iter(given)
    started = [start_all_reduce(list(itertools.islice(rest, size)), group) for group, size in buckets]
    sums = [total for bucket in started for total in bucket.wait()]
    return [
        None if grad is None and bool(((total == 0) & total.signbit()).all()) else total
        for grad, total in zip(grads, sums, strict=True)
    ]


def _sum_used(
    groups: Sequence[str], tensors: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    sums = list(grads)
    for group in sorted(set(groups)) if any(grad is not None for grad in grads) else ():
        places = [i for i, other in enumerate(groups) if other == group]
        process_group = group_of(group)
        used = torch.tensor([grads[i] is not None for i in places], device=group_device(group)).int()
        with waiting("sums of gradients that the plan does not have", process_group):
            dist.all_reduce(used, group=process_group)
        places = [i for i, times in zip(places, used.tolist(), strict=True) if times]
        given = {i: torch.zeros_like(tensors[i]) if (own := grads[i]) is None else own for i in places}
        started = {i: start_all_reduce([gradient], group) for i, gradient in given.items()}
        for i, pending in started.items():
            (sums[i],) = pending.wait()
    return sums
