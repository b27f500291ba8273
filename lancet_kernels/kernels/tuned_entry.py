"""One tuned configuration of a kind of kernel, for a shape and a device, with its source."""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from typing import Any

import torch

MEASURED = "measured"

Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class Kind:
    """A kind of kernel: its configuration (a dataclass of a module beside this one), and the names of the
    components of its shape."""

    config: str
    names: tuple[str, ...]


KINDS = {
    "permute": Kind("moe.row_config.RowConfig", ("width",)),
    "combine": Kind("moe.row_config.RowConfig", ("width",)),
    "routing": Kind("moe.topk.RoutingConfig", ("experts", "top_k", "key_bits")),
    "overlap": Kind("overlap_config.OverlapConfig", ("width", "hidden", "activation", "pes_here")),
}


def key_of(kind: str, shape: Shape, dtype: str, device: str) -> str:
    """The key of an entry, as one readable line.

    Example: `routing experts=64 top_k=4 key_bits=32 float32 on NVIDIA H100 80GB HBM3`.
    """
    sizes = " ".join(f"{name}={value}" for name, value in zip(KINDS[kind].names, shape, strict=True))
    return f"{kind} {sizes} {dtype} on {device}"


@dataclass(frozen=True)
class Entry:
    """One tuned configuration.

    Attributes:
        kind, shape, dtype, device: what it is for; `device` is a GPU's name.
        config: the fields of the configuration (`config_fields`).
        how: "measured".
        milliseconds, default_milliseconds: of this configuration and of the heuristic default.
        triton: its version. date: ISO.
    """

    kind: str
    shape: Shape
    dtype: str
    device: str
    config: dict[str, Any]
    how: str
    milliseconds: float
    default_milliseconds: float
    triton: str
    date: str

    @property
    def key(self) -> str:
        return key_of(self.kind, self.shape, self.dtype, self.device)

    def configuration(self) -> Any:
        """The configuration as a dataclass. Raises: ValueError for unknown fields."""
        return config_from(self.kind, self.config)


def config_class(kind: str) -> type:
    """The dataclass that configures kernels of this kind."""
    # Imported here, because kernels need Triton, which is not available on every machine.
    module, _, name = KINDS[kind].config.rpartition(".")
    return getattr(importlib.import_module(f"lancet_kernels.kernels.{module}"), name)


def config_fields(config: Any) -> dict[str, Any]:
    """A configuration as JSON values."""
    return dataclasses.asdict(config)


def config_from(kind: str, fields: dict[str, Any]) -> Any:
    """The configuration from JSON values. Raises: ValueError for unknown fields, or wrong types."""
    config = _dataclass_from(config_class(kind), fields)
    if config_fields(config) != fields:
        raise ValueError(f"fields {sorted(fields)}")
    return config


def _dataclass_from(kind: type, fields: dict[str, Any]) -> Any:
    from lancet_kernels.kernels.gemm_config import GemmConfig

    values = dict(fields)
    if isinstance(values.get("gemm"), dict):
        values["gemm"] = _dataclass_from(GemmConfig, values["gemm"])
    types = {"bodies": str}
    if not all(isinstance(value, types.get(name, int | GemmConfig)) for name, value in values.items()):
        raise ValueError(f"values {fields}")
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(str(error)) from error


def is_usable(kind: str, config: Any, shape: Shape, dtype: torch.dtype, arch: int) -> bool:
    """Can this configuration run on such a device?"""
    if kind == "routing":
        return config.is_valid(*shape[:2])
    if kind == "overlap":
        return config.gemm.is_valid(dtype, arch)
    return config.is_valid()
