"""`python -m bench.papers primepar`: numbers that follow from solutions, tested claims, pictures."""

import json

import pytest

from bench.papers import primepar, report
from bench.papers.__main__ import main
from bench.papers.primepar import BATCH, MODELS, SEQUENCE, slides_timelines

SMALL = MODELS[0]


@pytest.fixture(scope="module")
def data() -> dict:
    return primepar.simulate((), report.one_by_one, [SMALL], [4])


def test_rows_are_ratios_of_what_was_solved(data: dict) -> None:
    (row,) = data["rows"]
    times = row["iteration_ms"]
    assert row["speedup_without_communication"] > 1
    assert row["speedup"] == times["megatron"] / times["primepar"]
    assert times["primepar"] <= times["spatial"] <= times["best megatron"] <= times["megatron"]
    assert row["memory"] <= 1
    assert set(row["partition"]) > {"qkv", "fc1", "fc2"}
    assert any("P2x2" in p for p in row["partition"].values())
    # Four all-reduces of O a layer, two of them around the MLP block.
    mlp = row["mlp"]["megatron"]
    size = BATCH * SEQUENCE * 4096 * 2
    assert mlp["collective_ms"] == pytest.approx(2 * (2 * 0.020 + 2 * size * 3 / 4 / 104e9 * 1e3))
    assert mlp["redistribution_ms"] == mlp["ring_ms"] == 0


def test_the_slides_timelines_are_simulated() -> None:
    """Megatron sums O and I in nodes and W between them; PrimePar O and I between nodes, W nowhere."""
    kinds = {name.split(":")[0]: list(t.events) for name, t in slides_timelines().items()}
    sums = {name: [e.name for e in events if e.kind.value == "all_reduce"] for name, events in kinds.items()}
    assert sums["Megatron"] == [
        "sum of fc2 forward",
        "sum of fc2 gradient",
        "sum of fc1 backward",
        "sum of fc1 gradient",
    ]
    assert sums["PrimePar"] == ["sum of fc2 forward", "sum of fc1 backward"]
    assert any(e.kind.value == "point_to_point" for e in kinds["PrimePar"])


def test_the_command_prints_and_draws(data: dict, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(primepar, "simulate", lambda figures, run: data)
    assert main(["primepar", "--json", "--output-folder", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["simulated"] is True
    for claim in printed["claims"]:
        assert set(claim) == {"name", "paper", "ours", "holds"} | (set() if claim["holds"] else {"why"})
    assert all((tmp_path / f"primepar-{name}.png").stat().st_size > 10_000 for name in printed["pictures"])
    text = report.text(primepar, data)
    assert "nothing here was run on a GPU" in text
    assert all(line.lstrip(" -") in text for line in primepar.ASSUMPTIONS)
