"""Traces without overlaps, pictures that are drawn."""

import json

import pytest

from lancet_kernels.graph.program import Kind, Phase
from lancet_kernels.schedules.time.simulate import COMPUTE, LINK, Event, simulate
from lancet_kernels.schedules.time.timeline import label, save_picture, save_trace
from tests.schedules.small_programs import given, program


@pytest.fixture
def events():
    p = program("A c f 2", "X a f 3 A", "C c f 1 X", "W c b 2 C", "R r b 1 W", "S c o 1 R")
    return simulate(p, given).events


def test_trace_has_one_track_per_resource(events, tmp_path):
    save_trace(events, tmp_path / "trace.json")
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {(e["tid"], e["args"]["name"]) for e in entries if e["name"] == "thread_name"}
    assert names == {(0, COMPUTE), (1, LINK)}
    spans = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in entries if e["ph"] == "X"]
    assert (1, "X", 2000, 3000) in spans


def test_labels_those_of_parts_as_of_the_whole(events):
    found = {e.name: label(e, frozenset({"W"})) for e in events}
    assert found == {
        "A": "forward",
        "X": "all-to-all",
        "C": "forward",
        "W": "weight gradient",
        "R": "all-reduce",
        "S": "optimizer",
    }
    part = Event("mm_1_part0", COMPUTE, 0, 2, Kind.COMPUTE, Phase.BACKWARD)
    assert label(part, frozenset({"mm_1"})) == "weight gradient"
    assert label(part, frozenset({"mm"})) == "backward"


def test_picture_is_drawn(events, tmp_path):
    path = tmp_path / "timeline.png"
    save_picture({"predicted": events, "measured": events, "empty": []}, path, title="made up")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size > 5000
