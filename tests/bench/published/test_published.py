"""Rows of published measurements: complete, and the fitted ones within the test's own noise."""

import json

import pytest

from bench.published.__main__ import STRATEGIES
from bench.published.rows import answer_of, check, load_rows, summary
from lancet_kernels.predict.answer import GRAPH_TRAINER
from lancet_kernels.predict.measured import differences
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
    found = json.loads(printed("-m", "bench.published", "--json", "--only", "HybridEP"))
    assert {"name", "measured", "predicted", "error", "fitted"} <= set(found["rows"][0])
    assert [row["name"] for row in found["rows"]] == [row.name for row in ROWS if "HybridEP" in row.name]


@pytest.mark.long
def test_what_strategies_hide_is_a_table() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    head, _, none, *rows = printed("-m", "bench.published", "--hidden").splitlines()
    assert len(none.split("|")) == len(head.split("|"))
    assert none.split("|")[4].strip() == "0%"
    names = [row.split("`")[1].split()[0].rstrip(",") for row in rows]
    assert names == [*STRATEGIES[1:], GRAPH_TRAINER], "the last one on EP16"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "measured_ms", "term"),
    [
        # Its profile: idle 1.9 s, predicted 0.1; computation 14.6 s, predicted 13.6; exchanges as predicted.
        ("Qwen3-30B-A3B, HybridEP, no overlap", 24_713.8, "host"),
        # Its profile: 36.6 % of the communication is beside computation, as if the host issued too slowly.
        ("Qwen3-30B-A3B, HybridEP, Megatron's overlap", 20_992.0, "host"),
        # Its profile: exchanges 774 ms, predicted 747, grouped products 286, predicted 284; what is left are
        # ops between them, and ranks that wait for each other.
        ("DeepSeek-V3-16B, 32 H100, EP32, FSDP2, no overlap", 4 * 4096 / 8.086, "element-wise"),
    ],
)
def test_a_measured_step_names_the_term_of_its_profile(name, measured_ms, term):
    pytest.importorskip("transformers")
    row = next(row for row in ROWS if row.name == name)
    first, *_ = differences(answer_of(row).strategies[row.strategy], measured_ms)
    assert first.term == term
