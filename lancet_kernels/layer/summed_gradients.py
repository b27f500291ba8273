"""Sums of gradients over the ranks in a step that runs without its plan.

Another rank may run the plan in the same step, or leave out a layer. So the sums do not depend on what a
module does in a call: they are those of the plan, with the same buckets in the same order, and start when all
gradients are there. Where no rank has a plan, they start while backward runs, in the same order.

Gradients from outside of the step, of a penalty on its parameters, say, would differ between the ranks. A
hook on each parameter compares its gradient with that of the step, mostly the same tensor.
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
    """Raises a UserError at the end of a backward in which a gradient has a part from outside the step.

    Args: parameters: by name, those whose gradients are summed over the ranks, or divided.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._arrivals = {name: _arrival(parameter) for name, parameter in parameters.items()}
        self._backward = -1

    def begin(self, _gradient: Tensor) -> None:
        """Watch a backward from a result of the step; it may reach no parameter (reentrant checkpointing)."""
        self.give(())

    def give(self, gradients: Iterable[tuple[str, Tensor | None]]) -> None:
        """Note the gradients that the step passes on to its parameters in this backward."""
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
            arrival.parts, arrival.outside = [], -1
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
    """The hook on a parameter, before those of users. parts: the gradients of steps in a backward. outside:
    the last backward in which another gradient arrived."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.backward, self.outside = -1, -1

    def give(self, gradient: Tensor, backward: int) -> None:
        if self.backward != backward:
            self.parts, self.backward = [], backward
        # The reference keeps torch from accumulating into it in place.
        self.parts.append(gradient)

    def __call__(self, gradient: Tensor | None) -> None:
        parts, self.parts = self.parts, []
        if gradient is None or (len(parts) == 1 and parts[0] is gradient):
            return
        if not parts or not _is_sum(gradient, parts):
            self.outside = torch._C._current_graph_task_id()


def _is_sum(gradient: Tensor, parts: list[Tensor]) -> bool:
    """Whether it is the sum in torch's order, for several calls of a step in one backward."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return torch.allclose(gradient, total.to(gradient.dtype), rtol=0.0, atol=0.0, equal_nan=True)


def differentiable(result: object) -> list[Tensor]:
    """The tensors with a `grad_fn` in the result of a module: a hook on a returned input or parameter would
    stay there for all backwards."""
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
    """Whether users have registered hooks for the parameter's gradient."""
    hooks = [*(parameter._backward_hooks or {}).values()]
    after = parameter._post_accumulate_grad_hooks
    return bool(after) or any(not isinstance(hook, _Arrival) for hook in hooks)


Item = TypeVar("Item")


class PlannedSums:
    """The sums of gradients of a plan. A backward in which a gradient has a part from outside the step raises
    a UserError.

    Collective over the groups of parameters that are trained and have no gradient in the plan.
    Args: buckets: group and parameters of each, in the order in which the plan sums them.
        divide_by: the sums are divided by it, and the gradients of parameters that no other rank holds.
        accumulation: the gradients of backwards that do not sum.
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
        # Early sums have a communicator of their own: their order among all-to-alls differs between ranks.
        groups_of_sums = {
            g: subgroup(range(group_size(g)), g) if early else g for g in dict.fromkeys(g for g, _ in buckets)
        }
        self._buckets = [(groups_of_sums[group], len(names)) for group, names in buckets]
        # On communicators of their own, sums beyond the plan are never matched with sums of the plan.
        self._beyond = [subgroup(range(group_size(group)), group) for group in beyond.values()]
        in_buckets = [[module.get_parameter(name) for name in names] for _, names in buckets]
        self._parameters = [*in_buckets, [module.get_parameter(name) for name in beyond]]
        accumulation.parameters.update(itertools.chain(*self._parameters))
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
            summed = early.tapped(summed)
        for tensor, parameter in zip(summed, parameters, strict=True):
            if vars(parameter):  # which a forward may read
                vars(tensor).update(vars(parameter))
        replaced = dict(zip(self._names, summed, strict=True))
        with tensors_restored(module, buffers=False):
            result = torch.func.functional_call(module, replaced, tuple(inputs), dict(by_name))
        for leaf in differentiable(result):
            leaf.register_hook(self.watch.begin)
        return result

    def reduce(
        self, tensors: Sequence[Tensor], grads: Sequence[Tensor | None], early: _EarlySums | None
    ) -> list[Tensor | None]:
        """The sums of the gradients of all parameters; None where no rank has a gradient.

        The sums of the plan always run; those of parameters that it does not train only if this rank has a
        gradient of one of these.
        Args: early: sums of the plan's buckets, some of them started; None: none has started.
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
            early.gradients = [*_in_buckets(self._buckets, grads[:number])]
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

    Unlike DistributedDataParallel, which rebuilds its buckets after the first step, so that a resumed run
    adds in another order than an uninterrupted one, buckets follow from the parameters alone; and an emulated
    link is used.

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
    """The identity; its backward sums the gradients over the ranks."""

    @staticmethod
    def forward(ctx, sums: PlannedSums, early: _EarlySums | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sums, ctx.early, ctx.tensors = sums, early, tensors
        # Not views: torch refuses to change one of several views in place, as a forward may.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.sums.reduce(ctx.tensors, grads, ctx.early)


class _EarlySums:
    """The sums of buckets, in their order, each as soon as its gradients and those before it are there.

    gradients: of each bucket; None: not there yet, or its sum has started.
    """

    def __init__(self, planned: PlannedSums) -> None:
        self._planned, self._buckets = planned, planned._buckets
        self.gradients: list[Sequence[Tensor | None] | None] = [None] * len(self._buckets)
        self._started: list[Pending[list[Tensor]]] = []
        self._lacks: list[bool] = []
        self._tensors: list[list[Tensor]] = []

    def tapped(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The same tensors, whose gradients come to `arrived`, bucket by bucket."""
        self._tensors = _in_buckets(self._buckets, tensors)
        tapped = [t for k, bucket in enumerate(self._tensors) for t in _Tap.apply(self, k, *bucket)]
        for node in {tensor.grad_fn for tensor in tapped if tensor.grad_fn is not None}:
            # The engine runs ready nodes by this number, the largest first; leaves have the largest. The
            # node's own, from before the forward, would run it after the whole backward.
            node._set_sequence_nr(2**64 - 1)
        return [*tapped, *tensors[len(tapped) :]]

    def arrived(self, bucket: int, grads: Sequence[Tensor | None]) -> None:
        """The gradients of a bucket are complete."""
        self.gradients[bucket] = grads
        while len(self._started) < len(self._buckets) and self.gradients[len(self._started)] is not None:
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
        grads, self.gradients[number] = self.gradients[number] or [None] * len(tensors), None
        scale = 1.0 / self._planned._divide_by
        # Only a rank without a gradient adds -0.0: if the sum is -0.0, no rank has a gradient.
        added = [
            torch.zeros_like(t).neg_() if g is None else g.new_zeros(()).add(g, alpha=scale)
            for t, g in zip(tensors, grads, strict=True)
        ]
        earlier = self._planned._earlier(number)
        added = [a if e is None else a + e for a, e in zip(added, earlier, strict=True)]
        self._lacks += [g is None and e is None for g, e in zip(grads, earlier, strict=True)]
        self._started.append(start_all_reduce(added, self._buckets[number][0]))


class _Tap(torch.autograd.Function):
    """The identity on a bucket; its backward gives the gradients to `_EarlySums`, and none to its inputs."""

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
        own = {i: torch.zeros_like(tensors[i]) if (grad := grads[i]) is None else grad for i in places}
        started = {i: start_all_reduce([grad], group) for i, grad in own.items()}
        for i, pending in started.items():
            (sums[i],) = pending.wait()
    return sums
