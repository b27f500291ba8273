"""The benchmarks can all be collected, and one of ours and one of torch's run."""

import json
import os
import re

import pytest

from tests.processes import printed


@pytest.mark.long
def test_benchmarks_are_collected_and_some_run(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    pytest.importorskip("pytest_benchmark")
    # Not as a worker of the run around it: pytest-benchmark measures nothing in those.
    for name in [name for name in os.environ if name.startswith("PYTEST_") and name != "PYTEST_CURRENT_TEST"]:
        monkeypatch.delenv(name)
    saved = tmp_path / "bench.json"
    # Everything is imported and collected; two of it run.
    chosen = "middle-permute-ours or middle-permute-torch"
    given = "bench", "--benchmark-only", f"--benchmark-json={saved}", "-k", chosen
    said = printed("-m", "pytest", "-q", "-p", "no:cacheprovider", *given)
    assert int(re.search(r"(\d+) deselected", said)[1]) > 10
    ours, theirs = json.loads(saved.read_text())["benchmarks"]
    assert ours["group"] == theirs["group"] == "permute middle"
    assert (ours["extra_info"]["contender"], theirs["extra_info"]["contender"]) == ("ours", "torch ops")
    assert all(found["stats"]["median"] > 0 for found in (ours, theirs))
