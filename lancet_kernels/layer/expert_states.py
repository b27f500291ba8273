"""Experts in state dicts: each under its global id, independent of the ranks that save and load it.

    parameters of a rank   w1 [L, D, F]            L experts, stacked for the grouped GEMM
    state_dict()           experts.7.w1 [D, F]     a view of one of them; with a parametrized w1:
                           experts.7.parametrizations.w1.original0 [1, F]
    optimizer.state        exp_avg [L, D, F]       of the experts on this rank
    its state_dict()       exp_avg [E, D, F]       the same tensor as a DTensor, sharded by expert

Experts of converted models keep transformers' names: in state dicts their parameters are such DTensors, too.
So torch.distributed.checkpoint saves the experts and an optimizer's state of them, and loads both at any
number of ranks. Every optimizer gets its hooks in its first step.

Adapters around a layer, as PEFT's are, keep their names, and are such DTensors, too (`Place`):

    PEFT's lora_A [L * r, I]    [E * r, I]
    PEFT's lora_B [O, r * L]    [O, r, E]          the expert is the inner index, so it needs a dimension
    any other [L, ...]          [E, ...]
    any other shape [...]       [W, ...]           one of each rank: loads on as many ranks only
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Mapping
from functools import partial
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, NamedTuple, cast
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils.parametrize import is_parametrized
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lancet_kernels.errors import UserError
from lancet_kernels.ops.comm.collectives import shard_of
from lancet_kernels.ops.comm.groups import group_of, group_ranks

State = dict[str, Any]
Form = Literal["", "rows", "columns", "own"]
_OPTIMIZERS: WeakSet[Optimizer] = WeakSet()


class ShardedExperts(nn.Module):
    """A module that holds the experts `expert_ids()` of `num_experts` in parameters [L, ...], or
    [L * rows_per_expert(), ...]."""

    layers: ClassVar[WeakSet[ShardedExperts]] = WeakSet()
    """All instances in this process."""
    rank: int
    num_experts: int
    local_experts: int
    expert_group: str

    def __init__(self) -> None:
        super().__init__()
        self.layers.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a copy
        super().__setstate__(state)
        self.layers.add(self)

    def expert_names(self) -> list[str]:
        """Names of the parameters [L, ...] that hold the experts of this rank; parametrized ones, too."""
        raise NotImplementedError

    def expert_tensors(self) -> dict[str, Tensor]:
        """The parameters of experts by name; in place of a parametrized one, the tensors of its
        parametrizations."""
        tensors: dict[str, Tensor] = {}
        for name in self.expert_names():
            if is_parametrized(self, name):
                path = f"parametrizations.{name}"
                states = self.get_submodule(path).state_dict(keep_vars=True)
                tensors |= {f"{path}.{n}": t for n, t in states.items() if isinstance(t, Tensor)}
            else:
                tensors[name] = self.get_parameter(name)
        return tensors

    def expert_ids(self) -> range:
        """Global ids of the experts on this rank."""
        return range(self.rank * self.local_experts, (self.rank + 1) * self.local_experts)

    def rows_per_expert(self) -> int:
        return 1

    def has_rows(self, value: object, experts: int) -> bool:
        """Whether it is a tensor with the rows of so many experts."""
        return (
            isinstance(value, Tensor) and value.dim() > 0 and len(value) == experts * self.rows_per_expert()
        )


class ExpertsByGlobalId(ShardedExperts):
    """Experts that state dicts name one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(_by_global_id)

    @property
    def experts(self) -> _Experts:
        """The experts of this rank by their names in checkpoints, `experts.7.w1`, which
        torch.distributed.checkpoint.state_dict looks up as attributes."""
        return _Experts(self)

    def expert_names(self) -> list[str]:
        return [
            n for n in ("w1", "b1", "w2", "b2") if is_parametrized(self, n) or getattr(self, n) is not None
        ]

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        not_stacked = []
        for name, tensor in self.expert_tensors().items():
            keys = [f"{prefix}experts.{expert}.{name}" for expert in self.expert_ids()]
            if all(key in state_dict for key in keys):
                state_dict[prefix + name] = torch.stack([state_dict.pop(key) for key in keys])
            elif prefix + name not in state_dict:
                not_stacked.append(prefix + name)
                missing_keys += [key for key in keys if key not in state_dict]
                # An incomplete parameter stays as it is; its experts are not unexpected.
                for key in keys:
                    state_dict.pop(key, None)
                if "." in name:  # of a child, which would report it missing a second time
                    state_dict[prefix + name] = tensor.detach()
        # A full checkpoint also has the other ranks' experts, which are not unexpected.
        for key in [k for k in state_dict if k.startswith(prefix + "experts.")]:
            expert = key.removeprefix(prefix + "experts.").split(".")[0]
            if expert.isdigit() and int(expert) < self.num_experts and int(expert) not in self.expert_ids():
                del state_dict[key]
        own_missing: list[str] = []
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, own_missing, unexpected_keys, error_msgs
        )
        # `missing_keys` has experts under their global names.
        missing_keys += [key for key in own_missing if key not in not_stacked]


class ShardedModule(nn.Module):
    """A module that says how a rank's part of a parameter lies in the whole one. In state dicts parameters
    of which it has a part, and an optimizer's state of them, are DTensors; whole tensors load, too."""

    instances: ClassVar[WeakSet[ShardedModule]] = WeakSet()
    """All that there are in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.instances.add(self)
        self.register_state_dict_post_hook(_as_whole)
        self.register_load_state_dict_pre_hook(_as_own)

    def __setstate__(self, state: dict[str, Any]) -> None:  # of a copy
        super().__setstate__(state)
        self.instances.add(self)

    def names_in_states(self) -> dict[str, str]:
        """For each name in state dicts, the name here. A shared parameter has several in state dicts."""
        return {name: name for name, _ in self.named_parameters()}

    def layout(self, name: str) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
        """The ranks of a parameter and what they have of it; None: each has the whole."""
        raise NotImplementedError

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole parameter. Raises: UserError for another shape."""
        raise NotImplementedError

    def in_states(self, name: str, own: Tensor) -> Tensor:
        """A view of this rank's part with dimensions along which the ranks' parts concatenate."""
        return own

    def gathered(self, name: str, shards: DTensor) -> Tensor:
        """A whole parameter from other shards of it. Collective."""
        return shards.full_tensor()

    def whole(self, name: str, own: Tensor) -> Tensor:
        """This rank's part of a parameter, its gradient or optimizer state as a tensor of the whole model: a
        DTensor where it is sharded, else itself."""
        if own.dim() == 0:
            return own
        if (layout := self.layout(name)) is None:
            return self.in_states(name, own)
        what = f"state of {name}, which is sharded"
        if isinstance(own, DTensor):
            raise UserError(
                what,
                got="shards of this rank's part by fully_shard",
                expected="the part as one tensor",
                do="give fully_shard these parameters as ignored_params",
            )
        if own.shape != (shape := self.get_parameter(name).shape):
            raise UserError(
                what,
                got=list(own.shape),
                expected=f"the shape of this rank's part, {list(shape)}",
                do="use an optimizer whose state has the shape of the parameters",
            )
        return DTensor.from_local(self.in_states(name, own), *layout, run_check=False)

    def own(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a tensor of the whole model, a DTensor or not. Collective for a DTensor with
        other shards. Raises: UserError for another shape."""
        if isinstance(whole, DTensor):
            mesh, placements = self.layout(name) or (None, ())
            # On any device.
            if mesh and whole.placements == placements and whole.device_mesh.mesh.equal(mesh.mesh):
                return whole.to_local().view(self.get_parameter(name).shape)
            whole = self.gathered(name, whole)
        return whole if whole.dim() == 0 else self.part(name, whole)


def _as_whole(module: ShardedModule, state: State, prefix: str, _metadata: object) -> None:
    """Replace own parameters in a state dict by those of the whole model, each under all of its names."""
    names = module.names_in_states()
    own = {first: state.pop(prefix + first) for first in {*names.values()}}
    for name, first in names.items():
        _put(state, prefix + name, module.whole(first, own[first]))


def _as_own(module: ShardedModule, state: State, prefix: str, *_: object) -> None:
    """The inverse of `_as_whole`."""
    for name, first in module.names_in_states().items():
        if prefix + name in state:
            whole = state[prefix + name] if name == first else state.pop(prefix + name)
            state[prefix + first] = module.own(first, whole)


class Part(NamedTuple):
    """A parameter of such a module."""

    module: ShardedModule
    name: str


def save_as_shards(layer: ShardedExperts) -> None:
    """Make state dicts of the layer hold its parameters as DTensors with a row for each expert of all ranks;
    where one rank has all experts, as they are. Whole tensors load, too."""
    layer.layers.add(layer)
    layer.register_state_dict_post_hook(_with_shards)
    layer.register_load_state_dict_pre_hook(_with_own)


def _with_shards(module: nn.Module, state_dict: State, prefix: str, _metadata: object) -> None:
    for name, tensor, place in _placed(module):
        if (key := prefix + name) in state_dict:
            if not place.of_adapter:
                _check_rows(place.layer, state_dict[key], key)
            _put(state_dict, key, cast(Tensor, _as_shard(state_dict[key], tensor, place)))


def _put(state_dict: State, name: str, tensor: Tensor) -> None:
    """Shards refuse to be pickled (`torch.save`): the file would have one rank's part only."""
    state_dict[name] = tensor
    if isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1:
        tensor.__reduce_ex__ = partial(_refuse_pickle, name)  # type: ignore[method-assign]


def _with_own(module: nn.Module, state_dict: State, prefix: str, *_: object) -> None:
    for name, tensor, place in _placed(module):
        if (key := prefix + name) in state_dict:
            state_dict[key] = _own(state_dict[key], tensor, place)


# Worker processes of this rank may get them, as that of `async_save` does.
ForkingPickler.register(DTensor, lambda shard: DTensor.__reduce_ex__(shard, pickle.DEFAULT_PROTOCOL))


def _refuse_pickle(name: str, _protocol: object) -> None:
    raise UserError(
        f"{name} to pickle",
        got="a state dict of which each rank has a part",
        expected="whole tensors",
        do="use torch.distributed.checkpoint, or save_safetensors(model, folder) or export_state_dict(model) "
        "of lancet_kernels on every rank",
    )


def _check_rows(layer: ShardedExperts, value: Tensor, name: str) -> None:
    """Raise UserError unless a tensor has a row for each expert of this rank."""
    if not layer.has_rows(value, layer.local_experts):
        raise UserError(
            f"state of {name}",
            got=f"a tensor {tuple(value.shape)} that belongs to {layer.local_experts} experts together",
            expected=f"{layer.local_experts} rows, one for each expert of this rank",
            do="give it such rows, or call torch.nn.utils.parametrize.remove_parametrizations first",
        )


def _by_global_id(layer: ExpertsByGlobalId, state_dict: State, prefix: str, _metadata: object) -> None:
    """Name the experts of a state dict one by one. Raises: UserError for a tensor without a row for each."""
    for name in layer.expert_tensors():
        stacked = state_dict.pop(prefix + name)
        _check_rows(layer, stacked, prefix + name)
        for local, expert in enumerate(layer.expert_ids()):
            state_dict[f"{prefix}experts.{expert}.{name}"] = stacked[local]


class _Experts:
    def __init__(self, layer: ExpertsByGlobalId) -> None:
        self._layer = layer

    def __getattr__(self, expert: str) -> SimpleNamespace:
        ids = self._layer.expert_ids()
        if not expert.isdigit() or int(expert) not in ids:
            raise AttributeError(f"expert {expert}: this rank has {ids.start} to {ids.stop - 1}")
        root = SimpleNamespace()
        for path, tensor in self._layer.expert_tensors().items():
            *outer, name = path.split(".")
            parent = root
            for part in outer:
                parent = parent.__dict__.setdefault(part, SimpleNamespace())
            setattr(parent, name, tensor[ids.index(int(expert))])
        return root


class Place(NamedTuple):
    """The layout of this rank's part of a tensor in that of the whole expert group."""

    layer: ShardedExperts
    form: Form = "rows"
    """"rows": the expert is the outer index of dimension 0. "columns": [O, n * L], where it is the inner
    index of dimension 1. "own": no dimension counts experts."""
    of_adapter: bool = False

    def form_of(self, value: object, parameter: Tensor) -> Form:
        """The form of a state of a parameter, which may have another shape; "": the same on all ranks."""
        if not isinstance(value, Tensor) or not value.dim():
            return ""
        if not self.of_adapter:
            return "rows" if self.layer.has_rows(value, self.layer.local_experts) else ""
        return self.form if value.shape == parameter.shape else "own"

    def laid(self, part: Tensor, form: Form) -> Tensor:
        """A view of a rank's part with a dimension along which the ranks' parts concatenate."""
        if form == "columns":
            return part.unflatten(1, (-1, self.layer.local_experts))
        return part.unsqueeze(0) if form == "own" else part

    def part(self, laid: Tensor, form: Form) -> Tensor:
        """The inverse of `laid`."""
        if form == "columns":
            return laid.flatten(1)
        return laid.squeeze(0) if form == "own" else laid


def _dimension(form: Form) -> int:
    """The one along which the ranks' parts concatenate."""
    return 2 if form == "columns" else 0


def layer_below(module: nn.Module) -> nn.Module:
    """The module inside any number of adapters; one that is no adapter itself."""
    while (below := module._modules.get("base_layer")) is not None:
        module = below
    return module


def tensors_around(adapter: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of an adapter by name, without those of the module that it adapts."""
    tensors = [*adapter.named_parameters(), *adapter.named_buffers()]
    return {name: tensor for name, tensor in tensors if name.partition(".")[0] != "base_layer"}


def adapter_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor, Place]]:
    """Name, tensor and place of all parameters and buffers of adapters around the layers of a model."""
    for path, module in model.named_modules():
        for name, tensor, place in _placed(module):
            if place.of_adapter:
                yield f"{path}.{name}" if path else name, tensor, place


def experts_by_global_id(model: nn.Module) -> Iterator[tuple[list[str], DTensor]]:
    """The names of all experts in the state dicts of all ranks, and the tensor of which they are the rows;
    nothing where one rank has all."""
    for path, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, ExpertsByGlobalId):
            before = f"{path}." if path else ""
            for name, tensor, place in _placed(layer):
                names = [f"{before}experts.{expert}.{name}" for expert in range(layer.num_experts)]
                yield names, cast(DTensor, _as_shard(tensor.detach(), tensor, place))


def _placed(module: nn.Module) -> Iterator[tuple[str, Tensor, Place]]:
    """Name, tensor and place of those of one adapter, or of one layer's experts; none for other modules, and
    where one rank has all experts."""
    layer, adapted = layer_below(module), getattr(module, "parameter_name", "")
    # transformers saves the experts that it has divided itself.
    if not isinstance(layer, ShardedExperts) or layer not in layer.layers or not layer.expert_group:
        return
    if layer is module:
        yield from ((name, tensor, Place(layer)) for name, tensor in layer.expert_tensors().items())
        return
    if adapted not in layer.expert_names():
        return
    # PEFT adapts a parameter of two dimensions as one matrix: the adapter belongs to all experts together.
    is_by_expert = getattr(layer, adapted).dim() == 3
    for name, tensor in tensors_around(module).items():
        kind = name.partition(".")[0]
        form: Form = "rows" if layer.has_rows(tensor, layer.local_experts) else "own"
        if kind in ("lora_A", "lora_B"):
            form = "own" if not is_by_expert else "rows" if kind == "lora_A" else "columns"
        yield name, tensor, Place(layer, form, of_adapter=True)


class _Adapter:
    """The state dict hook of an adapter around a layer; a copy of the adapter gets its own."""

    adapters: ClassVar[WeakSet[_Adapter]] = WeakSet()
    """All instances in this process."""

    def __init__(self, module: nn.Module) -> None:
        self.module = ref(module)
        self.adapters.add(self)

    def __getstate__(self) -> nn.Module | None:
        return self.module()

    def __setstate__(self, module: nn.Module) -> None:
        self.__init__(module)  # type: ignore[misc]

    def __call__(self, module: nn.Module, state_dict: State, prefix: str, metadata: object) -> None:
        _with_shards(module, state_dict, prefix, metadata)


def _hook_adapter(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if name != "base_layer" or child is None or not isinstance(layer_below(child), ShardedExperts):
        return
    if not any(isinstance(hook, _Adapter) for hook in module._state_dict_hooks.values()):
        module.register_state_dict_post_hook(_Adapter(module))
        module.register_load_state_dict_pre_hook(_with_own)


register_module_module_registration_hook(_hook_adapter)


def save_states_as_shards(optimizer: Optimizer, *_of_step: object) -> None:
    """From now on state dicts of the optimizer hold such DTensors. Its first step does it, which some make
    their state before."""
    if torch.compiler.is_compiling() or optimizer in _OPTIMIZERS:
        return
    places = _places(optimizer)
    for parameter, place in places.items():
        if isinstance(place, Place):
            _check_sharding(place.layer, parameter)
    _OPTIMIZERS.add(optimizer)
    optimizer.register_state_dict_post_hook(partial(_changed, change=_as_shard))
    optimizer.register_load_state_dict_pre_hook(partial(_changed, change=_own))
    # State that was loaded before the first step.
    for parameter, place in places.items():
        state = optimizer.state.get(parameter, {})
        state.update({key: _own(value, parameter, place) for key, value in state.items()})


register_optimizer_step_pre_hook(save_states_as_shards)


def _check_sharding(layer: ShardedExperts, parameter: Tensor) -> None:
    """Raise UserError for experts that `fully_shard` took for parts of the same ones."""
    if not isinstance(parameter, DTensor):
        return
    ranks = {*group_ranks(layer.expert_group)}.intersection(parameter.device_mesh.mesh.flatten().tolist())
    if len(ranks) > 1:
        raise UserError(
            "experts to train",
            got=f"fully_shard over ranks {sorted(ranks)}, which hold different experts",
            expected="sharding over ranks that hold the same experts",
            do="make the model anew and shard it with lancet_kernels.fsdp",
        )


def _places(optimizer: Optimizer) -> dict[Tensor, Place | Part]:
    """The places of an optimizer's parameters: of experts, none where one rank has all, and of sharded
    modules."""
    parameters = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    adapters = [module for adapter in _Adapter.adapters if (module := adapter.module()) is not None]
    places: dict[Tensor, Place | Part] = {
        parameter: Part(module, name)
        for module in ShardedModule.instances
        for name, parameter in module.named_parameters()
    }
    for module in (*ShardedExperts.layers, *adapters):
        places |= {tensor: place for _, tensor, place in _placed(module)}
    return {tensor: place for tensor, place in places.items() if tensor in parameters}


def _changed(optimizer: Optimizer, state_dict: State, change: Any) -> State:
    """A copy of the state dict with `change` applied to the states of these."""
    places, states = _places(optimizer), dict(state_dict["state"])
    # Not strict: torch itself checks afterwards whether the state dict is one of this optimizer.
    for group, named in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        for parameter, name in zip(group["params"], named["params"], strict=False):
            if parameter in places and isinstance(states.get(name), Mapping):
                place = places[parameter]
                states[name] = {key: change(value, parameter, place) for key, value in states[name].items()}
    return {**state_dict, "state": states}


def _as_shard(value: object, parameter: Tensor, place: Place | Part) -> object:
    """A tensor of this rank's experts as a DTensor of all experts; likewise of a sharded module."""
    if isinstance(place, Part):
        return place.module.whole(place.name, value) if isinstance(value, Tensor) else value
    form = place.form_of(value, parameter)
    if not form:
        return value
    assert isinstance(value, Tensor)
    if isinstance(value, DTensor):  # sharded over the ranks that hold the same experts, too
        mesh, placements = _with_experts(value, form)
        return DTensor.from_local(place.laid(value.to_local(), form), mesh, placements, run_check=False)
    kind = "cpu" if value.is_meta else value.device.type
    mesh = DeviceMesh.from_group(group_of(place.layer.expert_group), kind)
    return DTensor.from_local(place.laid(value, form), mesh, [Shard(_dimension(form))], run_check=False)


def _own(value: object, parameter: Tensor, place: Place | Part) -> object:
    """The inverse of `_as_shard`, also of whole tensors. Collective for a DTensor with other shards."""
    if isinstance(place, Part):
        if not isinstance(value, Tensor):
            return value
        # Factored states have fewer elements.
        is_whole = value.shape != parameter.shape and value.numel() >= parameter.numel()
        return place.module.own(place.name, value) if isinstance(value, DTensor) or is_whole else value
    if isinstance(parameter, DTensor):
        return _own_shard(value, parameter, place)
    if isinstance(value, DTensor):
        forms: tuple[Form, ...] = (place.form, "own")
        for form in forms:
            own = place.part(value.to_local(), form)
            if value.placements == (Shard(_dimension(form)),) and form == place.form_of(own, parameter):
                return own
        value = value.full_tensor()
    part = _part_of_whole(value, parameter, place)
    return value if part is None else part


def _own_shard(value: object, parameter: DTensor, place: Place) -> object:
    """The same for experts that are sharded over the ranks that hold the same ones."""
    mesh, placements = _with_experts(parameter, place.form)
    if isinstance(value, DTensor) and (value.device_mesh, value.placements) == (mesh, placements):
        own = place.part(value.to_local(), place.form)
    else:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        part = _part_of_whole(whole, parameter, place)
        if part is None:
            return value
        own = distribute_tensor(part, parameter.device_mesh, parameter.placements).to_local()
    return DTensor.from_local(own, parameter.device_mesh, parameter.placements, run_check=False)


def _part_of_whole(whole: object, parameter: Tensor, place: Place) -> Tensor | None:
    """This rank's part of a tensor of all experts; None for any other value."""
    if not isinstance(whole, Tensor) or not whole.dim():
        return None
    layer, dim = place.layer, _dimension(place.form)
    if place.of_adapter:
        shape = [*place.laid(parameter, place.form).shape]
        shape[dim] *= layer.num_experts // layer.local_experts
        if whole.numel() != math.prod(shape):
            return None
        whole = whole.reshape(shape)  # PEFT's own files have another shape
    elif not layer.has_rows(whole, layer.num_experts):
        return None
    return place.part(shard_of(whole, dim, layer.expert_group), place.form)


def _with_experts(shard: DTensor, form: Form) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """The mesh of all ranks and the placements of the tensor of all experts, from this rank's shard."""
    mesh = shard.device_mesh
    root = mesh._get_root_mesh()
    (name,) = mesh.mesh_dim_names or ("",)
    (placement,) = shard.placements
    if form == "own" and isinstance(placement, Shard):
        placement = Shard(placement.dim + 1)
    names = root.mesh_dim_names or ()
    return root, tuple(placement if other == name else Shard(_dimension(form)) for other in names)
