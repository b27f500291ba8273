"""Faults of a rank end a job in one line, and what is trained afterwards is the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.cpu.faults import Fault, faults
from tests.processes import BENCH, printed

SAID = {
    "killed": "rank 1 was killed by SIGKILL",
    "stopped": "rank 1 did not answer",
    "raises": "something in the user's own code",
    "60 s late": "rank 1 did not answer",
    "disk full": "No space left on device",
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("killed", "saving"),
        ("stopped", "backward"),
        ("raises", "trials"),
        ("60 s late", "forward"),
        ("disk full", "saving"),
        ("10 s late", "backward"),
    ],
)
def test_ended_and_named(tmp_path: Path, kind: str, place: str) -> None:
    """Each kind once; `python -m bench.cpu.faults` has all of them at all places."""
    file = tmp_path / "ends.json"
    printed(
        "-m", "bench.cpu.faults", "--only", kind, place, "experts and FSDP", "--json", file, timeout_s=1200
    )
    (end,) = json.loads(file.read_text())["ends"]
    assert SAID.get(kind, "") in end["said"]
    assert end["same"]
    assert end["lost"] <= 2


def test_the_table_is_of_all_faults() -> None:
    ends = json.loads((BENCH / "results" / "faults-2-core-cpu.json").read_text())["ends"]
    assert {Fault(**end["fault"]) for end in ends} == {*faults()}
    for end in ends:
        assert end["same"]
        assert (end["after_s"] is None) == (end["fault"]["kind"] == "10 s late")
        assert SAID.get(end["fault"]["kind"], "") in end["said"]
