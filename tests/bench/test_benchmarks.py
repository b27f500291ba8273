"""The benchmarks can all be collected, and one of ours and one of torch's run."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.processes import ROOT


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    # Not as a worker of the run around it: pytest-benchmark measures nothing in those.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_benchmarks_are_collected_and_some_run(tmp_path) -> None:
    pytest.importorskip("pytest_benchmark")
    saved = tmp_path / "bench.json"
    # Everything is imported and collected; two of it run.
    chosen = "middle-permute-ours or middle-permute-torch"
    said = run("bench", "--benchmark-only", f"--benchmark-json={saved}", "-k", chosen)
    assert int(re.search(r"(\d+) deselected", said)[1]) > 10
    ours, theirs = json.loads(saved.read_text())["benchmarks"]
    assert ours["group"] == theirs["group"] == "permute middle"
    assert (ours["extra_info"]["contender"], theirs["extra_info"]["contender"]) == ("ours", "torch ops")
    assert all(found["stats"]["median"] > 0 for found in (ours, theirs))
