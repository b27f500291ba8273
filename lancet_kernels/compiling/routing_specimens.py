"""Which variants of the routing kernels must compile? Few and many experts, one choice a token and more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton

from lancet_kernels.compiling.specimen import Specimen, pointers
from lancet_kernels.kernels.rounding import UNFUSED
from lancet_kernels.kernels.slots_kernel import (
    PAIRS,
    PREFIX_BLOCKS,
    PREFIX_EXPERTS,
    block_of_choices,
    count_choices_kernel,
    prefix_kernel,
    slots_kernel,
)
from lancet_kernels.kernels.topk_kernel import (
    RoutingConfig,
    choose_by_key_kernel,
    choose_by_score_kernel,
    lanes,
)


def specimens(arch: int) -> Iterator[Specimen]:
    """Choosing, counting, prefix and slots."""
    yield from _topk_specimens()
    yield from _slots_specimens()


def score_specimen(
    dtype: str, experts: int, top_k: int, config: RoutingConfig, groups: int = 1, top_groups: int = 0
) -> Specimen:
    """`choose_by_score` for "fp32" or "fp64" scores; top_groups 0: all groups are open."""
    return Specimen(
        name="choose_by_score",
        config=f"{dtype} E{experts} K{top_k}" + (f" groups {groups}/{top_groups}" if top_groups else ""),
        kernel=choose_by_score_kernel,
        signature={"score_ptr": f"*{dtype}", "expert_ptr": "*i64", "count_ptr": "*i32", "T": "i32"},
        constexprs={
            "E": experts,
            "K": top_k,
            "S": experts // groups,
            "TOP_GROUPS": top_groups,
            "BT": config.block_tokens,
            "BG": triton.next_power_of_2(groups),
            "BS": triton.next_power_of_2(experts // groups),
        },
        aligned=("score_ptr", "expert_ptr", "count_ptr"),
        num_warps=config.num_warps,
        options=UNFUSED,
    )


def _topk_specimens() -> Iterator[Specimen]:
    """The choosing kernels for few and many experts, with and without groups."""
    for dtype, experts, top_k, groups, top_groups in (
        ("fp32", 8, 2, 1, 0),
        ("fp32", 64, 8, 1, 0),
        ("fp32", 512, 8, 1, 0),
        ("fp32", 256, 8, 8, 4),
        ("fp64", 64, 8, 1, 0),
    ):
        config = RoutingConfig.default(experts, top_k, int(dtype[2:]))
        yield score_specimen(dtype, experts, top_k, config, groups, top_groups)
    for experts, top_k in ((64, 2), (512, 8)):
        config = RoutingConfig.default(experts, top_k, 64)
        yield Specimen(
            name="choose_by_key",
            config=f"E{experts} K{top_k}",
            kernel=choose_by_key_kernel,
            signature={
                "key_ptr": "*i64",
                "expert_ptr": "*i64",
                "count_ptr": "*i32",
                "T": "i32",
                "salt": "i64",
            },
            constexprs={"E": experts, "K": top_k, "BT": config.block_tokens, "BE": lanes(experts)},
            aligned=("key_ptr", "expert_ptr", "count_ptr"),
            num_warps=config.num_warps,
            options=UNFUSED,
        )


def _specimen(
    name: str, config: str, kernel: Any, signature: dict[str, str], constexprs: dict[str, Any], *aligned: str
) -> Specimen:
    """aligned: the integers that are multiples of 16; all pointers are."""
    aligned = (*pointers(signature), *aligned)
    return Specimen(name, config, kernel, signature, constexprs, aligned, options=UNFUSED)


def _slots_specimens() -> Iterator[Specimen]:
    """Counting, prefix and slots, for one choice per token and for eight of 64 and 512."""
    for experts, top_k in ((8, 1), (64, 6), (512, 8)):
        config = RoutingConfig.default(experts, top_k)
        choices, tile, step = block_of_choices(config, top_k)
        name = f"E{experts} K{top_k}"
        constexprs = {"E": experts, "CHOICES": choices, "BN": tile}
        counted = {"expert_ptr": "*i64", "count_ptr": "*i32", "N": "i32"}
        block_experts = min(triton.next_power_of_2(experts), max(16, PAIRS // tile))
        yield _specimen(
            "count_choices", name, count_choices_kernel, counted, constexprs | {"BE": block_experts}
        )
        signature = {
            "expert_ptr": "*i64",
            "before_ptr": "*i32",
            "used_ptr": "*i64",
            "slot_ptr": "*i64",
            "N": "i32",
        }
        yield _specimen("slots", name, slots_kernel, signature, constexprs | {"BJ": step})
    signature = {
        "count_ptr": "*i32",
        "used_ptr": "*i64",
        "used_out_ptr": "*i64",
        "kept_ptr": "*i64",
        **dict.fromkeys(("B", "C", "E"), "i32"),
    }
    constexprs = {"BB": PREFIX_BLOCKS, "BE": PREFIX_EXPERTS}
    name = f"{PREFIX_BLOCKS}x{PREFIX_EXPERTS}"
    yield _specimen("prefix", name, prefix_kernel, signature, constexprs, "E")
