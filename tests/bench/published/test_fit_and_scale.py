"""The programs that fit constants and study scale, on a small table and few GPUs."""

import json
from dataclasses import replace

import pytest

from bench.published import fit, scale
from bench.published.rows import CONFIGS


def test_constants_of_gemms_are_those_that_made_the_table(tmp_path, monkeypatch, capsys) -> None:
    shapes = [(512 * m, 512 * n, 1024 * k) for m in range(1, 9) for n in range(1, 5) for k in (1, 2, 4)]
    table = {}
    for m, n, k in shapes:
        tiles = -(-m // 128) * -(-n // 256)
        waves = -(-tiles // 132)
        table[f"m={m}, n={n}, k={k}"] = 0.8 * m * n / (128 * 256 * waves * 132) * k / (k + 128)
    file = tmp_path / "system.json"
    ops = {"matmul": {"accurate_efficient_factor": table}}
    file.write_text(json.dumps({"accelerator": {"op": ops}}))
    monkeypatch.setattr("sys.argv", ["fit", "--gemm", str(file), "132"])
    fit.main()
    said = dict(line.split(" = ") for line in capsys.readouterr().out.splitlines())
    assert float(said["dense"]) == pytest.approx(0.8, abs=0.011)
    assert (said["tile_rows"], said["tile_columns"], said["k_overhead"]) == ("128", "256", "128")


@pytest.mark.long
def test_the_study_writes_its_page_and_picture(tmp_path, monkeypatch) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    (tmp_path / "reference").mkdir()
    (tmp_path / "pictures").mkdir()
    question = next(scale._layouts(str(CONFIGS / "qwen3-30b-a3b.json"), 16))
    best = scale.answer(replace(question, recompute="full", sharding="full"))
    points = [scale.Point("Qwen3-30B-A3B", 8, None), scale.Point("Qwen3-30B-A3B", 16, best)]
    monkeypatch.setattr(scale, "DOCS", tmp_path)
    monkeypatch.setattr(scale, "study", lambda: iter(points))
    scale.main()
    page = (tmp_path / "reference" / "scale.md").read_text()
    assert "| Qwen3-30B-A3B | 8 | does not fit |" in page
    assert f"| {best.strategies[best.best].step_ms / 1e3:,.2f} |" in page
    assert (tmp_path / "pictures" / "scale.png").stat().st_size > 5000
