"""A kernel with one configuration, as data: all that is needed to compile it without a GPU.

Every kernel module has a function ``specimens(arch)``; `lancet kernels` and the tests compile all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

FEW_SPILLED_BYTES = 32
"""At most eight registers of a thread, whose loads L1 serves. A tile of half the size would cost more."""
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Specimen:
    """One kernel x configuration.

    Attributes:
        name: of the kernel; config: short text, e.g. "128x128x64 w8 s3 bf16".
        kernel: the `triton.jit` or `gluon.jit` function.
        signature: argument name -> type ("*bf16", "i32", "i64"), without the constexprs.
        constexprs: constexpr name -> value.
        aligned: names of the pointers and integers that are multiples of 16.
        num_warps, num_stages: launch options.
        total_warps: of a program, where warps beside `num_warps` have jobs of their own; 0: none have.
        nvshmem: link the NVSHMEM bitcode.
        wgmma, tma: what the machine code of sm_90 must contain.
        most_spills: bytes of a thread that may be spilled.
    """

    name: str
    config: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    total_warps: int = 0
    nvshmem: bool = False
    wgmma: bool = False
    tma: bool = False
    most_spills: int = FEW_SPILLED_BYTES
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        kernel: Any,
        config: str,
        constexprs: Mapping[str, Any],
        types: Mapping[str, str] | None = None,
        pointers: str = "i64",
        widths: Iterable[str] = (),
        **options: Any,
    ) -> Specimen:
        """With types by what arguments are called: pointers end in `_ptr`, all others are "i32".

        Args:
            types: of those with another type, without `_ptr`: "i64", or of a pointer what it points at.
            pointers: what all other pointers point at; tables of peers, `_peers_ptr`, hold addresses.
            widths: integers that are multiples of 16, as all pointers are.
            options: other fields; name: default that of the kernel.
        Example: types {"count": "i32"} and pointers "bf16" for the arguments x_ptr, count_ptr, T: "*bf16",
        "*i32" and "i32".
        """
        types = types or {}
        signature = {}
        for argument in kernel.arg_names:
            name = argument.removesuffix("_ptr")
            if argument in constexprs:
                continue
            if name == argument:
                signature[name] = types.get(name, "i64" if name == "max_polls" else "i32")
            elif name.endswith("_peers"):
                signature[argument] = "*i64"
            else:
                signature[argument] = f"*{types.get(name, pointers)}"
        aligned = [name for name in signature if name.endswith("_ptr")]
        options.setdefault("name", kernel.fn.__name__.removesuffix("_kernel"))
        return cls(
            config=config,
            kernel=kernel,
            signature=signature,
            constexprs=dict(constexprs),
            aligned=(*aligned, *widths),
            **options,
        )
