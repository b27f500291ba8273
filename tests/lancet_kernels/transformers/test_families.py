"""Every family of the installed transformers, converted: loss and all gradients beside the original's."""

import json
import re
from importlib.metadata import version
from types import SimpleNamespace

import pytest

from tests.ranks import RankPool

pytest.importorskip("transformers", reason="transformers is not installed")

from tests.lancet_kernels.transformers import all_families
from tests.lancet_kernels.transformers.all_families import (
    NOT_CUT,
    RESULTS,
    WAYS,
    activation,
    converted,
    one_family,
)
from tests.transformers_families import FamilyStep, families, tiny_batch

PROPERTIES = {
    "aria": "transposed",
    "dbrx": "weights [E * F, D], one expert below the other",
    "deepseek_v4": "clamped silu",
    "inkling2": "softcapped",
    "lfm2_moe": "silu as a function",
    "llama4": "scores that multiply the experts' inputs, with zeros for experts that are not chosen",
    "muse_spark": "a norm behind each expert",
    "minimax_m3_vl": "the formula of GPT-OSS, concatenated",
    "nemotron_h": "ungated, squared relu",
    "openai_privacy_filter": "biases, concatenated",
    "step3p7": "no flags",
}


FEW = {*PROPERTIES, "deepseek_v3", "gpt_oss", "mixtral", "qwen3_next"}
"""What the long tests run; the programs that write the table run all families."""


@pytest.mark.parametrize("family", PROPERTIES)
def test_every_property_of_experts(family: str) -> None:
    assert converted(family, planned=False) == ""


@pytest.mark.parametrize(
    ("ranges", "fallbacks", "cell"),
    [([1], {}, ""), ([], {}, NOT_CUT), ([1], {"a mode": 2}, "runs without its plan: a mode")],
)
def test_what_a_plan_did_is_told(
    monkeypatch: pytest.MonkeyPatch, ranges: list[int], fallbacks: dict[str, int], cell: str
) -> None:
    """With right gradients, too, those of the load-balance loss included."""

    def unplanned(step: FamilyStep, _: tuple) -> FamilyStep:
        assert "aux_loss" in step.model(tiny_batch(), **step.options)
        step.plan, step.fallbacks = SimpleNamespace(ranges=ranges), fallbacks
        return step

    monkeypatch.setattr(all_families, "optimized", unplanned)
    assert converted("mixtral", planned=True) == cell


SAVED = json.loads(RESULTS.read_text(encoding="utf-8"))


of_its_version = pytest.mark.skipif(
    version("transformers") != SAVED["transformers"], reason="the table is of another version"
)


@of_its_version
def test_every_family_is_in_the_table() -> None:
    assert sorted(SAVED["families"]) == [*families()]


@pytest.mark.long
@of_its_version
@pytest.mark.parametrize("family", sorted(FEW))
def test_family_is_as_in_the_table(pool: RankPool, family: str) -> None:
    """Above, those of `PROPERTIES` are converted on one rank; here they have a plan on two."""
    ways = [way for way in WAYS if way != "converted" or family not in PROPERTIES]
    found = one_family(pool, family, ways) | {"activation": activation(family)}
    saved = {name: SAVED["families"][family][name] for name in found}
    assert without_distance(found) == without_distance(saved)


def without_distance(cells: dict[str, str]) -> dict[str, str]:
    """The last digit of a float32 difference is another on another CPU."""
    return {name: re.sub(r"differs by \S+", "differs", str(cell)) for name, cell in cells.items()}


@pytest.mark.parametrize("family", ["jetmoe", "longcat_flash"])
def test_experts_outside_of_the_interface_are_named(family: str) -> None:
    assert "has no `use_experts_implementation` of transformers" in converted(family, planned=False)


def test_a_list_of_experts_is_named() -> None:
    assert "VitPoseNaiveMoe: a list of modules, one for" in converted("vitpose_backbone", planned=False)
