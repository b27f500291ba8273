"""Plans, states, public names and the command's help stay what they were while the house is rebuilt.

`frozen.json` has them of a commit before that. Decisions of a plan are equal, times within 1e-9. What a
commit removes on purpose it also changes there, so that the difference shows what went. This folder is
deleted when the reorganization that began on 2026-11-26 ends.
"""

import importlib.util
import json
import math

import pytest

from tests.frozen import settings
from tests.grids import few_of

FROZEN = json.loads(settings.FILE.read_text())
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


def differences(own: object, frozen: object, path: str = "") -> list[str]:
    """Where two JSON values differ, numbers by more than 1e-9 of their size."""
    if isinstance(own, dict) and isinstance(frozen, dict):
        keys = sorted(own.keys() | frozen.keys())
        return [d for k in keys for d in differences(own.get(k), frozen.get(k), f"{path}/{k}")]
    if isinstance(own, list) and isinstance(frozen, list) and len(own) == len(frozen):
        pairs = zip(own, frozen, strict=True)
        return [d for i, pair in enumerate(pairs) for d in differences(*pair, f"{path}/{i}")]
    if isinstance(own, float) and isinstance(frozen, (int, float)):
        equal = math.isclose(own, frozen, rel_tol=1e-9, abs_tol=1e-9)
    else:
        equal = own == frozen
    return [] if equal else [f"{path}: {own!r}, was {frozen!r}"]


@pytest.mark.long
@pytest.mark.parametrize("name", settings.SIMULATED)
def test_plans_of_the_own_models(name):
    assert not differences(settings.simulated(name), FROZEN["simulated"][name])


@pytest.mark.long
@pytest.mark.parametrize("name", settings.OPTIMIZED)
def test_plans_of_optimize(name):
    assert not differences(settings.optimized(name), FROZEN["optimized"][name])


@pytest.mark.long
@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="transformers is not installed")
@pytest.mark.parametrize("name", settings.HF)
def test_predictions_from_configurations(name):
    assert not differences(settings.predicted(name), FROZEN["predicted"][name])


@pytest.mark.parametrize("what", few_of(["names", "helps", "states"], 0, 1))
def test_states_names_and_help(what):
    assert not differences(getattr(settings, what)(), FROZEN[what.replace("helps", "help")])


def test_every_setting_is_frozen():
    for kind, own in (
        ("simulated", settings.SIMULATED),
        ("optimized", settings.OPTIMIZED),
        ("predicted", settings.HF),
    ):
        assert FROZEN[kind].keys() == own.keys()


def test_a_difference_is_seen():
    assert differences({"a": [1.0, 2.0]}, {"a": [1.0, 2.0 + 1e-8]}) == ["/a/1: 2.0, was 2.00000001"]
    assert not differences({"a": 1.0}, {"a": 1.0 + 1e-12})
    assert differences({"a": 1}, {}) == ["/a: 1, was None"]
