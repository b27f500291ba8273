"""Sums of gradients over the ranks in a step that runs without its plan.

Another rank may run the plan in the same step, or leave out a layer. So the sums do not depend on what a
module does in a call: they are those of the plan, with the same buckets in the same order, and start when all
gradients are there. Where no rank has a plan, they start while backward runs, in the same order.

Is all of a gradient summed? A step sums what it computes. What is added outside of it, by a penalty on its
parameters say, each rank adds by itself. A hook on each parameter compares what arrives with what the step
gave, mostly the same tensor.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.captured_graph import tensors_restored
from lancet_kernels.layer.gradients import as_backward_finishes, gradient_groups
from lancet_kernels.ops.comm.collectives import Accumulation, cut_into_buckets, start_all_reduce
from lancet_kernels.ops.comm.groups import Groups, group_device, group_of, group_size, subgroup
from lancet_kernels.ops.comm.link_group import Pending
from lancet_kernels.ops.comm.waiting import waiting


class GradientWatch:
    """Raises a UserError at the end of a backward in which a gradient has a part that no step gave.

    Args: parameters: by name, whose gradients are summed over the ranks, or divided.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._arrivals = {name: _arrival(parameter) for name, parameter in parameters.items()}
        self._backward = -1

    def begin(self, _gradient: Tensor) -> None:
        """A backward reaches a result of the step, which may give nothing (reentrant checkpointing)."""
        self.give(())

    def give(self, gradients: Iterable[tuple[str, Tensor | None]]) -> None:
        """In a backward: what the step gives for these parameters."""
        backward = torch._C._current_graph_task_id()
        if backward < 0:
            return
        if self._backward != backward:
            self._backward = backward
            Variable._execution_engine.queue_callback(self._finish)
        for name, gradient in gradients:
            if name in self._arrivals and gradient is not None:
                self._arrivals[name].give(gradient, backward)

    def _finish(self) -> None:
        # Backwards inside of this one (reentrant checkpointing) have higher numbers.
        outside = [name for name, arrival in self._arrivals.items() if arrival.outside >= self._backward]
        for arrival in self._arrivals.values():
            arrival.given, arrival.outside = [], -1
        if outside:
            more = f" and {len(outside) - 1} more" if len(outside) > 1 else ""
            raise UserError(
                f"gradient of {outside[0]}{more}",
                got="a part from outside the optimized step, which is not summed over the ranks, nor divided",
                expected="all of it from the step",
                do="use the parameter in the forward that optimize() is given (and return what you need of "
                "it), not outside; inside, activation checkpointing with use_reentrant=False",
            )


class _Arrival:
    """What the steps gave for a parameter in a backward; a hook on it, before those of users.

    outside: the last backward in which something else arrived.
    """

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        self.backward, self.outside = -1, -1

    def give(self, gradient: Tensor, backward: int) -> None:
        if self.backward != backward:
            self.given, self.backward = [], backward
        # As long as it is kept, torch adds nothing to it in place.
        self.given.append(gradient)

    def __call__(self, gradient: Tensor | None) -> None:
        given, self.given = self.given, []
        if gradient is None or (len(given) == 1 and given[0] is gradient):
            return
        if not given or not _is_sum(gradient, given):
            self.outside = torch._C._current_graph_task_id()


def _is_sum(gradient: Tensor, given: list[Tensor]) -> bool:
    """Is it what torch adds up, in this order, for several calls of a step in one backward?"""
    total = given[0]
    for more in given[1:]:
        total = total + more
    return torch.allclose(gradient, total.to(gradient.dtype), rtol=0.0, atol=0.0, equal_nan=True)


def differentiable(result: object) -> list[Tensor]:
    """The tensors in the result of a module that a backward reaches it by.

    Not inputs and parameters that it returns as they are: a hook on one would stay there, for all backwards.
    """
    return [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor) and x.grad_fn is not None]


_ARRIVALS = WeakTensorKeyDictionary()
"""By parameter, because several steps may share one."""


def _arrival(parameter: nn.Parameter) -> _Arrival:
    if parameter not in _ARRIVALS:
        _ARRIVALS[parameter] = arrival = _Arrival()
        parameter.register_hook(arrival)
        hooks = parameter._backward_hooks
        assert isinstance(hooks, OrderedDict)
        # torch calls them in the order in which a plain dict holds them, which move_to_end() does not change.
        for number in [*hooks][:-1]:
            hooks[number] = hooks.pop(number)
    return _ARRIVALS[parameter]


def has_hooks(parameter: nn.Parameter) -> bool:
    """Do hooks of users wait for the parameter's gradient?"""
    hooks = [*(parameter._backward_hooks or {}).values()]
    after = parameter._post_accumulate_grad_hooks
    return bool(after) or any(not isinstance(hook, _Arrival) for hook in hooks)


Item = TypeVar("Item")


class PlannedSums:
    """The sums of gradients that a plan has. A backward in which a gradient has a part that is not in its sum
    raises a UserError.

    Collective over the groups of parameters that are trained and have no gradient in the plan.
    Args: buckets: group and parameters of each, in the order in which the plan sums them.
        divide_by: the sums are divided by it, and the gradients of parameters that no other rank holds.
        accumulation: says whether gradients are summed now.
        early: no rank has a plan: the sum of a bucket starts when it is complete, after those before it.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Groups,
        buckets: Sequence[tuple[str, Sequence[str]]],
        divide_by: int,
        accumulation: Accumulation,
        early: bool = False,
    ) -> None:
        over = gradient_groups(module, groups)
        planned = {module.get_parameter(name) for _, names in buckets for name in names}
        beyond = {
            name: over[p]
            for name, p in module.named_parameters()
            if p.requires_grad and over[p] and p not in planned
        }
        self._early, self._accumulation = early, accumulation
        # Between all-to-alls, which a rank may come to sooner, on a communicator of their own.
        apart = {
            g: subgroup(range(group_size(g)), g) if early else g for g in dict.fromkeys(g for g, _ in buckets)
        }
        self._buckets = [(apart[group], len(names)) for group, names in buckets]
        # On a communicator of its own, a sum that the plan does not have cannot be taken for one that it has.
        self._beyond = [subgroup(range(group_size(group)), group) for group in beyond.values()]
        in_buckets = [[module.get_parameter(name) for name in names] for _, names in buckets]
        self._parameters = [*in_buckets, [module.get_parameter(name) for name in beyond]]
        summed = [name for _, names in buckets for name in names] + [*beyond]
        self._divide_by = divide_by
        own = [
            n
            for n, p in module.named_parameters()
            if p.requires_grad and not over[p] and not isinstance(p, DTensor)
        ]
        self._names = summed + (own if divide_by > 1 else [])
        self.watch = GradientWatch({name: module.get_parameter(name) for name in self._names})

    def call(self, module: nn.Module, inputs: Sequence[object], by_name: Mapping[str, object]) -> object:
        """`module(*inputs, **by_name)`, whose backward sums the gradients."""
        if not self._names:
            return module(*inputs, **by_name)
        early = _EarlySums(self) if self._early and self._accumulation.sums else None
        parameters = [module.get_parameter(name) for name in self._names]
        summed = _Summed.apply(self, early, *parameters)
        if early is not None:
            summed = early.noticed(summed)
        for tensor, parameter in zip(summed, parameters, strict=True):
            if vars(parameter):  # which a forward may read
                vars(tensor).update(vars(parameter))
        replaced = dict(zip(self._names, summed, strict=True))
        with tensors_restored(module, buffers=False):
            result = torch.func.functional_call(module, replaced, tuple(inputs), dict(by_name))
        for leaf in differentiable(result):
            leaf.register_hook(self.watch.begin)
        return result

    def of(
        self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None], early: _EarlySums | None = None
    ) -> list[Tensor | None]:
        """The sums of the gradients of all parameters; None where no rank has a gradient.

        The sums of the plan do not depend on which gradients there are; a parameter that it does not train is
        summed if this rank has a gradient of one of those. Args: early: has those of the plan.
        """
        number = sum(size for _, size in self._buckets)
        behind = number + len(self._beyond)
        if not self._accumulation.sums:
            own = [grad if grad is None else grad / self._divide_by for grad in grads]
            self.watch.give(zip(self._names, own, strict=True))
            for parameter, grad in zip(itertools.chain(*self._parameters), own[:behind], strict=True):
                if grad is not None:
                    self._accumulation.keep(parameter)
            return own
        if early is None:
            early = _EarlySums(self)
            early.given = [*_in_buckets(self._buckets, grads[:number])]
        sums = early.finish(tensors[:number])
        earlier = self._earlier(len(self._buckets))
        beyond = [
            g if e is None else e * self._divide_by + (0.0 if g is None else g)
            for g, e in zip(grads[number:behind], earlier, strict=True)
        ]
        others = [*_sum_used(self._beyond, tensors[number:behind], beyond), *grads[behind:]]
        sums += [grad if grad is None else grad / self._divide_by for grad in others]
        self.watch.give(zip(self._names, sums, strict=True))
        return sums

    def _earlier(self, bucket: int) -> list[Tensor | None]:
        """The gradients of backwards that were not summed."""
        return [self._accumulation.take(parameter) for parameter in self._parameters[bucket]]


class SummedModule(nn.Module):
    """A module whose gradients are summed over the ranks while backward runs.

    Why not DistributedDataParallel: it re-cuts its buckets after the first step, so a resumed run would add
    its floating-point numbers in another order than the run it continues; and it would not use an emulated
    link. Here the parameters alone say what the buckets are.

    Args: divide_by: as of `PlannedSums`. bucket_bytes: larger buckets use the wire better, smaller ones start
        earlier.
    """

    def __init__(
        self, module: nn.Module, groups: Groups, divide_by: int, bucket_bytes: int = 25 << 20
    ) -> None:
        super().__init__()
        self.module = module
        names = {parameter: name for name, parameter in module.named_parameters()}
        buckets = cut_into_buckets(as_backward_finishes(gradient_groups(module, groups)), bucket_bytes)
        named = [(group, [names[parameter] for parameter in bucket]) for group, bucket in buckets]
        accumulation = Accumulation()
        self.no_sync = accumulation.without_sums
        self._sums = PlannedSums(module, groups, named, divide_by, accumulation, early=True)

    def forward(self, *inputs: object, **by_name: object) -> object:
        return self._sums.call(self.module, inputs, by_name)


class _Summed(torch.autograd.Function):
    """The tensors themselves; the sums over the ranks for their gradients, once all of them are there."""

    @staticmethod
    def forward(ctx, sums: PlannedSums, early: _EarlySums | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sums, ctx.early, ctx.tensors = sums, early, tensors
        # Not as views: what a forward changes in place (without gradients) may not be one of several.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.sums.of(ctx.tensors, grads, ctx.early)


class _EarlySums:
    """The sums of buckets, in their order, each as soon as its gradients and those before it are there.

    given: the gradients of each bucket; None: not there yet, or started.
    """

    def __init__(self, planned: PlannedSums) -> None:
        self._planned, self._buckets = planned, planned._buckets
        self.given: list[Sequence[Tensor | None] | None] = [None] * len(self._buckets)
        self._started: list[Pending[list[Tensor]]] = []
        self._lacks: list[bool] = []
        self._tensors: list[list[Tensor]] = []

    def noticed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same tensors, whose gradients are noticed, bucket by bucket, on their way."""
        self._tensors = _in_buckets(self._buckets, tensors)
        noticed = [t for k, bucket in enumerate(self._tensors) for t in _Noticed.apply(self, k, *bucket)]
        for node in {tensor.grad_fn for tensor in noticed if tensor.grad_fn is not None}:
            # The engine runs what is ready by this number, the largest first, as it does for leaves. Its own
            # number, from before the forward, would come behind the whole backward.
            node._set_sequence_nr(2**64 - 1)
        return [*noticed, *tensors[len(noticed) :]]

    def arrived(self, bucket: int, grads: Sequence[Tensor | None]) -> None:
        """All gradients of a bucket that there will be are there."""
        self.given[bucket] = grads
        while len(self._started) < len(self._buckets) and self.given[len(self._started)] is not None:
            self._start(self._tensors[len(self._started)])

    def finish(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """The sums of all buckets; None where no rank has a gradient. Ready for another backward."""
        in_buckets = _in_buckets(self._buckets, tensors)
        while len(self._started) < len(self._buckets):
            self._start(in_buckets[len(self._started)])
        sums = [total for bucket in self._started for total in bucket.wait()]
        lacks, self._lacks, self._started = self._lacks, [], []
        return [
            None if lack and bool(((total == 0) & total.signbit()).all()) else total
            for lack, total in zip(lacks, sums, strict=True)
        ]

    def _start(self, tensors: Sequence[Tensor]) -> None:
        number = len(self._started)
        grads, self.given[number] = self.given[number] or [None] * len(tensors), None
        scale = 1.0 / self._planned._divide_by
        # A rank without a gradient adds -0.0, the others none: only a sum of nothing else is -0.0.
        added = [
            torch.zeros_like(t).neg_() if g is None else g.new_zeros(()).add(g, alpha=scale)
            for t, g in zip(tensors, grads, strict=True)
        ]
        earlier = self._planned._earlier(number)
        added = [a if e is None else a + e for a, e in zip(added, earlier, strict=True)]
        self._lacks += [g is None and e is None for g, e in zip(grads, earlier, strict=True)]
        self._started.append(start_all_reduce(added, self._buckets[number][0]))


class _Noticed(torch.autograd.Function):
    """The tensors of a bucket themselves; their gradients go to an `_EarlySums`, and no further."""

    @staticmethod
    def forward(ctx, sums: _EarlySums, bucket: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sums, ctx.bucket = sums, bucket
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.sums.arrived(ctx.bucket, grads)
        return None, None, *(None for _ in grads)


def _in_buckets(buckets: Sequence[tuple[str, int]], items: Iterable[Item]) -> list[list[Item]]:
    rest = iter(items)
    return [list(itertools.islice(rest, size)) for _, size in buckets]


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
