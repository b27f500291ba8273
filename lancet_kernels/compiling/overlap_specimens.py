"""Which variants of the fused kernel and its helpers must compile? Every one that the launchers use."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lancet_kernels.compiling.specimen import FEW_SPILLED_BYTES, Specimen, pointers
from lancet_kernels.kernels.exchange import release_kernel
from lancet_kernels.kernels.nvshmem_launch import small_kernel
from lancet_kernels.kernels.overlap_config import (
    OverlapConfig,
    first_columns,
    launch_tile,
    most_registers,
    overlap_tile,
    plain_tile,
)
from lancet_kernels.kernels.overlap_kernel import overlap_kernel
from lancet_kernels.kernels.overlap_tiles import write_dense_row_kernel
from lancet_kernels.kernels.schedule import TILES_AT_ONCE, exchange_counts_kernel, schedule_kernel

# Types of the kernel's arguments, for compiling it where there is no tensor; all others are rows.
_INTEGERS = (
    "counter copy_counter rank limit W L D F H R S tiles chunks T K tiles_in tiles_out lag "
    "dense_tiles num_problems reduce_blocks programs comm_programs"
).split()
_FLOATS = [
    f"{name}_ptr" for name in "send_weights row_weights row_dots dots dots_stage weight dweight".split()
]
TYPES = {
    **dict.fromkeys(_INTEGERS, "i32"),
    **dict.fromkeys(("table_ptr", "token_ptr"), "*i32"),
    **dict.fromkeys(_FLOATS, "*fp32"),
    "max_polls": "i64",
}
_WORDS = "use earlier_use report arrived released returned ready done expert row problems spoiled".split()
_WORDS += "origin origin_stage fanned".split()
TYPES |= {f"{name}_ptr": "*i64" for name in _WORDS}
TYPES |= {
    f"{name}_peers_ptr": "*i64"
    for name in ("rows", "row_weights", "arrived", "results", "dots", "returned", "origin")
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
# Choices of a token, where duplicates are sent once.
CHOICES = 8
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


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
        for nvshmem in (False, True):
            yield specimen(fused, "", arch, nvshmem=nvshmem, dedup=True)
        yield specimen(fused, "", arch, activation="swiglu", dedup=True)
        yield specimen(fused, "", arch, plain="odd", dedup=True)
    for nvshmem in (False, True):
        yield specimen("backward", "", arch, nvshmem=nvshmem, sends_x=True)
        yield specimen("backward", "", arch, nvshmem=nvshmem, sends_x=True, dedup=True)
    yield specimen("backward", "", arch, activation="swiglu", sends_x=True)
    yield _write_dense_row()
    for nvshmem in (False, True):
        yield _release(nvshmem)
        yield _exchange_counts(nvshmem)
    for dedup in (False, True):
        yield _schedule(dedup)


def _write_dense_row() -> Specimen:
    return Specimen(
        name="write_dense_row",
        config="pointers above 2^31",
        kernel=write_dense_row_kernel,
        signature={
            "row_ptr": "*i64", "kind": "i32", **dict.fromkeys("abc", "i64"), **dict.fromkeys("MNK", "i32"),
            "first": "i32",
        },
        constexprs={},
        aligned=("row_ptr",),
        num_warps=1,
    )  # fmt: skip


def _release(nvshmem: bool) -> Specimen:
    words = ("use_ptr", "released_ptr", "released_peers_ptr")
    return Specimen(
        name="release",
        config="nvshmem" if nvshmem else "pointers",
        kernel=release_kernel,
        signature=dict.fromkeys(words, "*i64") | dict.fromkeys(("rank", "world", "banks"), "i32"),
        constexprs={"NVSHMEM": nvshmem},
        aligned=words,
        num_warps=small_kernel(nvshmem)["num_warps"],
        options={name: n for name, n in small_kernel(nvshmem).items() if name != "num_warps"},
        nvshmem=nvshmem,
    )


def _exchange_counts(nvshmem: bool) -> Specimen:
    words = "use kept counts_peers counted counted_peers released report".split()
    signature = {f"{name}_ptr": "*i64" for name in words} | {"counts_ptr": "*i32", "table_ptr": "*i32"}
    return Specimen(
        name="exchange_counts",
        config="64 experts on 8 PEs, nvshmem" if nvshmem else "64 experts on 8 PEs",
        kernel=exchange_counts_kernel,
        signature=signature | dict.fromkeys(("rank", "W", "L", "R"), "i32") | {"max_polls": "i64"},
        constexprs={"BANKS": 2, "NVSHMEM": nvshmem, "BM": 128, "BE": 64, "BW": 8},
        aligned=tuple(signature),
        num_warps=4,
        nvshmem=nvshmem,
    )


def _schedule(dedup: bool) -> Specimen:
    return Specimen(
        name="schedule",
        config="64 experts on 8 PEs, dedup" if dedup else "64 experts on 8 PEs",
        kernel=schedule_kernel,
        signature={"table_ptr": "*i32", **dict.fromkeys(("rank", "W", "L", "tiles", "puts"), "i32")},
        constexprs={"BM": 128, "BE": 64, "BW": 8, "BT": TILES_AT_ONCE, "DEDUP": dedup},
        aligned=("table_ptr",),
        num_warps=4,
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
    dedup: bool = False,
    sends_x: bool = False,
    config: OverlapConfig | None = None,
) -> Specimen:
    """The fused kernel with the stages `fused`, independent GEMMs `riders`, and one configuration.

    plain: why there are no tensor descriptors; "odd": widths are not multiples
    of 16, "odd riders": only those of independent GEMMs. dedup: duplicates are sent once. sends_x: a
    backward that sends x, too. config: None means the default of the architecture.
    """
    stages, backward = FUSED[fused]
    short = SHORT[dtype]
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
        "DEDUP": CHOICES if dedup else 0,
        "SEND_X": int(sends_x and "HAS_PUT" in stages),
    }  # fmt: skip
    arguments = [name for name in overlap_kernel.arg_names if name not in constexprs]
    signature = {name: TYPES.get(name, f"*{short}") for name in arguments}
    said = {"no bias": not bias, "nvshmem": nvshmem, plain: bool(plain), "dedup": dedup, "x": sends_x}
    more = "".join(f" {what}" for what, holds in said.items() if holds)
    widths = () if plain == "odd" else ("D", "F", "H")
    return Specimen(
        name="overlap",
        config=f"{fused}{riders} {activation} {short} {tile}{more}",
        kernel=overlap_kernel,
        signature=signature,
        constexprs=constexprs,
        aligned=(*pointers(signature), *widths),
        # 56 in the backward with silu, whose act and act' are computed side by side (Triton 3.9, 2026-11-23).
        most_spills=64 if backward and activation == "silu" else FEW_SPILLED_BYTES,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        options={"maxnreg": most_registers(tile)},
        nvshmem=nvshmem,
        wgmma=arch == 90 and dtype.itemsize == 2,
        tma=tma,
    )
