"""A kernel with one configuration, as data: all that is needed to compile it without a GPU.

Every kernel module has a function ``specimens(arch)``; `lancet kernels` and the tests compile all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Specimen:
    """One kernel x configuration.

    Attributes:
        name: of the kernel; config: short text, e.g. "128x128x64 w8 s3 bf16".
        kernel: the `triton.jit` function.
        signature: argument name -> type ("*bf16", "i32", "i64"), without the constexprs.
        constexprs: constexpr name -> value.
        aligned: names of the pointers and integers that are multiples of 16.
        num_warps, num_stages: launch options.
        nvshmem: link the NVSHMEM bitcode.
        wgmma, tma: what the machine code of sm_90 must contain.
    """

    name: str
    config: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    aligned: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    nvshmem: bool = False
    wgmma: bool = False
    tma: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def pointers(signature: dict[str, str]) -> tuple[str, ...]:
    """The pointers among a specimen's arguments. Example: {"x_ptr": "*bf16", "T": "i32"} -> ("x_ptr",)."""
    return tuple(name for name, kind in signature.items() if kind.startswith("*"))
