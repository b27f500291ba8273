"""Every family of the installed transformers, converted: loss and all gradients beside the original's."""

import pytest

from tests.grids import few_of
from tests.ranks import RankPool

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.lancet_kernels.transformers.all_families import converted, one_family
from tests.transformers_families import OUTSIDE, families

PROPERTIES = {
    "aria": "transposed",
    "deepseek_v4": "clamped silu",
    "inkling2": "softcapped",
    "lfm2_moe": "silu as a function",
    "minimax_m3_vl": "the formula of GPT-OSS, concatenated",
    "nemotron_h": "ungated, squared relu",
    "openai_privacy_filter": "biases, concatenated",
    "step3p7": "no flags",
}


@pytest.mark.parametrize("family", PROPERTIES)
def test_every_property_of_experts(family: str) -> None:
    assert converted(family, planned=False) == ""


@pytest.mark.long
@pytest.mark.parametrize("family", few_of([*families()]))
def test_family_on_two_ranks(pool: RankPool, family: str) -> None:
    why, planned, _ = pool.run(one_family, family, timeout_s=300)[0]
    assert (why != "") == (family in OUTSIDE)
    assert planned == ""


@pytest.mark.parametrize("family", ["llama4", "jetmoe"])
def test_experts_outside_of_the_interface_are_named(family: str) -> None:
    assert "has no `use_experts_implementation` of transformers" in converted(family, planned=False)
