"""Checkpoints of converted models, under transformers' names: `export_state_dict`, `save_safetensors`,
`load_safetensors`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import TorchFunctionMode

from lancet_kernels.errors import UserError, class_name
from lancet_kernels.files import file_errors
from lancet_kernels.layer.expert_layer import ExpertLayer
from lancet_kernels.layer.expert_states import adapter_tensors, experts_by_global_id
from lancet_kernels.ops.comm.groups import from_first_rank, group_name, group_rank
from lancet_kernels.ops.comm.waiting import waiting
from lancet_kernels.parallelization.square_layer import whole_parameters, whole_state_dict

_QUANTIZED = ("U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4")
"""Quantized dtypes in safetensors files; their scales are separate tensors."""
_PACKED = {"weight_packed": "compressed-tensors", "qweight": "GPTQ or AWQ"}
"""Names of packed tensors, with several weights in each element, and their formats."""


@dataclass(frozen=True)
class LoadReport:
    """The differences between a checkpoint and a model. Printable."""

    new: tuple[str, ...]
    """Parameters that are not in the checkpoint, initialized anew."""
    left: tuple[str, ...]
    """Tensors of the checkpoint that are no parameters of the model."""

    def __str__(self) -> str:
        lines = [f"initialized anew: {', '.join(self.new)}"] if self.new else []
        lines += [f"left in the checkpoint: {', '.join(self.left)}"] if self.left else []
        return "\n".join(lines) or "all weights loaded"


def export_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict that the model would have without `convert`, with its current weights; bitwise.

    Every rank gathers all experts, and PEFT's adapters of them, collective over the expert group; for a
    sharded model (`fsdp`, `parallelize`, `parallelize_linears`) all parameters, collective over all its
    ranks. On one rank, `model.save_pretrained(folder, state_dict=state)` writes a checkpoint that
    transformers loads.

    Args: model: after `convert`; for any other one the whole `model.state_dict()`.
    Raises: CommunicationError, UserError for adapters that all experts of a rank share.
    """
    for name, _, place in adapter_tensors(model):
        if place.form == "own":
            raise UserError(
                f"export of {name}",
                got=f"an adapter of the {place.layer.local_experts} experts of this rank together",
                expected="adapters with a part for each expert",
                do="merge it into the experts first: model.merge_and_unload()",
            )
    whole = {name: _whole(name, value) for name, value in whole_state_dict(model).items()}
    for names, shard in experts_by_global_id(model):
        whole |= dict(zip(names, _whole(names[0], shard), strict=True))
    return _as_peft_has_it(model, whole)


def _as_peft_has_it(model: nn.Module, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with PEFT's layout of the adapters of all experts."""
    places = ((name, place) for name, _, place in adapter_tensors(model) if name in whole)
    return whole | {name: place.part(whole[name], place.form) for name, place in places}


def _whole(name: str, value: Tensor) -> Tensor:
    """A tensor of which each rank has a part, gathered; others as they are."""
    if not isinstance(value, DTensor):
        return value
    mesh, placements = value.device_mesh, value.placements
    with waiting(f"export of {name}", mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD):
        is_cut = any(p.is_shard(1) and ranks > 1 for p, ranks in zip(placements, mesh.shape, strict=True))
        if value.dim() < 3 or not is_cut:
            return value.full_tensor()
        # Experts that FSDP shards, one at a time: `full_tensor` would hold the whole parameter twice.
        own = value.to_local()
        whole = own.new_empty(value.shape)
        for row, part in enumerate(own.split(1)):
            gathered = DTensor.from_local(part, mesh, placements, run_check=False).full_tensor()
            whole.unflatten(0, (-1, len(own)))[:, row] = gathered
        return whole


@torch.no_grad()
def save_safetensors(model: nn.Module, folder: str | Path) -> None:
    """Write a checkpoint of the original model, which `from_pretrained` loads, with the current weights;
    bitwise.

    Collective over all ranks. The first one writes a file per layer: beside its part of the model it holds
    one whole layer, and the others one whole parameter.

    Args: model: a model of transformers, after `convert`, and `fsdp` if it is sharded. folder: created.
    Raises: UserError for another model, for one with adapters, and on all ranks where the first one cannot
    write; CommunicationError.
    """
    own = cast(Any, model)
    if hasattr(model, "get_base_model") or any("base_layer" in m._modules for m in model.modules()):
        raise UserError(
            "model to save",
            got=f"a {type(model).__name__} with adapters",
            expected="a model of transformers without any",
            do=f"save model.merge_and_unload(), or the adapters: {_OF_ADAPTERS}",
        )
    _check_is_of_transformers("model to save", model)
    # Tied parameters are saved under their first names.
    tied = dict(model.named_parameters(remove_duplicate=False)).keys() - dict(model.named_parameters()).keys()
    layers: dict[str, dict[str, Tensor]] = {}
    for name, value in model.state_dict().items():
        if name not in tied:
            layers.setdefault(_layer_of(name), {})[name] = value
    partitioned = whole_parameters(model)
    writes, folder = group_rank(group_name(None)) == 0, Path(folder)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(layers.values(), 1):
        whole = {}
        for name, value in tensors.items():
            gathered = partitioned[name]() if name in partitioned else _whole(name, value)
            if writes:
                whole[name] = gathered.cpu()
            del gathered
        with _on_first_rank(folder):
            if writes:
                file = f"model-{number:05d}-of-{len(layers):05d}.safetensors"
                weight_map |= dict.fromkeys(_write(own, whole, folder / file), file)
    own.config.architectures = [class_name(model)]
    own.config.dtype = str(own.dtype).removeprefix("torch.")  # `from_pretrained` loads in this one
    with _on_first_rank(folder):
        if writes:
            index = {"metadata": {}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
            for old in {path.name for path in folder.iterdir()} - {*weight_map.values()}:
                if re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors", old):
                    (folder / old).unlink()  # it would be loaded in place of these
            own.config.save_pretrained(folder)
            if own.can_generate():
                own.generation_config.save_pretrained(folder)


@contextmanager
def _on_first_rank(folder: Path) -> Iterator[None]:
    """The block writes on the first rank; the others leave it when that has. Collective over all ranks.

    Raises: UserError on all of them for an error in the block.
    """
    failure = None
    try:
        with file_errors(folder):
            yield
    except UserError as error:
        failure = error
    except Exception as error:
        do = "see the error of the first rank"
        failure = UserError("checkpoint to write", got=repr(error), expected=f"files in {folder}", do=do)
        failure.__cause__ = error
    failure = from_first_rank(failure, group_name(None), "what was written of a checkpoint")
    if failure is not None:
        raise failure


def _check_is_of_transformers(what: str, model: nn.Module) -> None:
    if not hasattr(model, "save_pretrained") or not hasattr(model, "config"):
        raise UserError(
            what,
            got=class_name(model),
            expected="a model of transformers",
            do="give the model inside of it, or use torch.distributed.checkpoint on its state_dict()",
        )


def _layer_of(name: str) -> str:
    """Example: `model.layers.3.mlp.gate.weight` -> `model.layers.3`; "" outside of lists of layers."""
    layer = re.match(r"(.*?\.\d+)\.", name)
    return layer[1] if layer else ""


def _write(model: Any, whole: dict[str, Tensor], path: Path) -> list[str]:
    """Write the tensors in the original's format. -> their names there."""
    from transformers.core_model_loading import revert_weight_conversion

    with _Views(), _whole_parameters(model, whole):
        tensors = revert_weight_conversion(model, whole)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_file(tensors, path)
    return list(tensors)


@contextmanager
def _whole_parameters(model: Any, whole: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which the model gives whole parameters, of whose shapes transformers' conversions ask."""
    model.get_parameter = lambda name: (
        whole[name] if name in whole else type(model).get_parameter(model, name)
    )
    try:
        yield
    finally:
        del model.get_parameter


class _Views(TorchFunctionMode):
    """Lets parts of a tensor stay views until they are written."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), by_name: Any = None) -> Any:
        return arguments[0] if function is Tensor.contiguous else function(*arguments, **(by_name or {}))


def _write_file(tensors: dict[str, Tensor], path: Path) -> None:
    """As `safetensors.torch.save_file`, but without contiguous copies of all tensors at once."""
    from safetensors.torch import _TYPES

    dtypes = {dtype: name for name, dtype in _TYPES.items()}
    # The widest dtypes first, so that all are aligned.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered.items():
        start, end = end, end + tensor.nbytes
        own = {"dtype": dtypes[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [start, end]}
        header[name] = own
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # The model's parameters may be memory-mapped from a file of this name, which must stay.
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in ordered.values():
                for part in [tensor] if tensor.is_contiguous() else tensor:
                    file.write(part.contiguous().view(-1).view(torch.uint8).numpy().data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_safetensors(
    model: nn.Module, folder: str | Path, *, device: torch.device | str = "cpu"
) -> LoadReport:
    """Read the weights of a converted model from a checkpoint of the original, by transformers' own loader.

    Every rank reads only its own part, so a model that was built and converted on the meta device is never
    complete in the memory of one rank. Parameters that are not in the checkpoint (a new head) are initialized
    by transformers: seed the ranks alike. Not collective.

    Experts in MXFP4, as in GPT-OSS, are dequantized to the model's dtype, a parameter at a time.

    Args: folder: as save_pretrained writes it, or a download. device: for parameters on the meta device.
    Raises: UserError (no such folder, other quantized weights, shapes that differ, experts that are missing).
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    _check_is_of_transformers("model to load", model)
    own, dequantized = cast(Any, model), _dequantizing(model)
    mapping: list[Any] = [*get_model_conversion_mapping(own), *dequantized]
    files = _files(Path(folder), {name for converter in dequantized for name in converter.source_patterns})
    before = dict(model.named_parameters(remove_duplicate=False))
    config = LoadStateDictConfig(
        pretrained_model_name_or_path=str(folder), device_map={"": device},
        weight_mapping=mapping, ignore_mismatched_sizes=True,
    )  # fmt: skip
    try:
        info, _ = own._load_pretrained_model(own, None, files, config)
        experts = {name for name, module in model.named_modules() if isinstance(module, ExpertLayer)}
        wrong = [f"{name} {list(shape)}, not {list(own)}" for name, shape, own in info.mismatched_keys]
        wrong += [f"no {name}" for name in info.missing_keys if name.rpartition(".")[0] in experts]
        if wrong := sorted([*wrong, *info.conversion_errors]):
            raise UserError(
                f"checkpoint {folder}", got=wrong[0], expected=f"the weights of a {class_name(model)}",
                do="check that it is a checkpoint of this model",
            )  # fmt: skip
        info = own._finalize_model_loading(own, config, info)
        if any(converter.was_used() for converter in dequantized):  # so that it is saved dequantized
            own._weight_conversions = [c for c in own._weight_conversions if c not in dequantized]
            own.config.__dict__.pop("quantization_config", None)
    finally:
        _into_own_memory(model, before)
    return LoadReport(tuple(sorted(info.missing_keys)), tuple(sorted(info.unexpected_keys)))


def _dequantizing(model: nn.Module) -> list[Any]:
    """Converters that dequantize a model's experts from MXFP4; none where these have another layout, or
    transformers cannot do it."""
    try:
        from transformers.core_model_loading import WeightConverter
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    except ImportError:
        return []
    layers = [layer for layer in model.modules() if isinstance(layer, ExpertLayer)]
    if not layers or not all(getattr(layer, "is_transposed", False) for layer in layers):
        return []
    operation = cast(Any, _Dequantized(convert_moe_packed_tensors))
    names = sorted({name for layer in layers for name in layer.expert_names() if name.endswith("_proj")})
    return [WeightConverter([f"{n}_blocks", f"{n}_scales"], n, [operation]) for n in names]


@dataclass(frozen=True)
class _Dequantized:
    """An operation of transformers' loader: blocks [L, H, G, 16] of two elements a byte, and their scales
    [L, H, G], to [L, G * 32, H]. transformers' own operation needs a model with a quantizer."""

    function: Callable[..., Tensor]

    def convert(
        self, tensors: dict[str, list[Tensor]], full_layer_name: str, model: nn.Module, **_: object
    ) -> dict[str, Tensor]:
        (blocks,), (scales,) = (tensors[name] for name in sorted(tensors))
        dtype = model.get_parameter(full_layer_name).dtype
        return {full_layer_name: self.function(blocks, scales, dtype=dtype)}


def _files(folder: Path, dequantized: set[str]) -> list[str]:
    """The safetensors files of a checkpoint. Args: dequantized: last parts of the names of tensors that may
    be quantized. Raises: UserError for no files, and for other quantized weights."""
    from safetensors import safe_open

    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted({*json.loads(index.read_text())["weight_map"].values()})
    elif single.exists():
        names = [single.name]
    else:
        raise UserError(
            "checkpoint",
            got=f"{folder} without {single.name} and {index.name}",
            expected="a folder that save_pretrained wrote",
            do="give the folder of the original model",
        )
    for name in names:
        with safe_open(folder / name, "pt") as opened:
            for key in opened.keys():  # noqa: SIM118 (it is no dict)
                dtype, own = opened.get_slice(key).get_dtype(), key.rpartition(".")[2]
                if own not in dequantized and (dtype in _QUANTIZED or own in _PACKED):
                    by = _quantization(folder) or _PACKED.get(own, "")
                    raise UserError(
                        f"{key} in the checkpoint", got=f"{dtype}, quantized{f' by {by}' if by else ''}",
                        expected="unquantized weights",
                        do="load it with from_pretrained and dequantize it, then convert the model",
                    )  # fmt: skip
    return [str(folder / name) for name in names]


def _quantization(folder: Path) -> str:
    """Quantization method and format in the configuration of a checkpoint."""
    path = folder / "config.json"
    config = (json.loads(path.read_text()) if path.exists() else {}).get("quantization_config") or {}
    return ", ".join(str(config[key]) for key in ("quant_method", "format") if key in config)


@torch.no_grad()
def _into_own_memory(model: nn.Module, before: dict[str, nn.Parameter]) -> None:
    """Copy the loader's new parameters into those that were on a device, which take their places again."""
    for name, old in before.items():
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        new = module.get_parameter(own)
        new.requires_grad_(old.requires_grad)
        if new is not old and not old.is_meta:
            old.copy_(new)
            module.register_parameter(own, old)


_OF_ADAPTERS = (
    "call state = export_state_dict(model) on every rank, and "
    "model.save_pretrained(folder, state_dict=state) on one"
)


def guard_save_pretrained(model: nn.Module) -> None:
    """Let `save_pretrained` and `push_to_hub` of a converted model refuse to write a part of the experts."""
    for module in model.modules():
        for child in module.children():
            _guard(module, "", child)


def _guard(module: nn.Module, _name: str, child: nn.Module | None) -> None:
    """The same for one module around experts, which `get_peft_model` may create after `convert`."""
    if child is None or not hasattr(type(module), "save_pretrained"):
        return
    if any(isinstance(layer, ExpertLayer) and layer.ranks > 1 for layer in child.modules()):
        own = cast(Any, module)
        own.save_pretrained, own.push_to_hub = partial(_save_pretrained, own), partial(_push_to_hub, own)


register_module_module_registration_hook(_guard)


def _save_pretrained(model: Any, *arguments: Any, **by_name: Any) -> Any:
    state = by_name.get("state_dict")
    if state is None or any(isinstance(value, DTensor) for value in state.values()):
        _refuse_parts(model, "save_pretrained", "state_dict=, with all of them")
        return type(model).save_pretrained(model, *arguments, **by_name)
    # A whole state dict, as torch.distributed.checkpoint.state_dict gathers it, say.
    by_name["state_dict"] = _as_peft_has_it(model, state)
    with _whole_parameters(model, state):
        return type(model).save_pretrained(model, *arguments, **by_name)


def _push_to_hub(model: Any, *arguments: Any, **by_name: Any) -> Any:
    _refuse_parts(model, "push_to_hub", "a folder with all of them", "; upload the folder")
    return type(model).push_to_hub(model, *arguments, **by_name)


def _refuse_parts(model: Any, method: str, expected: str, then: str = "") -> None:
    """Raise UserError if a method would write a part of the experts, or of their adapters."""
    what, do = "experts", "call save_safetensors(model, folder) on every rank"
    if hasattr(model, "get_base_model"):  # PEFT writes its adapters alone
        from peft import get_peft_model_state_dict

        written = [
            get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
            for name in model.peft_config
        ]
        if not any(isinstance(value, DTensor) for state in written for value in state.values()):
            return
        what, do = "adapters", _OF_ADAPTERS
    raise UserError(
        f"{method} of a converted {class_name(model)}",
        got=f"{what} that are on several ranks",
        expected=expected,
        do=f"{do}{then}",
    )
