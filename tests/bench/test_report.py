"""`bench/report.py`: tables and pictures of made-up measurements, and of the ones in the repository."""

import json
from pathlib import Path

import pytest

from bench import report

ROOT = Path(__file__).parents[2]


def benchmark(contender, ms, *, role=None, kernel="fused forward", label=None, ours=True):
    info = {"kernel": kernel, "contender": contender, "ours": ours, "role": role, "device": "Made-up GPU"}
    info |= {"workload": "wide (T1 D2 F3 E4 K5 gelu)", "flops": 2e9, "bytes": 1e7}
    if label:
        info["label"] = label
    else:
        info |= {"peaks": "H100", "peak_tflops": 989.0, "peak_gb_per_s": 3350.0, "roofline_share": 0.5}
    return {"group": f"{kernel} wide", "extra_info": info, "stats": {"median": ms * 1e-3}}


def save(path: Path, benchmarks) -> str:
    path.write_text(json.dumps({"datetime": "2026-01-02T03:04:05", "benchmarks": benchmarks}))
    return str(path)


def made_up(label=None):
    return [
        benchmark("one launch", 2.5, role="fused", label=label),
        benchmark("rows alone", 1.0, role="communication", label=label),
        benchmark("GEMMs alone", 2.0, role="gemm", label=label),
        benchmark("torch", 3.0, kernel="MoE layer", ours=False, label=label),
    ]


def test_the_table_of_a_ring(tmp_path) -> None:
    def times(least: float, median: float) -> dict:
        return {"least": least, "median": median, "rounds": [least, median, 2 * median]}

    of = {"exposed_ms": times(10.0, 30.0), "waited_for_ms": times(100.0, 120.0)}
    of |= {"late_ranks_ms": times(5.0, 6.0), "peak_mb": 80.0}
    of |= {"exposed_share": 0.1, "exposed_share_of_medians": 0.25}
    data = {"rings": {"alternating": of}, "megatron_peak_mb": 100.0, "layers": 2, "width": 4, "hidden": 8}
    data |= {"rows": 16, "ranks": 4, "device": "made-up CPU", "torch": "2.0", "link": "emulated"}
    data |= {"link_gbps": 2.0, "datetime": "2026-01-02T03:04:05"}
    path = tmp_path / "ring.json"
    path.write_text(json.dumps(data))
    report.write([str(path)], tmp_path)
    text = (tmp_path / "report.md").read_text()
    expected = "| alternating | 10.0 (30.0) | 100.0 (120.0) | 10.0% | 25.0% | 5.0 (6.0) | 80.0 | 80% |"
    assert expected in text
    assert "emulated link of 2 Gbit/s, 2026-01-02. ms of a forward and backward: least of 3 rounds" in text


def test_a_report_of_a_gpu(tmp_path) -> None:
    folder = tmp_path / "report"
    overlap = ROOT / "bench" / "results" / "overlap-emulated-2-core-cpu.json"
    report.write([save(tmp_path / "bench.json", made_up()), str(overlap)], folder)
    text = (folder / "report.md").read_text()
    assert "| wide (T1 D2 F3 E4 K5 gelu) | 2.500 | 1.000 | 2.000 | 50% (one launch) |" in text
    assert "| fused forward wide | gemm | 2.000 | 2.500 | 0.80 |" in text
    assert "2026-01-02" in text
    assert "interpreter" not in text
    assert "emulated link" in text
    for name in ("roofline", "eta", "iteration"):
        assert f"({name}.png)" in text
        assert (folder / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_without_a_gpu_there_are_tables_and_no_pictures(tmp_path) -> None:
    report.write([save(tmp_path / "bench.json", made_up("interpreter: proof, not speed"))], tmp_path / "r")
    text = (tmp_path / "r" / "report.md").read_text()
    assert "Not a measurement of a GPU" in text
    assert "eta" not in text
    assert [file.name for file in (tmp_path / "r").iterdir()] == ["report.md"]


def test_an_iteration_is_the_sum_of_its_parts() -> None:
    data = {"iteration_ms": {"a": 10.0}, "all_to_all_ms": {"a": 4.0}, "exposed_ms": {"a": 1.0}}
    parts = report.iteration_parts(data)
    times = {"computation_ms": 6.0, "overlapped_ms": 3.0, "communication_ms": 1.0}
    assert parts == [{"strategy": "a", **times}]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"figures": []}', None])
def test_a_foreign_file_is_refused_in_one_line(tmp_path, capsys, text) -> None:
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    assert report.main([str(path), "--output-folder", str(tmp_path / "r")]) == 1
    assert capsys.readouterr().err.startswith("report: measurements: got ")
