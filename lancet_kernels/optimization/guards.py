"""A plan's assumptions about its model, checked before planning and at each call of the optimized module.

    before planning        a model that no plan can train                  an error
    at a call, temporary   another mode, other shapes, autocast            the module runs without its plan
    at a call, for good    other parameters, a wrapper around the module   an error: results would be wrong

The assumptions are those of the trace (`graph.capture.trace`), and further ones in this file.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Mapping, Sequence
from operator import is_not
from typing import Any
from weakref import ref

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from lancet_kernels.errors import UserError, check_type, class_name
from lancet_kernels.graph.capture.capture import hooks_of
from lancet_kernels.graph.capture.fsdp_parameters import ShardedParameter, sharded_parameters
from lancet_kernels.graph.capture.trace import Assumptions
from lancet_kernels.layer.expert_layer import check_data_parallel
from lancet_kernels.layer.gradients import ranks_that_hold
from lancet_kernels.layer.model_layers import moe_layers
from lancet_kernels.ops.comm.groups import Groups, group_size

Arguments = tuple[tuple[object, ...], dict[str, object]]
"""Arguments of a call: by position, and by name."""

_NUMBERS = (bool, int, float, complex, str)

OTHER_SHAPE = "inputs of another shape"
"""The reason if only shapes differ from those of the plan (`optimized_module`)."""


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
        default = signature.parameters[name].default
        if value is default or (type(value) in _NUMBERS and _description(value) == _description(default)):
            del bound.arguments[name]
    return bound.args, dict(sorted(bound.kwargs.items()))


def example_arguments(model: nn.Module, example_inputs: Sequence[object] | Mapping[str, object]) -> Arguments:
    """Example inputs, a tuple by position or a dict by name, as arguments for a capture.

    Raises: UserError if they do not fit the signature of the forward.
    """
    signature, name = inspect.signature(model.forward), class_name(model)
    return to_trace(bind(signature, name, *as_arguments(example_inputs)))


def as_arguments(inputs: Sequence[object] | Mapping[str, object]) -> Arguments:
    """Inputs, a tuple by position or a dict by name, as arguments.

    Raises: UserError for a tensor: its rows would become the arguments.
    """
    if isinstance(inputs, Tensor):
        raise UserError(
            "inputs of a step",
            got="a tensor",
            expected="a tuple by position, or a dict by name",
            do="write (x,)",
        )
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})


def to_trace(arguments: Arguments) -> Arguments:
    """The same values in tensors for a capture: dense, because a graph contains strides, and those of a slice
    are not those of a new tensor; distinct, because a graph reads only one of two inputs that are the same
    tensor; not of `torch.inference_mode`, which autograd cannot save."""
    ids: set[int] = set()

    def prepared(tensor: Tensor) -> Tensor:
        if id(tensor) in ids or tensor.is_inference():
            tensor = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        ids.add(id(tensor))
        return _with_strides(tensor, torch.empty_like(tensor, device="meta").stride())

    return pytree.tree_map_only(Tensor, prepared, arguments)


def _with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    if tensor.stride() == strides:
        return tensor
    strided = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return strided.copy_(tensor)


class PlannedInputs:
    """The inputs that the plan is valid for: their structure, numbers, and kinds of tensors."""

    def __init__(self, arguments: Arguments) -> None:
        leaves, self._structure = pytree.tree_flatten(arguments)
        self._leaves = [_description(leaf) for leaf in leaves]
        self._strides = [leaf.stride() if isinstance(leaf, Tensor) else None for leaf in leaves]

    def reason(self, arguments: Arguments) -> str:
        """Why the plan is not valid for these arguments; "" if it is."""
        flat, structure = pytree.tree_flatten(arguments)
        leaves = [_description(leaf) for leaf in flat]
        if leaves == self._leaves and structure == self._structure:
            return ""
        if structure != self._structure or [*map(len, leaves)] != [*map(len, self._leaves)]:
            return "inputs with another structure"
        others = [pair for pair in zip(leaves, self._leaves, strict=True) if pair[0] != pair[1]]
        if any(len(mine) == 2 for mine, _ in others):
            return "another number among the inputs"
        for i, what in enumerate(("dtype", "device", "requires_grad"), 1):
            if any(mine[i] != planned[i] for mine, planned in others):
                return f"inputs of another {what}"
        return OTHER_SHAPE

    def laid_out(self, arguments: Arguments) -> Arguments:
        """The same values, with the strides that the plan is valid for."""
        leaves, structure = pytree.tree_flatten(arguments)
        laid = [
            leaf if strides is None else _with_strides(leaf, strides)
            for leaf, strides in zip(leaves, self._strides, strict=True)
        ]
        return pytree.tree_unflatten(laid, structure) if any(map(is_not, laid, leaves)) else arguments


def _description(leaf: object) -> tuple:
    """What a plan fixes of an input: four properties of a tensor, two of any other value."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), leaf


class Guards:
    """The assumptions of the plan of `module`, to which they hold no reference.

    Args:
        arguments: the example inputs.
        sums_gradients: whether the plan sums gradients over the ranks.
        by: the function that made the plan, for messages.
        kinds: dicts of `nn.Module` whose entries may not be replaced.
    """

    def __init__(
        self,
        module: nn.Module,
        assumptions: Assumptions,
        arguments: Arguments,
        sums_gradients: bool,
        by: str = "optimize",
        kinds: Sequence[str] = ("_modules", "_parameters"),
    ) -> None:
        self.inputs = PlannedInputs(arguments)
        self._name, self._by = f"the {by}d {class_name(module)}", f"{by}()"
        self._module, self._assumptions, self._sums_gradients = ref(module), assumptions, sums_gradients
        self._training = module.training
        self._devices = {"cpu", next(module.parameters()).device.type}
        self._autocast, self._dtype = _autocast(self._devices), torch.get_default_dtype()
        self._own = _own_calls(module)
        self._kinds = kinds
        self._state = {
            name: (ref(tensor), tensor.requires_grad, _kind(tensor)) for name, tensor in self._named(module)
        }
        self._held = [
            (ref(owner), kind, name, None if value is None else ref(value))
            for owner in module.modules()
            for kind in kinds
            for name, value in getattr(owner, kind).items()
        ]

    def reason(self, arguments: Arguments) -> str:
        """Why this call must run without the plan; "" if it can use the plan.

        Raises: UserError as `refuse_changes`.
        """
        self.refuse_changes()
        module = self._module()
        # Shapes last: if nothing else differs, inputs of another shape can run with a plan.
        reason = self._mode(module) or self.inputs.reason(arguments)
        if reason:
            self._refuse_other_kinds()
        return reason

    def refuse_changes(self) -> None:
        """Raise UserError for changed parameters, or a wrapper that would make their gradients wrong."""
        module = self._module()
        if module is None:
            return
        self._refuse_wrappers(module)
        if any(map(_replaced, self._held)):
            self._compare_state(module)
        for name, (tensor, trained, _) in self._state.items():
            now = tensor()
            if now is not None and now.requires_grad is not trained:
                raise self._changed(f"{name} with requires_grad={now.requires_grad}", trained)

    def _mode(self, module: nn.Module | None) -> str:
        """A temporary difference from the trace; "" if there is none."""
        if module is not None and module.training != self._training:
            return f"the module is in {'training' if module.training else 'evaluation'} mode"
        if (now := _autocast(self._devices)) != self._autocast:
            return f"autocast is {_autocast_text(now)}, was {_autocast_text(self._autocast)}"
        if torch.get_default_dtype() is not self._dtype:
            return f"the default dtype is {torch.get_default_dtype()}, was {self._dtype}"
        if module is None:
            return ""
        if _own_calls(module) != self._own:
            return f"the hooks or the forward of {class_name(module)} itself"
        if not self._assumptions.hold(module):
            return f"no longer so: {self._assumptions.broken(module) or 'an assumption of the trace'}"
        return ""

    def for_inputs(self, arguments: Arguments, assumptions: Assumptions) -> Guards:
        """The same guards for other inputs, with the assumptions of their trace."""
        guards = copy.copy(self)
        guards.inputs, guards._assumptions = PlannedInputs(arguments), assumptions
        return guards

    def _refuse_wrappers(self, module: nn.Module) -> None:
        """Raise UserError in a DistributedDataParallel that sums gradients again, or those of experts."""
        wrapper = DistributedDataParallel._active_ddp_module
        if wrapper is None:
            return
        if self._sums_gradients:
            raise UserError(
                f"DistributedDataParallel around {self._name}",
                got="gradients that are summed over the ranks twice",
                expected="one sum",
                do="leave it out (it may stay after optimize(..., reduce_gradients=False))",
            )
        for layer in moe_layers(module):
            check_data_parallel(layer)

    def _named(self, module: nn.Module) -> list[tuple[str, Tensor]]:
        """The tensors that may not be replaced, by all of their names."""
        named: list[tuple[str, Tensor]] = [*module.named_parameters(remove_duplicate=False)]
        if "_buffers" in self._kinds:
            named += module.named_buffers(remove_duplicate=False)
        return named

    def _compare_state(self, module: nn.Module) -> None:
        """Raise UserError if parameters were replaced, added or removed."""
        refuse_sharded(module)
        now = dict(self._named(module))
        for name in [*self._state, *now]:
            if name not in now:
                raise self._changed(f"no {name}", f"the {name} that was there")
            if name not in self._state:
                raise self._changed(f"a new tensor {name}", "those that were there")
            if now[name] is not self._state[name][0]():
                raise self._changed(f"another tensor as {name}", "the one that was there")

    def _refuse_other_kinds(self) -> None:
        """Raise UserError if a parameter's dtype, device, shape or strides have changed."""
        for name, (tensor, _, planned) in self._state.items():
            now = tensor()
            for mine, theirs in zip(planned if now is None else _kind(now), planned, strict=True):
                if mine != theirs:
                    raise self._changed(f"{name} with {mine}", theirs)

    def _changed(self, got: str, expected: object) -> UserError:
        return UserError(
            f"parameters of {self._name}",
            got=got,
            expected=f"{expected}, as at {self._by}",
            do=f"change the model first, then call {self._by} again",
        )


def _replaced(held: tuple[ref[nn.Module], str, str, ref[Any] | None]) -> bool:
    """Whether a parameter, buffer or submodule of a module is another one than at the plan."""
    owner, kind, name, value = held
    module = owner()
    return module is None or getattr(module, kind).get(name) is not (None if value is None else value())


def _kind(parameter: Tensor) -> tuple[object, ...]:
    return parameter.dtype, parameter.device, list(parameter.shape), parameter.stride()


def _own_calls(module: nn.Module) -> tuple[object, ...]:
    """The hooks and the forward of the module itself, which are not part of the trace."""
    everywhere = nn.modules.module
    hooks = (
        *hooks_of(module),
        everywhere._global_forward_hooks,
        everywhere._global_forward_pre_hooks,
        everywhere._global_backward_hooks,
        everywhere._global_backward_pre_hooks,
    )
    return (*(list(h.values()) for h in hooks), type(module), module.__dict__.get("forward"))


def _autocast(devices: Collection[str]) -> tuple[tuple[str, torch.dtype], ...]:
    """The device types for which autocast is on, with its dtype."""
    return tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in sorted(devices)
        if kind != "meta" and torch.is_autocast_enabled(kind)
    )


def _autocast_text(autocast: tuple[tuple[str, torch.dtype], ...]) -> str:
    return ", ".join(f"{dtype} on {kind}" for kind, dtype in autocast) or "off"


def check_model(model: nn.Module) -> None:
    """Raise UserError for a model that no plan can train: without parameters, with parameters that no
    gradient can reach, or distributed over ranks by a wrapper."""
    check_type("model", model, nn.Module, "a torch.nn.Module whose forward returns the loss")
    name = f"model {class_name(model)}"
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise UserError(
            name,
            got="torch.compile around it",
            expected="the model that it wraps",
            do='give optimize() the plain model, and inner_compile="inductor" to compile its ops',
        )
    parameters = dict(model.named_parameters())
    if not parameters:
        raise UserError(
            name,
            got="no parameters",
            expected="a training step, which trains some",
            do="give the module that holds the model and its loss, or call this one as it is",
        )
    for parameter_name, parameter in parameters.items():
        if is_lazy(parameter):
            raise UserError(
                name,
                got=f"{parameter_name}, a lazy parameter without a shape",
                expected="parameters with values",
                do="call the model once before",
            )
        if parameter.is_inference():
            raise UserError(
                name,
                got=f"{parameter_name} as a tensor of torch.inference_mode(), which cannot be trained",
                expected="parameters made outside of it",
                do="build the model outside of torch.inference_mode()",
            )
    refuse_sharded(model)


def check_shards(model: nn.Module, sharded: Sequence[ShardedParameter], groups: Groups) -> None:
    """Raise UserError for parameters that are sharded over other ranks than those that hold the same ones."""
    holders = ranks_that_hold(model, groups) if sharded else {}
    for one in sharded:
        same = group_size(holders[model.get_parameter(one.name)])
        ranks = group_size(one.group) * group_size(one.replicas)
        if ranks != same:
            raise UserError(
                f"model {class_name(model)}",
                got=f"{one.name} sharded over {ranks} ranks",
                expected=f"the {same} ranks that hold the same values",
                do="shard the model with lancet_kernels.fsdp, or give optimize() the groups",
            )


def refuse_sharded(module: nn.Module) -> None:
    """Raise UserError for parameters that DistributedDataParallel or the first FSDP distribute over ranks, or
    DTensors of anything but `fully_shard`."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    name_of_model = class_name(module)
    for name, part in module.named_modules():
        if isinstance(part, FullyShardedDataParallel):
            raise UserError(
                f"model {name_of_model}",
                got=f"{name or 'the model'} in a FullyShardedDataParallel",
                expected="sharding by fully_shard, which leaves the modules as they are",
                do="use torch.distributed.fsdp.fully_shard, or train without optimize()",
            )
        if isinstance(part, DistributedDataParallel):
            raise UserError(
                f"model {name_of_model}",
                got=f"DistributedDataParallel around {name or 'it'}",
                expected="the model that it wraps",
                do="give optimize() the plain model; it sums the gradients",
            )
    sharded = {one.parameter for one in sharded_parameters(module)}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and parameter not in sharded:
            raise UserError(
                f"model {name_of_model}",
                got=f"{name} as a DTensor (tensor parallel)",
                expected="plain tensors, or parameters that fully_shard has sharded",
                do="leave tensor parallelism out, or train without optimize()",
            )
