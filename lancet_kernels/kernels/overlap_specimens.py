"""Which variants of the fused kernel must compile? Every combination of stages that the launchers use."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lancet_kernels.kernels.overlap import OverlapConfig, overlap_tile
from lancet_kernels.kernels.overlap_kernel import overlap_kernel
from lancet_kernels.kernels.specimen import Specimen

# Types of the kernel's arguments, for compiling it where there is no tensor; all others are rows.
_INTEGERS = ("num_tasks", "counter", "rank", "W", "L", "C", "D", "F", "H", "chunks", "T", "K")
_TYPES = {
    **dict.fromkeys(_INTEGERS, "i32"),
    **dict.fromkeys(("tasks_ptr", "token_ptr"), "*i32"),
    **dict.fromkeys(("scale_ptr", "weight_ptr", "dweight_ptr"), "*fp32"),
    "max_polls": "i64",
}
_WORDS = "use earlier_use report count arrived released returned ready done expert slot problems".split()
_TYPES |= {f"{name}_ptr": "*i64" for name in _WORDS}
_TYPES |= {f"{name}_peers_ptr": "*i64" for name in ("rows", "arrived", "results", "returned")}
_STAGES = ("HAS_PUT", "HAS_IN", "HAS_OUT", "HAS_WGRAD", "HAS_REDUCE", "HAS_DWEIGHT")
# What is fused -> (stages in the launch, kinds of independent GEMMs, backward).
_FUSED = {
    "forward": (("HAS_PUT", "HAS_IN", "HAS_OUT", "HAS_REDUCE"), 0, False),
    "backward": (_STAGES, 0, True),
    "dispatch+gemm": (("HAS_PUT", "HAS_IN"), 0, False),
    "gemm+combine": (("HAS_OUT", "HAS_REDUCE"), 0, False),
    "dispatch+dense": (("HAS_PUT",), 7, False),
    "backward+dw": (_STAGES, 4, True),
}


def specimens(arch: int) -> Iterator[Specimen]:
    """The fused kernel in every combination that the launchers use, at the default tile of `arch`."""
    for fused, activation, dtype in (
        *((name, "gelu", torch.bfloat16) for name in _FUSED),
        *((name, "swiglu", torch.bfloat16) for name in ("forward", "backward")),
        *((name, "gelu", torch.float16) for name in ("forward", "backward")),
        *((name, "gelu", torch.float32) for name in ("forward", "backward")),
    ):
        tile = overlap_tile(activation, dtype, arch)
        yield specimen(fused, activation, dtype, arch, OverlapConfig(tile))
    if arch < 100:
        config = OverlapConfig(overlap_tile("gelu", torch.bfloat16, arch))
        for name in _FUSED:
            yield specimen(name, "gelu", torch.bfloat16, arch, config, nvshmem=True)


def specimen(
    fused: str,
    activation: str,
    dtype: torch.dtype,
    arch: int,
    config: OverlapConfig,
    *,
    nvshmem: bool = False,
) -> Specimen:
    """The fused kernel with the stages `fused` and one configuration."""
    stages, dense, backward = _FUSED[fused]
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    tile = config.gemm
    tma = arch >= 90 and dtype.itemsize == 2
    constexprs = dict.fromkeys(_STAGES, False) | dict.fromkeys(stages, True)
    constexprs |= {
        "DENSE_KINDS": dense, "BACKWARD": backward, "ACT": activation, "HAS_BIAS": True, "SAVE_PRE": True,
        "SCALED": backward and not nvshmem, "WEIGHTED": not backward, "BANKS": 2, "EARLIER_BANKS": 2,
        "NVSHMEM": nvshmem, "UPCAST": False, "TMA": tma,
        "BM": tile.block_m, "BN": tile.block_n, "BK": tile.block_k,
        "PUT_ROWS": config.put_rows, "PUT_BLOCK": config.put_block,
        "BT": config.reduce_tokens, "BD": config.reduce_block,
    }  # fmt: skip
    arguments = [name for name in overlap_kernel.arg_names if name not in constexprs]
    signature = {name: _TYPES.get(name, f"*{short}") for name in arguments}
    pointers = tuple(name for name, kind in signature.items() if kind.startswith("*"))
    transport = " nvshmem" if nvshmem else ""
    return Specimen(
        name="overlap",
        config=f"{fused} {activation} {short} {tile}{transport}",
        kernel=overlap_kernel,
        signature=signature,
        constexprs=constexprs,
        aligned=(*pointers, "D", "F", "H"),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        nvshmem=nvshmem,
        wgmma=arch == 90 and dtype.itemsize == 2,
        tma=tma,
    )
