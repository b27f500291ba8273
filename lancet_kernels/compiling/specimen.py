"""A launch as data: all that is needed to compile its kernel without a GPU, and what is expected of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lancet_kernels.kernels.kernel_launch import Launch


@dataclass(frozen=True)
class Specimen:
    """One kernel x configuration.

    Attributes:
        name: of the kernel; config: short text, e.g. "128x128x64 w8 s3 bf16".
        kernel: the `triton.jit` or `gluon.jit` function.
        arguments: of its launch by name, options included; tensors are empty (`of`).
        total_warps: of a program, where warps beside `num_warps` have jobs of their own; 0: none have.
        wgmma, tma: what the machine code of sm_90 must contain. in_flight: products that each of its loops
            must leave running while it starts the next.
    """

    name: str
    config: str
    kernel: Any
    arguments: dict[str, Any]
    total_warps: int = 0
    wgmma: bool = False
    tma: bool = False
    in_flight: int = 0

    @classmethod
    def of(cls, launch: Launch, config: str, **fields: Any) -> Specimen:
        """The specimen of a recorded launch."""
        arguments = {name: _empty(value) for name, value in launch.arguments.items()}
        fields.setdefault("name", launch.kernel.fn.__name__.removesuffix("_kernel"))
        return cls(config=config, kernel=launch.kernel, arguments=arguments, **fields)

    def __reduce__(self) -> tuple:
        # By the name of the kernel, which is no plain function and has what cannot be pickled.
        name = self.kernel.fn.__module__, self.kernel.fn.__name__
        return _with_kernel_called, (*name, {**vars(self), "kernel": None})

    @property
    def nvshmem(self) -> bool:
        """Is it linked with the NVSHMEM bitcode?"""
        return bool(self.arguments.get("NVSHMEM"))


def _with_kernel_called(module: str, name: str, fields: dict[str, Any]) -> Specimen:
    return Specimen(**{**fields, "kernel": getattr(import_module(module), name)})


def _empty(value: Any) -> Any:
    """The same without contents. Triton looks at types, at None, and at what is a multiple of 16."""
    if isinstance(value, Tensor):
        aligned = value.data_ptr() % 16 == 0
        return torch.empty(0, dtype=value.dtype) if aligned else torch.empty(2, dtype=value.dtype)[1:]
    if isinstance(value, TensorDescriptor):
        return replace(value, base=_empty(value.base))
    if isinstance(value, tuple):
        return type(value)(*map(_empty, value))
    return value
