"""Checks at each call of an optimized module that the assumptions of its plan still hold.

    a temporary change (a mode, a shape, autocast)                     the module runs without its plan a
    permanent change (parameters, wrappers around the module)        an error, because results would be wrong

The assumptions are those of the trace (`graph.trace`), and further ones in this file that a trace does not
have.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lancet_kernels.errors import UserError
from lancet_kernels.graph.trace import Assumptions
from lancet_kernels.layer_checks import check_data_parallel
from lancet_kernels.model_layers import moe_layers

Arguments = tuple[tuple[object, ...], dict[str, object]]
"""Arguments of a call: by position, and by name."""

OTHER_SHAPE = "inputs of another shape"
"""The reason for which only a shape differs from what was planned (`planned_shapes`)."""


def bind(
    signature: inspect.Signature, what: str, inputs: Sequence[object], by_name: Mapping[str, object]
) -> Arguments:
    """The arguments of a call in a canonical form: by position where the forward allows it, without those
    that equal their default.

    Raises: UserError if they do not fit the signature.
    """
    try:
        bound = signature.bind(*inputs, **by_name)
    except TypeError as error:
        raise UserError(
            f"inputs of {what}", got=error, expected=f"forward{signature}", do="give what the module takes"
        ) from None
    for name, value in list(bound.arguments.items()):
        if value is signature.parameters[name].default:
            del bound.arguments[name]
    return bound.args, dict(sorted(bound.kwargs.items()))


def example_arguments(model: nn.Module, example_inputs: Sequence[object] | Mapping[str, object]) -> Arguments:
    """Example inputs, a tuple by position or a dict by name, as arguments for a capture.

    Raises: UserError if they do not fit the signature of the forward.
    """
    by_name = example_inputs if isinstance(example_inputs, Mapping) else {}
    by_position = () if isinstance(example_inputs, Mapping) else example_inputs
    return to_trace(bind(inspect.signature(model.forward), type(model).__name__, by_position, by_name))


def to_trace(arguments: Arguments) -> Arguments:
    """The same values in tensors for a capture.

    They are dense, because a graph contains strides, and those of a slice differ from those of a new tensor.
    They are distinct, because in the graph of a module that gets the same tensor twice only one of the two is
    read.
    """
    seen: set[int] = set()

    def alone(tensor: Tensor) -> Tensor:
        if id(tensor) in seen:
            tensor = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        seen.add(id(tensor))
        return _with_strides(tensor, _dense_strides(tensor))

    return pytree.tree_map_only(Tensor, alone, arguments)


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    return torch.empty_like(tensor, device="meta").stride()


def _with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    if tensor.stride() == strides:
        return tensor
    strided = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return strided.copy_(tensor)


class PlannedInputs:
    """The inputs that the plan is valid for: their structure, the values of numbers, and for each tensor its
    shape, dtype, device, strides and requires_grad."""

    def __init__(self, arguments: Arguments) -> None:
        leaves, self._structure = pytree.tree_flatten(arguments)
        self._leaves = [_description(leaf) for leaf in leaves]
        self._strides = [leaf.stride() if isinstance(leaf, Tensor) else None for leaf in leaves]

    def reason(self, arguments: Arguments) -> str:
        """Why the plan is not valid for these arguments; "" if it is."""
        leaves, structure = pytree.tree_flatten(arguments)
        if [_description(leaf) for leaf in leaves] == self._leaves and structure == self._structure:
            return ""
        if structure != self._structure:
            return "inputs with another structure"
        for leaf, planned in zip(leaves, self._leaves, strict=True):
            if isinstance(leaf, Tensor) != isinstance(planned[0], torch.Size):
                return "inputs with another structure"
            if not isinstance(leaf, Tensor) and _description(leaf) != planned:
                return "another number among the inputs"
        what = ("shape", "dtype", "device", "requires_grad")
        others = {
            what[i]
            for leaf, planned in zip(leaves, self._leaves, strict=True)
            for i, (mine, theirs) in enumerate(zip(_description(leaf), planned, strict=True))
            if mine != theirs
        }
        other = next((other for other in what[1:] if other in others), None)
        return f"inputs of another {other}" if other else OTHER_SHAPE

    def laid_out(self, arguments: Arguments) -> Arguments:
        """The same values, with the strides that the plan is valid for."""
        leaves, structure = pytree.tree_flatten(arguments)
        laid = [
            leaf if strides is None else _with_strides(leaf, strides)
            for leaf, strides in zip(leaves, self._strides, strict=True)
        ]
        return pytree.tree_unflatten(laid, structure) if any(map(_differ, laid, leaves)) else arguments


def _differ(one: object, other: object) -> bool:
    return one is not other


def _description(leaf: object) -> tuple:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), leaf


class Guards:
    """The assumptions of the plan of `module`.

    Args:
        arguments: the example inputs.
        sums_gradients: does the plan sum gradients over the ranks?
    """

    def __init__(
        self, module: nn.Module, assumptions: Assumptions, arguments: Arguments, sums_gradients: bool
    ) -> None:
        self.inputs = PlannedInputs(arguments)
        self._module, self._assumptions, self._sums_gradients = module, assumptions, sums_gradients
        self._training = module.training
        self._autocast, self._dtype = _autocast(module), torch.get_default_dtype()
        self._own = _own_calls(module)
        self._state = {
            name: (parameter, parameter.requires_grad, _kind(parameter))
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }
        modules = list(module.modules())
        self._attributes: list[tuple[Mapping[str, object], str, object]] = [
            (m._parameters, n, p) for m in modules for n, p in m._parameters.items()
        ]
        self._attributes += [(m._modules, n, child) for m in modules for n, child in m._modules.items()]
        self._trainable = [(p, p.requires_grad) for p in module.parameters()]

    def reason(self, arguments: Arguments) -> str:
        """Why this call must run without the plan; "" if it can use the plan.

        Raises: UserError if the module's parameters have changed, or a wrapper would make its gradients
        wrong.
        """
        self.refuse_wrappers()
        self.refuse_other_parameters()
        reason = self._reason(arguments)
        if reason:
            self.refuse_other_kinds()
        return reason

    def _reason(self, arguments: Arguments) -> str:
        module = self._module
        if module.training != self._training:
            return f"the module is in {'training' if module.training else 'evaluation'} mode"
        if (now := _autocast(module)) != self._autocast:
            return f"autocast is {_autocast_text(now)}, was {_autocast_text(self._autocast)}"
        if torch.get_default_dtype() is not self._dtype:
            return f"the default dtype is {torch.get_default_dtype()}, was {self._dtype}"
        if _own_calls(module) != self._own:
            return f"the hooks or the forward of {type(module).__name__} itself"
        if not self._assumptions.hold(module):
            return f"no longer so: {self._assumptions.broken(module) or 'an assumption of the trace'}"
        # Last: inputs of another shape can run with the plan if that is all.
        return self.inputs.reason(arguments)

    def for_inputs(self, arguments: Arguments, assumptions: Assumptions) -> Guards:
        """The same guards for other inputs, with the assumptions of their trace."""
        guards = copy.copy(self)
        guards.inputs, guards._assumptions = PlannedInputs(arguments), assumptions
        return guards

    def refuse_wrappers(self) -> None:
        """Raise UserError inside a DistributedDataParallel that would sum gradients a second time, or sum the
        gradients of different experts."""
        wrapper = DistributedDataParallel._active_ddp_module
        if wrapper is None:
            return
        if self._sums_gradients:
            raise UserError(
                f"DistributedDataParallel around the optimized {type(self._module).__name__}",
                got="gradients that are summed over the ranks twice",
                expected="one sum",
                do="leave DistributedDataParallel out, or optimize(..., reduce_gradients=False)",
            )
        for layer in moe_layers(self._module):
            check_data_parallel(layer)

    def refuse_other_parameters(self) -> None:
        """Raise UserError if parameters were replaced, added or removed, or their requires_grad has
        changed."""
        for owner, name, value in self._attributes:
            if owner.get(name) is not value:
                self._compare_parameters()
                break
        for parameter, trained in self._trainable:
            if parameter.requires_grad is not trained:
                self._compare_parameters()

    def _compare_parameters(self) -> None:
        refuse_sharded(self._module)
        now = dict(self._module.named_parameters(remove_duplicate=False))
        for name in [*self._state, *now]:
            if name not in now:
                raise self._changed(f"no {name}", f"the {name} that was there")
            parameter = now[name]
            planned, trained, _ = self._state.get(name, (None, None, None))
            if planned is None:
                raise self._changed(f"a new parameter {name}", "the parameters that were there")
            if parameter is not planned:
                raise self._changed(f"another tensor as {name}", "the one that was there")
            if parameter.requires_grad is not trained:
                raise self._changed(f"{name} with requires_grad={parameter.requires_grad}", trained)

    def refuse_other_kinds(self) -> None:
        """Raise UserError if a parameter's dtype, device, shape or strides have changed."""
        for name, (parameter, _, planned) in self._state.items():
            for mine, theirs in zip(_kind(parameter), planned, strict=True):
                if mine != theirs:
                    raise self._changed(f"{name} with {mine}", theirs)

    def _changed(self, got: str, expected: object) -> UserError:
        return UserError(
            f"parameters of the optimized {type(self._module).__name__}",
            got=got,
            expected=f"{expected}, as at optimize()",
            do="change the model first, then call optimize() again",
        )


def _kind(parameter: Tensor) -> tuple[object, ...]:
    return parameter.dtype, parameter.device, list(parameter.shape), parameter.stride()


def _own_calls(module: nn.Module) -> tuple[object, ...]:
    """The hooks and the forward of the module itself, which are not part of the trace."""
    everywhere = nn.modules.module
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
        everywhere._global_forward_hooks,
        everywhere._global_forward_pre_hooks,
        everywhere._global_backward_hooks,
        everywhere._global_backward_pre_hooks,
    )
    return (*(list(h.values()) for h in hooks), type(module), module.__dict__.get("forward"))


def _autocast(module: nn.Module) -> tuple[tuple[str, torch.dtype], ...]:
    """The device types for which autocast is on, with its dtype."""
    kinds = {"cpu", next(module.parameters()).device.type}
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in sorted(kinds) if _autocasts(kind))


def _autocasts(kind: str) -> bool:
    return kind != "meta" and torch.is_autocast_enabled(kind)


def _autocast_text(autocast: tuple[tuple[str, torch.dtype], ...]) -> str:
    return ", ".join(f"{dtype} on {kind}" for kind, dtype in autocast) or "off"


def refuse_sharded(module: nn.Module) -> None:
    """Raise UserError for parameters that FSDP, DistributedDataParallel or DTensor distribute over ranks."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    name_of_model = type(module).__name__
    for name, part in module.named_modules():
        if isinstance(part, (FSDPModule, FullyShardedDataParallel)):
            raise UserError(
                f"model {name_of_model}",
                got=f"{name or 'the model'} sharded by FSDP, whose hooks torch cannot trace",
                expected="whole parameters on every rank",
                do="leave FSDP out (optimize() sums the gradients), or train without optimize()",
            )
        if isinstance(part, DistributedDataParallel):
            raise UserError(
                f"model {name_of_model}",
                got=f"DistributedDataParallel around {name or 'it'}",
                expected="the model that it wraps",
                do="give optimize() the plain model; it sums the gradients",
            )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise UserError(
                f"model {name_of_model}",
                got=f"{name} as a DTensor (tensor parallel)",
                expected="plain tensors",
                do="leave tensor parallelism out, or train without optimize()",
            )
