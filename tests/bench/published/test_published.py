"""Rows of published measurements: complete, and the fitted ones within the test's own noise."""

import json

import pytest

from bench.published.predict import check, summary
from bench.published.rows import CONFIGS, load_rows
from tests.processes import printed

ROWS = load_rows()


def test_every_row_has_a_source_and_a_configuration():
    for row in ROWS:
        assert all((row.source, row.commit, row.assumed)), row.name
        assert row.measured > 0, row.name
        assert row.not_simulated or "kind" in row.configuration, row.name
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_only_one_source_is_fitted():
    assert {row.source.split()[0] for row in ROWS if row.fitted} == {"NVIDIA/Megatron-LM"}


def test_the_fitted_rows_are_close():
    checked = check([row for row in ROWS if row.fitted])
    assert summary(checked)["fitted time"]["mean"] < 0.03


def test_rows_that_cannot_be_simulated_say_why():
    missing = [one for one in check([row for row in ROWS if row.not_simulated]) if one.predicted is None]
    assert missing
    assert all(one.row.not_simulated for one in missing)


@pytest.mark.long
def test_command_prints_rows():
    pytest.importorskip("transformers")
    found = json.loads(printed("-m", "bench.published", "--json"))
    assert {"name", "measured", "predicted", "error", "fitted"} <= set(found["rows"][0])
    assert len(found["rows"]) == len(ROWS)


def test_configs_are_there():
    for row in ROWS:
        if row.configuration["kind"] == "step" and not row.not_simulated:
            assert (CONFIGS / f"{row.configuration['model']}.json").exists()


@pytest.mark.long
def test_what_strategies_hide_is_a_table() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    head, _, none, *rows = printed("-m", "bench.published.overlap_table").splitlines()
    assert len(none.split("|")) == len(head.split("|"))
    assert none.split("|")[4].strip() == "0%"
    assert [row.split("`")[1].split()[0] for row in rows] == ["duplex", "lancet-dw", "lancet", "microbatches"]
