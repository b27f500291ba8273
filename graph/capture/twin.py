"""A twin of a model after `fully_shard`, to be captured: the same modules without FSDP's hooks, with whole
parameters that have a shape but no memory.

The twin shares buffers and attributes with the model; `Twin.update` copies what was assigned since. The casts
that FSDP's hooks make (`MixedPrecisionPolicy`) are hooks of the twin, and so part of the captured graph.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lancet_kernels.graph.capture.fsdp_parameters import (
    FLAGS,
    ShardedParameter,
    hook_numbers,
    is_sharded,
    own_class,
    policies,
    sharded_parameters,
    units,
)
from lancet_kernels.graph.capture.trace import Assumptions
from lancet_kernels.ops.comm.groups import FORWARD_OF, Groups, group_ranks

_BEFORE, _BEHIND = "_forward_pre_hooks", "_forward_hooks"
_WITH_KWARGS = "_forward_pre_hooks_with_kwargs"
_HOOKS = (_BEFORE, _BEHIND, _WITH_KWARGS)
_OWN = ("_modules", "_parameters", *_HOOKS)
"""Attributes of a module that its twin has for itself."""
_CAST = -1
"""The number of a hook that casts; torch counts its own from 0."""


class Twin:
    """The twin of a model, and what is sharded of it.

    Attributes: module: the twin. parameters: those that are sharded. names: by any name of a sharded
    parameter (tied weights have several), its first one. groups: by the name under which its communication
    has costs, a group that is none of `Groups`.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[ShardedParameter]) -> None:
        self.parameters, self._units = tuple(parameters), units(model)
        self.reshard()
        first: dict[Tensor, str] = {p.parameter: p.name for p in parameters}
        every = model.named_parameters(remove_duplicate=False)
        self.groups: dict[str, str] = {}
        self.names = {name: first[p] for name, p in every if p in first}
        whole: dict[Tensor, nn.Parameter] = {p.parameter: _without_memory(p) for p in parameters}
        self._twins = {module: object.__new__(own_class(module)) for module in model.modules()}
        self._forwards = {
            module: module.__dict__[FORWARD_OF](twin)
            for module, twin in self._twins.items()
            if FORWARD_OF in module.__dict__
        }
        self._of_fsdp = hook_numbers(model)
        self._hooks: dict[nn.Module, tuple[tuple[int, ...], ...]] = {}
        """The numbers of a module's hooks when its twin got them."""
        self._casts = {module: _casts(policy) for module, policy in policies(model).items()}
        for module, twin in self._twins.items():
            own = {name: whole.get(p, p) if p is not None else None for name, p in module._parameters.items()}
            children = {n: None if m is None else self._twins[m] for n, m in module._modules.items()}
            hooks: dict[str, Any] = {kind: OrderedDict() for kind in _HOOKS}
            twin.__dict__.update(_parameters=own, _modules=children, **hooks)
        self.update()
        self.module = self._twins[model]

    def update(self) -> None:
        """Give the twin the attributes and hooks that the model has now."""
        for module, twin in self._twins.items():
            mine, theirs = twin.__dict__, module.__dict__
            own = {name: mine[name] for name in _OWN}
            # Whole dicts at once: this is part of every call of a plan.
            mine.update(theirs)
            mine.update(own)
            for name in FLAGS:
                mine.pop(name, None)
            if len(mine) != len(theirs) - sum(name in theirs for name in FLAGS):
                for name in mine.keys() - theirs.keys():
                    del mine[name]
            if getattr(theirs.get("forward"), "__self__", None) is module:
                mine["forward"] = MethodType(theirs["forward"].__func__, twin)
            if module in self._forwards:
                mine["forward"] = self._forwards[module]
            numbers = tuple(tuple(theirs[kind]) for kind in _HOOKS)
            if self._hooks.get(module) != numbers:
                self._hooks[module] = numbers
                self._update_hooks(module, mine, theirs)

    def _update_hooks(self, module: nn.Module, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
        casts = self._casts.get(module, {})
        for kind in (_BEFORE, _BEHIND):
            users = {n: hook for n, hook in theirs[kind].items() if n not in self._of_fsdp}
            own = {_CAST: casts[kind]} if kind in casts else {}
            mine[kind].clear()
            # FSDP's come first before a forward, and last behind it.
            mine[kind].update({**own, **users} if kind == _BEFORE else {**users, **own})
        mine[_WITH_KWARGS].clear()
        mine[_WITH_KWARGS].update({n: True for n in mine[_BEFORE] if n == _CAST or n in theirs[_WITH_KWARGS]})

    def reshard(self) -> None:
        """Free what FSDP has left gathered: the outermost module's parameters after a forward without
        gradients."""
        for unit in self._units:
            if not unit.is_sharded:
                unit.reshard()

    def shards(self) -> dict[str, Tensor]:
        """By every name, this rank's shard, as a function of the parameter."""
        shards = {p.name: p.shard() for p in self.parameters}
        return {name: shards[first] for name, first in self.names.items()}

    def watched(self, assumptions: Callable[[], Assumptions]) -> Callable[[], TwinAssumptions]:
        """The assumptions of the twin's trace, as ones about the model."""
        return lambda: TwinAssumptions(self, assumptions())


class TwinAssumptions(Assumptions):
    """As `Assumptions`: what the trace of a twin assumes, compared with what its model is now."""

    def __init__(self, twin: Twin, assumptions: Assumptions) -> None:
        self._twin, self._assumptions = twin, assumptions

    def hold(self, _model: nn.Module) -> bool:
        """Is everything as it was when the twin was traced?"""
        self._twin.update()
        return self._assumptions.hold(self._twin.module)

    def broken(self, _model: nn.Module) -> str:
        """The first assumption that no longer holds."""
        return self._assumptions.broken(self._twin.module)


def _without_memory(parameter: ShardedParameter) -> nn.Parameter:
    # As FSDP's own while they are not gathered: a storage without bytes.
    whole = torch.empty(parameter.shape, dtype=parameter.compute_dtype, device=parameter.parameter.device)
    whole.untyped_storage().resize_(0)
    return nn.Parameter(whole, requires_grad=parameter.parameter.requires_grad)


def _casts(policy: Any) -> dict[str, Any]:
    """By kind of hook, the cast that FSDP would make there."""
    casts: dict[str, Any] = {}
    if policy.param_dtype is not None and policy.cast_forward_inputs:
        casts[_BEFORE] = lambda _module, args, by_name: _cast((args, by_name), policy.param_dtype)
    if policy.output_dtype is not None:
        casts[_BEHIND] = lambda _module, _args, output: _cast(output, policy.output_dtype)
    return casts


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def one(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return pytree.tree_map_only(Tensor, one, values)


def twin_of(model: nn.Module, groups: Groups) -> Twin | None:
    """The twin of a model that FSDP shards; None for any other one.

    Args: groups: whose communicators are used where a mesh of FSDP has the same ranks. That of a mesh may be
        the one of the all-to-alls, too, in whose queue gathers would wait.
    """
    if not is_sharded(model):
        return None
    own = {tuple(group_ranks(name)): name for name in (groups.replica, groups.data)}

    def or_own(name: str) -> str:
        return own.get(tuple(group_ranks(name)), name)

    parameters = sharded_parameters(model)
    twin = Twin(model, [replace(p, group=or_own(p.group), replicas=or_own(p.replicas)) for p in parameters])
    for parameter in twin.parameters:
        for name, group in (("shards", parameter.group), ("copies", parameter.replicas)):
            if group and group not in own.values():
                twin.groups[name] = group
    return twin
