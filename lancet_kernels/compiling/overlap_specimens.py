"""Which variants of the fused kernel and its helpers must compile? Every one that the launchers use."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lancet_kernels.compiling.specimen import FEW_SPILLED_BYTES, SHORT, Specimen
from lancet_kernels.kernels.kernel_launch import small_kernel
from lancet_kernels.kernels.overlap_config import (
    OverlapConfig,
    first_columns,
    launch_tile,
    most_registers,
    overlap_tile,
    plain_tile,
)
from lancet_kernels.kernels.protocol.exchange import release_kernel
from lancet_kernels.kernels.protocol.schedule import TILES_AT_ONCE, exchange_counts_kernel, schedule_kernel
from lancet_kernels.kernels.reference.kernel import overlap_kernel
from lancet_kernels.kernels.reference.tiles import write_dense_row_kernel

# What pointers among the kernel's arguments point at, but for rows.
TYPES = {
    **dict.fromkeys(("table", "token"), "i32"),
    **dict.fromkeys("send_weights row_weights row_dots dots dots_stage weight dweight".split(), "fp32"),
    **dict.fromkeys(
        "use earlier_use report arrived released returned ready done expert row problems spoiled".split(),
        "i64",
    ),
}
STAGES = ("HAS_PUT", "HAS_IN", "HAS_OUT", "HAS_WGRAD", "HAS_REDUCE")
# What is fused -> (stages in the launch, backward); one launch per direction, or its two halves.
FUSED = {
    "forward": (("HAS_PUT", "HAS_IN", "HAS_OUT", "HAS_REDUCE"), False),
    "backward": (STAGES, True),
    "dispatch+gemm": (("HAS_PUT", "HAS_IN"), False),
    "gemm+combine": (("HAS_OUT", "HAS_REDUCE"), False),
    "backward dispatch+gemm": (("HAS_PUT", "HAS_IN"), True),
    "backward gemm+combine": (("HAS_OUT", "HAS_WGRAD", "HAS_REDUCE"), True),
}
# Independent GEMMs that ride along: what `overlap.dense_kinds` gives.
DENSE = {"": 0, "+dw": 4, "+dense": 7}
# Words of a tile that are looked at together: a PE each.
PES = 8


def specimens(arch: int) -> Iterator[Specimen]:
    """Every combination that the launchers use, at the default tile of `arch`.

    Every combination of stages over both transports with GELU in bfloat16; every activation, type and lack of
    biases in both directions.
    """
    for nvshmem in (False, True):
        for fused in FUSED:
            for dense in DENSE if "HAS_PUT" in FUSED[fused][0] else ("",):
                yield specimen(fused, dense, arch, nvshmem=nvshmem)
    for fused in ("forward", "backward"):
        yield specimen(fused, "", arch, bias=False)
        yield specimen(fused, "", arch, activation="silu")
        yield specimen(fused, "", arch, activation="swiglu")
        yield specimen(fused, "", arch, dtype=torch.float16)
        yield specimen(fused, "", arch, dtype=torch.float32)
        # An operand that is not aligned for descriptors: the layer's own, or only one that rides along.
        for activation in ("gelu", "swiglu"):
            yield specimen(fused, "", arch, activation=activation, plain="odd")
        for riders in ("", "+dense"):
            yield specimen(fused, riders, arch, dtype=torch.float32, plain="odd")
        yield specimen(fused, "+dense", arch, plain="odd")
        yield specimen(fused, "+dense", arch, plain="odd riders")
        yield specimen(fused, "+dense", arch, activation="swiglu", plain="odd")
    yield from _small_specimens()


def _small_specimens() -> Iterator[Specimen]:
    addresses = dict.fromkeys("abc", "i64")
    yield Specimen.of(write_dense_row_kernel, "pointers above 2^31", {}, addresses, num_warps=1)
    sizes = "64 experts on 8 PEs"
    for nvshmem in (False, True):
        options = small_kernel(nvshmem)
        yield Specimen.of(
            release_kernel, "nvshmem" if nvshmem else "pointers", {"NVSHMEM": nvshmem},
            num_warps=options.pop("num_warps"), options=options, nvshmem=nvshmem,
        )  # fmt: skip
        yield Specimen.of(
            exchange_counts_kernel, sizes + (", nvshmem" if nvshmem else ""),
            {"BANKS": 2, "NVSHMEM": nvshmem, "BM": 128, "BE": 64, "BW": 8},
            {"counts": "i32", "table": "i32"}, nvshmem=nvshmem,
        )  # fmt: skip
    yield Specimen.of(
        schedule_kernel, sizes, {"BM": 128, "BE": 64, "BW": 8, "BT": TILES_AT_ONCE}, {"table": "i32"}
    )


def specimen(
    fused: str,
    riders: str,
    arch: int,
    *,
    activation: str = "gelu",
    dtype: torch.dtype = torch.bfloat16,
    bias: bool = True,
    nvshmem: bool = False,
    plain: str = "",
    config: OverlapConfig | None = None,
) -> Specimen:
    """The fused kernel with the stages `fused`, independent GEMMs `riders`, and one configuration.

    plain: why there are no tensor descriptors; "odd": widths are not multiples of 16, "odd riders": only
    those of independent GEMMs. config: None means the default of the architecture.
    """
    stages, backward = FUSED[fused]
    config = config or OverlapConfig(overlap_tile(activation, dtype, arch))
    narrow = plain == "odd" or (plain and arch >= 90)
    tile = plain_tile(config.gemm, dtype) if narrow else config.gemm
    tile = launch_tile(tile, backward=backward, nvshmem=nvshmem)
    tma = arch >= 90 and not plain
    constexprs: dict[str, object] = {stage: stage in stages for stage in (*STAGES, *stages)}
    constexprs |= {
        "DENSE_KINDS": DENSE[riders], "BACKWARD": backward, "ACT": activation, "HAS_BIAS": bias,
        "SAVE_PRE": True, "BANKS": 2, "EARLIER_BANKS": 2,
        "NVSHMEM": nvshmem, "UPCAST": False, "TMA": tma,
        "BM": tile.block_m, "BN": tile.block_n, "BK": tile.block_k, "BW": PES,
        "BN_IN": first_columns(tile, activation, backward=backward),
        "PUT_ROWS": config.put_rows, "PUT_BLOCK": config.put_block,
        "BT": config.reduce_tokens, "BD": config.reduce_block,
    }  # fmt: skip
    said = {"no bias": not bias, "nvshmem": nvshmem, plain: bool(plain)}
    more = "".join(f" {what}" for what, holds in said.items() if holds)
    return Specimen.of(
        overlap_kernel,
        f"{fused}{riders} {activation} {SHORT[dtype]} {tile}{more}",
        constexprs,
        TYPES,
        SHORT[dtype],
        () if plain == "odd" else "DFH",
        # Backward with swiglu, once for each tile: none with Triton 3.9, 56 with 3.6 (2026-11-23).
        most_spills=56 if backward and activation == "swiglu" else FEW_SPILLED_BYTES,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        options={"maxnreg": most_registers(tile)},
        nvshmem=nvshmem,
        wgmma=arch == 90 and dtype.itemsize == 2,
        tma=tma,
    )
