"""The optimizer's step of some parameters, as an instruction of the backward: it runs when their gradients
are summed, while the sums of others travel.

    optimizer_step(number, optimizer, parameters, gradients)      in a graph that is planned
    run_optimizer_step(...)                                       in its place in one that runs

The op itself measures: it steps copies. What runs steps the parameters by their own optimizer, whose state,
groups and learning rates stay where they are. Parameters without a place in the graph are stepped at the end
of the backward.
"""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lancet_kernels.errors import UserError
from lancet_kernels.ops.comm.accumulated import Accumulation

_IN_BACKWARD: WeakSet[Optimizer] = WeakSet()
"""Optimizers whose steps are part of a backward."""
_STEPPING: WeakSet[Optimizer] = WeakSet()
"""Optimizers that a backward steps right now."""
_STEPS: WeakValueDictionary[int, BucketSteps] = WeakValueDictionary()
"""By the number by which a graph refers to it."""


class BucketSteps:
    """Steps an optimizer bucket by bucket, in the backward that sums the gradients.

    Attributes:
        number: by which a graph refers to it. kind: the optimizer in words; what differs takes other times.
        states: numbers that it keeps for each number of a parameter.

    Raises: UserError for an optimizer that must see all parameters at once.
    """

    def __init__(self, optimizer: Optimizer, accumulation: Accumulation) -> None:
        self._optimizer, self._accumulation = optimizer, accumulation
        self.states = _states_of(optimizer)
        self.kind = _kind(optimizer)
        self.number = max(_STEPS, default=-1) + 1
        _STEPS[self.number] = self
        self._buckets: list[tuple[Tensor, ...]] = []
        self._numbers: dict[tuple[str, ...], int] = {}
        self._paused, self._task, self._call = False, -1, object()
        self._stepped: set[Tensor] = set()
        self._count = 0
        self._copies: dict[int, tuple[Optimizer, list[Tensor]]] = {}
        if optimizer not in _IN_BACKWARD:
            _IN_BACKWARD.add(optimizer)
            optimizer.register_step_pre_hook(_refuse_other_steps)

    def trains(self, parameter: Tensor) -> bool:
        """Is it one of the optimizer's parameters?"""
        return any(parameter is one for group in self._optimizer.param_groups for one in group["params"])

    def bucket(self, parameters: Mapping[str, Tensor]) -> int:
        """The number of a bucket; the same for the same names."""
        names = tuple(parameters)
        if names not in self._numbers:
            self._numbers[names] = len(self._buckets)
            self._buckets.append(tuple(parameters.values()))
        return self._numbers[names]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which backwards do not step."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @property
    def _is_due(self) -> bool:
        return self._accumulation.sums and not self._paused

    def watch(self, results: Iterable[Tensor]) -> None:
        """Step at the end of the backward that begins at these results of one call, too.

        That backward raises a UserError if parameters were stepped since the call, or if it goes through
        another call.
        """
        call, count = object(), self._count
        for result in results:
            result.register_hook(lambda _: self._begin(call, count))

    def _begin(self, call: object, count: int) -> None:
        if not self._is_due:
            return
        task = torch._C._current_graph_task_id()
        if (task, call) == (self._task, self._call):
            return
        if task == self._task or count != self._count:
            raise UserError(
                "backward with optimizer=",
                got="two calls of the optimized module in one backward"
                if task == self._task
                else "a call that was made before the optimizer's last step",
                expected="one call for each backward, and a backward for each call",
                do="use microbatches() or no_sync() for all but the last, or call optimizer.step() yourself",
            )
        self._task, self._call = task, call
        self.begin()
        Variable._execution_engine.queue_callback(self.finish)

    def begin(self) -> None:
        """At the start of a backward."""
        self._stepped.clear()

    @torch.no_grad()
    def step(self, bucket: int, gradients: Sequence[Tensor]) -> None:
        """Step the parameters of a bucket with these gradients, and with what their `.grad` has."""
        if not self._is_due:
            return
        parameters = self._buckets[bucket]
        before = [parameter.grad for parameter in parameters]
        try:
            for parameter, gradient, earlier in zip(parameters, gradients, before, strict=True):
                own = _like(parameter, gradient)
                parameter.grad = own if earlier is None else earlier + own
            self._step(parameters)
        finally:
            for parameter, earlier in zip(parameters, before, strict=True):
                parameter.grad = earlier

    def finish(self) -> None:
        """At the end of a backward that sums: step what was not."""
        if not self._is_due:
            return
        every = [p for group in self._optimizer.param_groups for p in group["params"]]
        self._step([p for p in every if p not in self._stepped and p.grad is not None])
        self._count += 1

    def _step(self, parameters: Sequence[Tensor]) -> None:
        if not parameters:
            return
        optimizer = self._optimizer
        groups = optimizer.param_groups
        optimizer.param_groups = _groups_with(groups, dict(zip(parameters, parameters, strict=True)))
        _STEPPING.add(optimizer)
        try:
            optimizer.step()
        finally:
            _STEPPING.discard(optimizer)
            optimizer.param_groups = groups
        self._stepped.update(parameters)

    @torch.no_grad()
    def rehearse(self, bucket: int, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Step copies of the parameters, which change nothing: to be measured."""
        if bucket not in self._copies:
            copies = [parameter.detach().clone() for parameter in parameters]
            instead = dict(zip(self._buckets[bucket], copies, strict=True))
            self._copies[bucket] = _copy_of(self._optimizer, instead), copies
        optimizer, copies = self._copies[bucket]
        for one, gradient in zip(copies, gradients, strict=True):
            one.grad = gradient
        optimizer.step()

    def end_rehearsal(self) -> None:
        """Free the copies."""
        self._copies.clear()


def steps_in_backward(parameters: Iterable[Tensor]) -> bool:
    """Is the step of any of these parameters part of a backward?"""
    given = set(parameters)
    return any(p in given for o in _IN_BACKWARD for group in o.param_groups for p in group["params"])


def _refuse_other_steps(optimizer: Optimizer, _arguments: object, _by_name: object) -> None:
    if optimizer not in _STEPPING:
        raise UserError(
            "optimizer.step()",
            got="a second step: backward has stepped this optimizer (optimize(..., optimizer=))",
            expected="one step for each backward that sums gradients",
            do="leave step() out, or leave out optimizer= (a GradScaler, or clipping, needs that)",
        )


def _groups_with(groups: Sequence[dict[str, Any]], instead: Mapping[Tensor, Tensor]) -> list[dict[str, Any]]:
    """The groups with what stands in place of some of their parameters, without the others."""
    chosen = [{**g, "params": [instead[p] for p in g["params"] if p in instead]} for g in groups]
    return [group for group in chosen if group["params"]]


def _copy_of(optimizer: Optimizer, instead: Mapping[Tensor, Tensor]) -> Optimizer:
    """An optimizer of the same kind for other tensors, without state and hooks."""
    one = copy.copy(optimizer)
    one.state = defaultdict(dict)
    one.param_groups = _groups_with(optimizer.param_groups, instead)
    return one


def _states_of(optimizer: Optimizer) -> int:
    """Numbers that an optimizer keeps for each number of a parameter. Raises: UserError as `BucketSteps`."""
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    if optimizer not in _IN_BACKWARD and any(hooks):
        raise _refusal(optimizer, "hooks of step(), which would run for each bucket")
    instead = {
        group["params"][0]: torch.zeros(2, 3, dtype=p.dtype, device=p.device)
        for group in optimizer.param_groups
        for p in group["params"][:1]
    }
    try:
        one = _copy_of(optimizer, instead)
        for parameter in instead.values():
            parameter.grad = torch.zeros_like(parameter)
        before = [_values(group) for group in one.param_groups]
        one.step()
    except Exception as error:
        raise _refusal(optimizer, f"a step of one parameter fails: {error}") from error
    if before != [_values(group) for group in one.param_groups] or not set(one.state) <= set(
        instead.values()
    ):
        raise _refusal(optimizer, "a state of its own beside those of its parameters")
    shape = torch.Size((2, 3))
    kept = [v for state in one.state.values() for v in state.values() if getattr(v, "shape", None) == shape]
    return len(kept) // max(1, len(instead))


def _values(group: Mapping[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in group.items() if name != "params"}


def _refusal(optimizer: Optimizer, got: str) -> UserError:
    return UserError(
        f"optimizer {type(optimizer).__name__}",
        got=got,
        expected="one that steps each parameter by itself, as SGD, Adam and AdamW do",
        do="leave optimizer= out, and call optimizer.step() after the backward",
    )


def _kind(optimizer: Optimizer) -> str:
    """Example: `AdamW(amsgrad=True, foreach=False)`."""
    options = {
        f"{name}={value}"
        for group in optimizer.param_groups
        for name, value in group.items()
        if isinstance(value, bool)
    }
    return f"{type(optimizer).__name__}({', '.join(sorted(options))})"


def _like(parameter: Tensor, gradient: Tensor) -> Tensor:
    """A gradient as that of a parameter: of a sharded one, this rank's shard, which may be padded."""
    if not isinstance(parameter, DTensor):
        return gradient
    local = gradient[tuple(slice(size) for size in parameter.to_local().shape)]
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


@torch.library.custom_op("lancet::optimizer_step", mutates_args=("parameters",))
def optimizer_step(
    number: int, bucket: int, optimizer: str, parameters: list[Tensor], gradients: list[Tensor]
) -> None:
    """Step copies of the parameters of a bucket, as long as the parameters would take.

    Args: number, bucket, optimizer: `BucketSteps.number`, `bucket` and `kind`.
    """
    _STEPS[number].rehearse(bucket, parameters, gradients)


@optimizer_step.register_fake
def _(number, bucket, optimizer, parameters, gradients):
    return None


def run_optimizer_step(
    number: int, bucket: int, _kind: str, _parameters: Sequence[Tensor], gradients: Sequence[Tensor]
) -> None:
    """Step the parameters of a bucket."""
    _STEPS[number].step(bucket, gradients)
