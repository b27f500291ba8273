"""Which variants of which kernels must compile? Those of launches that are recorded here, with small sizes.

Each launcher is called as the library calls it, on tensors on the CPU, and what it would launch is recorded
(`kernel_launch.recorded`). So nothing of a launch is said a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lancet_kernels.compiling.specimen import Specimen
from lancet_kernels.kernels.hopper.config import total_warps
from lancet_kernels.kernels.hopper.kernel import gluon_overlap_kernel
from lancet_kernels.kernels.kernel_launch import Launch, recorded
from lancet_kernels.kernels.moe import activation, permute
from lancet_kernels.kernels.overlap import config_for_gpu, moe_backward, moe_forward
from lancet_kernels.kernels.overlap_config import OverlapConfig
from lancet_kernels.kernels.overlap_data import DenseGemm, Experts, Routing
from lancet_kernels.kernels.portable.kernel import overlap_kernel
from lancet_kernels.kernels.protocol.combine import combine_results_kernel
from lancet_kernels.kernels.protocol.exchange import Exchange
from lancet_kernels.symmetric import virtual_memories

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

    def text(self) -> str:
        said = {"no bias": not self.bias, "+dw": self.dense, "nvshmem": self.far, "odd": self.widths == ODD}
        more = "".join(f" {what}" for what, holds in said.items() if holds)
        return f"{self.activation} {SHORT[self.dtype]}{more}"

    def config(self, arch: int) -> OverlapConfig:
        given = *self.widths, self.dtype, arch
        return OverlapConfig.for_gpu(*given, 1) if self.plain else config_for_gpu(*given, 1, self.far)


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


def _fused_launches(case: FusedCase, arch: int) -> tuple[list[Launch], list[Launch]]:
    """What the forward, and what the backward of a case would launch."""
    config = case.config(arch)
    memory = virtual_memories(8)[0]
    memory.far = case.far
    local, (width, hidden) = 8, case.widths
    wide = 2 * hidden if case.activation == "swiglu" else hidden
    zeros = lambda *shape: torch.zeros(*shape, dtype=case.dtype)  # noqa: E731
    exchanges = [
        Exchange(
            memory, way, local_experts=local, send_rows=8, receive_rows=8, width=width, dtype=case.dtype,
            chunk_rows=config.gemm.block_m,
        )
        for way in ("forward", "backward")
    ]  # fmt: skip
    biases = (zeros(local, wide), zeros(local, width)) if case.bias else (None, None)
    experts = Experts(
        zeros(local, width, wide), biases[0], zeros(local, hidden, width), biases[1], case.activation
    )
    nowhere = torch.zeros(0, 8, dtype=torch.int64)
    count = torch.zeros(8 * local, dtype=torch.int64)
    routing = Routing.of(nowhere, nowhere, torch.zeros(0, 8), count)
    step = 16 if case.widths == EVEN else 17
    dense = [DenseGemm(*(zeros(step, step) for _ in "abc"))] if case.dense else []
    x = zeros(0, width)
    with recorded() as forward:
        _, saved = moe_forward(exchanges[0], x, routing, experts, config, dense=dense)
    with recorded() as backward:
        moe_backward(exchanges[0], saved, exchanges[1], x, routing, experts, config, dense=dense)
    return forward, backward


def _fused_specimen(case: FusedCase, arch: int, direction: str, launch: Launch) -> Specimen:
    given = launch.arguments
    if launch.kernel is combine_results_kernel:
        return Specimen.of(launch, f"{direction} {SHORT[case.dtype]}" + " nvshmem" * case.far)
    if launch.kernel not in (overlap_kernel, gluon_overlap_kernel):
        return Specimen.of(launch, "nvshmem" if given.get("NVSHMEM") else "pointers")
    hopper = launch.kernel is gluon_overlap_kernel
    stages = given["STAGES"] if hopper else given["num_stages"]
    tile = f"{given['BM']}x{given['BN']}x{given['BK']} w{given['num_warps']} s{stages}"
    return Specimen.of(
        launch,
        f"{direction} {case.text()} {tile}",
        total_warps=total_warps(given["num_warps"]) if hopper else 0,
        wgmma=arch == 90 and case.dtype.itemsize == 2,
        tma=hopper or given["TMA"],
        in_flight=int(hopper),
    )


def _fused(arch: int) -> Iterator[Specimen]:
    """The small kernels, which hardly depend on the case, are the same in many."""
    # On sm_90 the portable kernel says what is right, too.
    plain = (FusedCase("gelu", plain=True), FusedCase("swiglu", plain=True)) if arch == 90 else ()
    for case in (*FUSED, *plain):
        for direction, launches in zip(("forward", "backward"), _fused_launches(case, arch), strict=True):
            for launch in launches:
                yield _fused_specimen(case, arch, direction, launch)


def _specimens_of(said: str, call: Any, /, *args: Any, **options: Any) -> Iterator[Specimen]:
    """Specimens of what call(*args, **options) would launch."""
    with recorded() as launches:
        call(*args, **options)
    for launch in launches:
        yield Specimen.of(launch, said)


def _rows() -> Iterator[Specimen]:
    """Permute, combine and its weights' gradient for two, eight and many choices; the activation."""
    tokens, width = 4, 4096
    for dtype, top_k, weighted in (
        (torch.bfloat16, 8, True),
        (torch.bfloat16, 2, False),
        (torch.float32, 2, True),
        (torch.bfloat16, 64, True),
    ):
        said = f"{SHORT[dtype]} K{top_k}" + (" weighted" if weighted else "")
        x = torch.zeros(tokens, width, dtype=dtype)
        row = torch.zeros(tokens, top_k, dtype=torch.int64)
        weight = torch.zeros(tokens, top_k) if weighted else None
        yield from _specimens_of(said, permute.permute, x, row, weight, tokens * top_k)
        rows = torch.zeros(tokens * top_k, width, dtype=dtype)
        yield from _specimens_of(said, permute.combine, rows, row, weight)
        yield from _specimens_of(said, permute.combine_dweight, x, rows, row)
    count = torch.zeros(1, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float32):
        for kind in ("gelu", "swiglu"):
            h = torch.zeros(4, 4096 if kind == "swiglu" else 2048, dtype=dtype)
            yield from _specimens_of(f"{SHORT[dtype]} {kind}", activation.activation, h, count, kind)
            da = torch.zeros(4, 2048, dtype=dtype)
            yield from _specimens_of(
                f"{SHORT[dtype]} {kind}", activation.activation_backward, da, h, count, kind
            )
