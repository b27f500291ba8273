"""The benchmarks can all be collected, and one of each sort of contender runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_benchmarks_are_collected_and_some_run(tmp_path) -> None:
    pytest.importorskip("pytest_benchmark")
    saved = tmp_path / "bench.json"
    run("bench", "--benchmark-only", f"--benchmark-json={saved}", "-k", "bench_rows and middle and permute")
    ours, theirs = json.loads(saved.read_text())["benchmarks"]
    assert ours["group"] == theirs["group"] == "permute middle"
    assert (ours["extra_info"]["contender"], theirs["extra_info"]["contender"]) == ("ours", "torch ops")
    for found in (ours, theirs):
        assert found["extra_info"]["bytes"] > 0
        assert "label" in found["extra_info"] or "roofline_share" in found["extra_info"]


def test_every_kernel_has_a_benchmark() -> None:
    listed = run("bench", "--collect-only")
    kernels = ("bench_routing", "bench_rows", "bench_grouped_gemm", "bench_fused", "bench_moe_layer")
    for name in (*kernels, "bench_planning"):
        assert f"::{name}[" in listed
