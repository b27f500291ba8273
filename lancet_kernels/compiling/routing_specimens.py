"""Which variants of the routing kernels must compile? Few and many experts, one choice a token and more."""

from __future__ import annotations

from collections.abc import Iterator

import triton

from lancet_kernels.compiling.specimen import Specimen
from lancet_kernels.kernels.moe.rounding import UNFUSED
from lancet_kernels.kernels.moe.slots import (
    PAIRS,
    PREFIX_BLOCKS,
    PREFIX_EXPERTS,
    block_of_choices,
    count_choices_kernel,
    prefix_kernel,
    slots_kernel,
)
from lancet_kernels.kernels.moe.topk import (
    RoutingConfig,
    choose_by_key_kernel,
    choose_by_score_kernel,
    lanes,
)

_TABLES = {"count": "i32", "before": "i32"}


def specimens(arch: int) -> Iterator[Specimen]:
    """Choosing for few and many experts, with and without groups; counting, prefix and slots, for one choice
    per token and for eight of 64 and 512."""
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
        yield Specimen.of(
            choose_by_key_kernel,
            f"E{experts} K{top_k}",
            {"E": experts, "K": top_k, "BT": config.block_tokens, "BE": lanes(experts)},
            _TABLES | {"salt": "i64"},
            num_warps=config.num_warps,
            options=UNFUSED,
        )
    for experts, top_k in ((8, 1), (64, 6), (512, 8)):
        choices, tile, step = block_of_choices(RoutingConfig.default(experts, top_k), top_k)
        block_experts = min(triton.next_power_of_2(experts), max(16, PAIRS // tile))
        constexprs = {"E": experts, "CHOICES": choices, "BN": tile}
        for kernel, more in ((count_choices_kernel, {"BE": block_experts}), (slots_kernel, {"BJ": step})):
            yield Specimen.of(kernel, f"E{experts} K{top_k}", constexprs | more, _TABLES, options=UNFUSED)
    constexprs = {"BB": PREFIX_BLOCKS, "BE": PREFIX_EXPERTS}
    name = f"{PREFIX_BLOCKS}x{PREFIX_EXPERTS}"
    yield Specimen.of(prefix_kernel, name, constexprs, _TABLES, widths=["E"], options=UNFUSED)


def score_specimen(
    dtype: str, experts: int, top_k: int, config: RoutingConfig, groups: int = 1, top_groups: int = 0
) -> Specimen:
    """`choose_by_score` for "fp32" or "fp64" scores; top_groups 0: all groups are open."""
    return Specimen.of(
        choose_by_score_kernel,
        f"{dtype} E{experts} K{top_k}" + (f" groups {groups}/{top_groups}" if top_groups else ""),
        {
            "E": experts, "K": top_k, "S": experts // groups, "TOP_GROUPS": top_groups,
            "BT": config.block_tokens, "BG": triton.next_power_of_2(groups),
            "BS": triton.next_power_of_2(experts // groups),
        },
        _TABLES | {"score": dtype},
        num_warps=config.num_warps,
        options=UNFUSED,
    )  # fmt: skip
