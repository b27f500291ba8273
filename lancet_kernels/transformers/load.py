"""`load_safetensors`: fill a converted model from a checkpoint of the original, each rank its own experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lancet_kernels.errors import UserError
from lancet_kernels.transformers.block import ConvertedMoE
from lancet_kernels.transformers.layouts import Layout, stack_experts


class _Files:
    """The tensors of a folder's safetensors files, read by name when asked for; a file is opened once."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._opened: dict[str, Any] = {}
        index = self.folder / "model.safetensors.index.json"
        single = self.folder / "model.safetensors"
        if index.exists():
            self.file_of = json.loads(index.read_text())["weight_map"]
        elif single.exists():
            self.file_of = dict.fromkeys(self._open(single.name).keys(), single.name)
        else:
            raise UserError(
                "checkpoint",
                got=f"{self.folder} without {single.name} and {index.name}",
                expected="a folder that save_pretrained wrote",
                do="give the folder of the original model",
            )

    def read(self, name: str, row: int | None = None) -> Tensor:
        """A tensor, or one row of it. Raises: UserError for a name that no file has, and for float8."""
        if name not in self.file_of:
            raise UserError(
                f"checkpoint {self.folder}",
                got=f"no tensor {name}",
                expected="all weights of the model",
                do="check that it is a checkpoint of this model",
            )
        opened = self._open(self.file_of[name])
        value = opened.get_tensor(name) if row is None else opened.get_slice(name)[row]
        if value.dtype.itemsize == 1:
            raise UserError(
                f"{name} in the checkpoint", got=value.dtype, expected="unquantized weights",
                do="convert the checkpoint to bfloat16 first",
            )  # fmt: skip
        return value

    def _open(self, file: str) -> Any:
        from safetensors import safe_open

        if file not in self._opened:
            self._opened[file] = safe_open(self.folder / file, "pt")
        return self._opened[file]


@torch.no_grad()
def load_safetensors(model: nn.Module, folder: str | Path, *, device: torch.device | str = "cpu") -> None:
    """Read the weights of a converted model from a checkpoint of the original, in the dtypes of the model.

    Every rank reads only what it holds, so a model that was built and converted on the meta device is never
    complete in the memory of one rank. Not collective.

    Args: folder: as save_pretrained writes it. device: the device for parameters that are on the meta device.
    Raises: UserError (no such folder, a tensor that is missing or quantized). Weights that were read before
    the error stay loaded.
    """
    files = _Files(folder)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, ConvertedMoE)}
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    for prefix, module in list(model.named_modules()):
        if isinstance(module, ConvertedMoE):
            _load_experts(files, prefix, module, device)
            continue
        _restore_computed_buffers(module, prefix, device)
        for own, value in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            name = f"{prefix}.{own}" if prefix else own
            if own in module._non_persistent_buffers_set or (name in tied and name not in files.file_of):
                continue
            _assign(module, own, files.read(_name_in_files(name, layers)), value, device)
    if tied:
        cast(Any, model).tie_weights()


def _load_experts(files: _Files, prefix: str, layer: ConvertedMoE, device: torch.device | str) -> None:
    experts = _name_in_files(f"{prefix}.block.experts", {prefix: layer})
    layout: Layout = layer.family.in_files
    for weight in layout.weights:
        own = stack_experts(
            layout, lambda name, row: files.read(f"{experts}.{name}", row), weight, layer.expert_ids()
        )
        _assign(layer, weight, own, getattr(layer, weight), device)


def _name_in_files(name: str, layers: dict[str, ConvertedMoE]) -> str:
    """Example: model.layers.0.mlp.block.gate.weight -> model.layers.0.block_sparse_moe.gate.weight."""
    for prefix, layer in layers.items():
        if name.startswith(f"{prefix}.block."):
            parent = prefix.rpartition(".")[0]
            return f"{parent}.{layer.family.block_in_files}.{name.removeprefix(prefix + '.block.')}"
    return name


def _assign(module: nn.Module, name: str, value: Tensor, old: Tensor, device: torch.device | str) -> None:
    """Copy into the old value, or replace it if it is on the meta device."""
    if not old.is_meta:
        old.copy_(value)
    elif name in module._buffers:
        module._buffers[name] = value.to(device, old.dtype)
    else:
        setattr(module, name, nn.Parameter(value.to(device, old.dtype), old.requires_grad))


def _restore_computed_buffers(module: nn.Module, prefix: str, device: torch.device | str) -> None:
    """Buffers that no checkpoint has, such as rotary frequencies, are those of a new module."""
    names = [n for n in module._non_persistent_buffers_set if getattr(module, n).is_meta]
    if not names:
        return
    if not hasattr(module, "config"):
        raise UserError(
            f"buffers of {prefix}", got=f"{', '.join(names)} on the meta device",
            expected="buffers that are computed from the module's config",
            do="build the model with its buffers on a device",
        )  # fmt: skip
    with torch.device(device):
        new = type(module)(module.config)
    for name in names:
        module._buffers[name] = getattr(new, name)
