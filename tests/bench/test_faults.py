"""Faults of a rank end a job in one line, and what is trained afterwards is the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.cpu import faults
from bench.cpu.faults import Fault
from tests.processes import BENCH

SAID = {
    "killed": "rank 1 was killed by SIGKILL",
    "stopped": "rank 1 did not answer",
    "raises": "something in the user's own code",
    "60 s late": "rank 1 did not answer",
    "disk full": "No space left on device",
}


@pytest.mark.long
def test_ended_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way to end, and each place, once; `python -m bench.cpu.faults` has all of them at all places."""
    struck = {
        "killed": "saving",
        "stopped": "forward",
        "raises": "trials",
        "disk full": "saving",
        "10 s late": "backward",
    }
    chosen = [Fault(kind, place, "experts and FSDP") for kind, place in struck.items()]
    monkeypatch.setattr(faults, "faults", lambda: [*chosen, Fault("raises", "forward", "experts")])
    file = tmp_path / "ends.json"
    monkeypatch.setattr(sys, "argv", ["faults", "--only", "experts and FSDP", "--json", str(file)])
    faults.main()
    ends = json.loads(file.read_text())["ends"]
    assert [Fault(**end["fault"]) for end in ends] == chosen
    for end in ends:
        assert SAID.get(end["fault"]["kind"], "") in end["said"], end
        assert end["same"], end
        assert end["lost"] <= 2, end


def test_the_table_is_of_all_faults() -> None:
    ends = json.loads((BENCH / "results" / "faults-2-core-cpu.json").read_text())["ends"]
    assert {Fault(**end["fault"]) for end in ends} == {*faults.faults()}
    for end in ends:
        assert end["same"]
        assert (end["after_s"] is None) == (end["fault"]["kind"] == "10 s late")
        assert SAID.get(end["fault"]["kind"], "") in end["said"]
