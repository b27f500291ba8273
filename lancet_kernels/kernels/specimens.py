"""The kernel variants that must compile: those of launches that are recorded here, with small sizes.

Each launcher is called as the library calls it, on tensors on the CPU, and its launches are recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lancet_kernels.kernels import rows
from lancet_kernels.kernels.config import OverlapConfig
from lancet_kernels.kernels.hopper.kernel import gluon_overlap_kernel
from lancet_kernels.kernels.overlap import DenseGemm, Experts, Routing, moe_backward, moe_forward
from lancet_kernels.kernels.portable.kernel import overlap_kernel
from lancet_kernels.kernels.protocol.combine import combine_results_kernel
from lancet_kernels.kernels.protocol.exchange import Exchange
from lancet_kernels.kernels.runtime import Launch, recorded
from lancet_kernels.kernels.symmetric import virtual_memories


@dataclass(frozen=True)
class Specimen:
    """One kernel x configuration.

    Attributes:
        config: short text, e.g. "128x128x64 w8 s3 bf16". kernel: the `triton.jit` or `gluon.jit` function.
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
        name = launch.kernel.fn.__name__.removesuffix("_kernel")
        return cls(name, config, launch.kernel, tree_map(_empty, launch.arguments), **fields)

    def __reduce__(self) -> tuple:
        # By the name of the kernel, which is no plain function and has what cannot be pickled.
        name = self.kernel.fn.__module__, self.kernel.fn.__name__
        return _with_kernel_named, (*name, {**vars(self), "kernel": None})

    @property
    def nvshmem(self) -> bool:
        """Is it linked with the NVSHMEM bitcode?"""
        return bool(self.arguments.get("NVSHMEM"))


def _with_kernel_named(module: str, name: str, fields: dict[str, Any]) -> Specimen:
    return Specimen(**{**fields, "kernel": getattr(import_module(module), name)})


def _empty(value: Any) -> Any:
    """The same without contents. Triton looks at types, at None, and at what is a multiple of 16."""
    if isinstance(value, Tensor):
        aligned = value.data_ptr() % 16 == 0
        return torch.empty(0, dtype=value.dtype) if aligned else torch.empty(2, dtype=value.dtype)[1:]
    return replace(value, base=_empty(value.base)) if isinstance(value, TensorDescriptor) else value


SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
# Multiples of 64, and not even of 16 bytes.
EVEN, ODD = (128, 192), (17, 19)


@dataclass(frozen=True)
class FusedCase:
    """A pass of the fused experts on 8 PEs with 8 experts each, of no tokens.

    Attributes:
        dense: an independent GEMM rides along. far: peers are reached by NVSHMEM. widths: D and F.
        plain: the portable kernel where the Hopper one is the default.
    """

    activation: str = "gelu"
    dtype: torch.dtype = torch.bfloat16
    bias: bool = True
    dense: bool = False
    far: bool = False
    widths: tuple[int, int] = EVEN
    plain: bool = False


FUSED = (
    FusedCase(),
    FusedCase(dense=True),
    FusedCase(bias=False),
    FusedCase("silu"),
    FusedCase("swiglu"),
    FusedCase("swiglu", bias=False, dense=True),
    FusedCase(dtype=torch.float16),
    FusedCase(dtype=torch.float32),
    FusedCase(far=True),
    FusedCase("swiglu", bias=False, far=True, dense=True),
    FusedCase(widths=ODD, dense=True),
    FusedCase("swiglu", widths=ODD),
    FusedCase(dtype=torch.float32, widths=ODD, dense=True),
)


def all_specimens(arch: int) -> Iterator[Specimen]:
    """Every kernel of the library, each in the configurations that sm_`arch` gets by default."""
    # The first of each name and configuration.
    first: dict[tuple[str, str], Specimen] = {}
    for specimen in (*_fused(arch), *_rows()):
        first.setdefault((specimen.name, specimen.config), specimen)
    yield from first.values()


def _fused(arch: int) -> Iterator[Specimen]:
    """The small kernels, which hardly depend on the case, are the same in many."""
    # On sm_90 the portable kernel says what is right, too.
    plain = (FusedCase("gelu", plain=True), FusedCase("swiglu", plain=True)) if arch == 90 else ()
    for case in (*FUSED, *plain):
        for direction, launches in zip(("forward", "backward"), _fused_launches(case, arch), strict=True):
            for launch in launches:
                yield _fused_specimen(case, arch, direction, launch)


def _fused_launches(case: FusedCase, arch: int) -> tuple[list[Launch], list[Launch]]:
    """The launches of forward and backward of a case."""
    local, (width, hidden) = 8, case.widths
    config = OverlapConfig.for_gpu(width, hidden, case.dtype, arch, 1, case.far, portable=case.plain)
    memory = virtual_memories(8)[0]
    memory.far = case.far
    wide = 2 * hidden if case.activation == "swiglu" else hidden
    zeros = partial(torch.zeros, dtype=case.dtype)
    sizes: dict[str, Any] = {"local_experts": local, "send_rows": 8, "receive_rows": 8}
    sizes |= {"chunk_rows": config.gemm.block_m, "width": width, "dtype": case.dtype}
    ways = [Exchange(memory, way, **sizes) for way in ("there", "back")]
    b1, b2 = (zeros(local, wide), zeros(local, width)) if case.bias else (None, None)
    experts = Experts(zeros(local, width, wide), b1, zeros(local, hidden, width), b2, case.activation)
    nowhere = torch.zeros(0, 8, dtype=torch.int64)
    routing = Routing.of(nowhere, nowhere, torch.zeros(0, 8), torch.zeros(8 * local, dtype=torch.int64))
    step = 16 if case.widths == EVEN else 17
    dense = [DenseGemm(*(zeros(step, step) for _ in "abc"))] if case.dense else []
    x = zeros(0, width)
    with recorded() as forward:
        _, saved = moe_forward(ways[0], x, routing, experts, config, dense=dense)
    with recorded() as backward:
        moe_backward(ways[0], saved, ways[1], x, routing, experts, config, dense=dense)
    return forward, backward


def _fused_specimen(case: FusedCase, arch: int, direction: str, launch: Launch) -> Specimen:
    arguments = launch.arguments
    if launch.kernel is combine_results_kernel:
        return Specimen.of(launch, f"{direction} {SHORT[case.dtype]}" + " nvshmem" * case.far)
    if launch.kernel not in (overlap_kernel, gluon_overlap_kernel):
        return Specimen.of(launch, "nvshmem" if arguments.get("NVSHMEM") else "pointers")
    hopper = launch.kernel is gluon_overlap_kernel
    stages = arguments["STAGES"] if hopper else arguments["num_stages"]
    flags = {"no bias": not case.bias, "+dw": case.dense, "nvshmem": case.far, "odd": case.widths == ODD}
    words = [direction, case.activation, SHORT[case.dtype], *(flag for flag, is_on in flags.items() if is_on)]
    blocks, warps = "x".join(str(arguments[size]) for size in ("BM", "BN", "BK")), arguments["num_warps"]
    return Specimen.of(
        launch,
        f"{' '.join(words)} {blocks} w{warps} s{stages}",
        total_warps=warps + 4 if hopper else 0,  # one warpgroup more than multiply
        wgmma=arch == 90 and case.dtype.itemsize == 2,
        tma=hopper or arguments["TMA"],
        in_flight=int(hopper),
    )


def _rows() -> Iterator[Specimen]:
    """Permute, combine and its weights' gradient for two, eight and many choices; the activation."""
    tokens, width = 4, 4096
    for dtype, top_k, weighted in (
        (torch.bfloat16, 8, True),
        (torch.bfloat16, 2, False),
        (torch.float32, 2, True),
        (torch.bfloat16, 64, True),
    ):
        x, y = (torch.zeros(n, width, dtype=dtype) for n in (tokens, tokens * top_k))
        row = torch.zeros(tokens, top_k, dtype=torch.int64)
        weight = torch.zeros(tokens, top_k) if weighted else None
        with recorded() as launches:
            rows.permute(x, row, weight, tokens * top_k)
            rows.combine(y, row, weight)
            rows.combine_dweight(x, y, row)
        config = f"{SHORT[dtype]} K{top_k}" + " weighted" * weighted
        yield from (Specimen.of(launch, config) for launch in launches)
    count = torch.zeros(1, dtype=torch.int64)
    for dtype, kind in product((torch.bfloat16, torch.float32), ("gelu", "swiglu")):
        h = torch.zeros(4, 4096 if kind == "swiglu" else 2048, dtype=dtype)
        with recorded() as launches:
            rows.activation(h, count, kind)
            rows.activation_backward(torch.zeros(4, 2048, dtype=dtype), h, count, kind)
        yield from (Specimen.of(launch, f"{SHORT[dtype]} {kind}") for launch in launches)
