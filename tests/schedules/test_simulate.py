"""Start and end times against ones worked out by hand."""

from itertools import pairwise

import pytest
from hypothesis import given as hypothesis_given

from lancet_kernels.graph.program import Kind
from lancet_kernels.schedules.issue import issue_early
from lancet_kernels.schedules.peak_memory import peak_memory
from lancet_kernels.schedules.simulate import COMPUTE, LINK, simulate
from tests.examples import examples
from tests.schedules.made_programs import given, program, random_programs


def spans(timeline):
    return {(e.name, e.resource): (e.start_ms, e.end_ms) for e in timeline.events}


def test_all_to_all_overlaps_what_does_not_need_it():
    timeline = simulate(program("A c f 2", "X a f 3 A", "B c f 1", "C c f 1 X"), given)
    assert spans(timeline) == {
        ("A", COMPUTE): (0, 2),
        ("X", LINK): (2, 5),
        ("B", COMPUTE): (2, 3),
        ("C", COMPUTE): (5, 6),
    }
    assert (timeline.iteration_ms, timeline.exposed_ms) == (6, 2)


def test_blocking_overlaps_nothing():
    p = program("A c f 2", "B c f 1", "X a f 3 A", "D c f 1", "C c f 1 X")
    timeline = simulate(p, given, blocking={"X"})
    # X waits for B, D waits for X: 2 + 1 + 3 + 1 + 1.
    assert (timeline.iteration_ms, timeline.exposed_ms) == (8, 3)


def test_all_to_alls_keep_their_issue_order():
    p = program("A c f 1", "B c f 4", "X a f 2 B", "Y a f 2 A", "C c f 1 Y")
    assert spans(simulate(p, given))["Y", LINK] == (7, 9)


def test_all_reduce_gives_way_to_an_all_to_all_at_once():
    p = program("A c b 1", "R r b 5 A", "B c b 2 A", "X a b 2 B", "C c b 1 X", "S c o 1 R")
    timeline = simulate(p, given)
    # R runs 1-3, X takes the link 3-5, R finishes its remaining 3 ms at 8.
    assert [(e.name, e.start_ms, e.end_ms) for e in timeline.events if e.resource == LINK] == [
        ("R", 1, 3),
        ("X", 3, 5),
        ("R", 5, 8),
    ]
    assert timeline.iteration_ms == 9
    # Compute idles 5 -> no: C runs 5-6; idle with a busy link: 3-5 and 6-8.
    assert timeline.exposed_ms == 4


def test_memory_counts_what_a_late_reader_keeps_alive():
    early = program("A c f 1", "W c b 1 A", "B c b 1 A", "C c b 1 B", outputs=("W",))
    late = early.reordered(["A", "B", "C", "W"])
    # 100 bytes each. Early: A, W, B at once, then W, B, C. Late: A, B, C while C runs.
    assert simulate(early, given).peak_memory_bytes == 300
    assert simulate(late, given).peak_memory_bytes == 300
    chain = program("A c f 1", "B c b 1 A", "C c b 1 B", "D c b 1 C", "W c b 1 A")
    assert simulate(chain, given).peak_memory_bytes == 300
    assert simulate(chain.reordered(["A", "W", "B", "C", "D"]), given).peak_memory_bytes == 200


def test_memory_of_no_time_at_all():
    p = program("A c f 0", "B c f 0 A")
    assert peak_memory(p, [0, 0], [0, 0]) == 200


def test_communication_is_issued_behind_what_it_needs():
    p = program("A c f 1", "B c f 4", "X a f 2 A", "Y a f 2 B", "Z a f 2 A", "C c f 1 X")
    names = [p.instructions[i].name for i in issue_early(p, range(6))]
    assert names == ["A", "X", "B", "Y", "Z", "C"]  # Z stays behind Y: all-to-alls keep their order
    names = [p.instructions[i].name for i in issue_early(p, range(6), fixed={"X"})]
    assert names == ["A", "B", "X", "Y", "Z", "C"]


@examples(150)
@hypothesis_given(random_programs())
def test_issuing_early_changes_no_time(p):
    early = p.reordered(issue_early(p, range(len(p))))
    before, after = simulate(p, given).times, simulate(early, given).times
    for i, instruction in enumerate(p.instructions):
        assert after.start[early.index[instruction.name]] == before.start[i]
        assert after.end[early.index[instruction.name]] == before.end[i]


@examples(150)
@hypothesis_given(random_programs())
def test_every_timeline_is_possible(p):
    timeline = simulate(p, given)
    times = timeline.times
    for i, before in enumerate(p.dependencies):
        assert all(times.end[j] <= times.start[i] + 1e-9 for j in before)
    for resource in (COMPUTE, LINK):
        on_track = sorted((e.start_ms, e.end_ms) for e in timeline.events if e.resource == resource)
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(on_track))
    busy = sum(i.milliseconds for i in p.instructions if i.kind is Kind.COMPUTE)
    everything = sum(i.milliseconds for i in p.instructions)
    assert busy <= timeline.iteration_ms + 1e-9
    assert timeline.iteration_ms <= everything + 1e-9
    # Compute idles only while the link is busy, in front of a valid order.
    assert timeline.iteration_ms == pytest.approx(busy + timeline.exposed_ms)


@examples(100)
@hypothesis_given(random_programs())
def test_all_reduces_never_delay_an_all_to_all(p):
    free = program(
        *(
            f"{i.name} {'c' if i.kind is Kind.COMPUTE else 'a' if i.kind is Kind.ALL_TO_ALL else 'r'} "
            f"{i.phase.value[0]} {0 if i.kind is Kind.ALL_REDUCE else i.milliseconds} "
            f"{' '.join(t for t in i.inputs if t != 'in')}"
            for i in p.instructions
        )
    )
    if any(free.reachability.descendants[r] for r in p.positions(Kind.ALL_REDUCE)):
        return  # something waits for an all-reduce, and so do its all-to-alls
    with_reduces, without = simulate(p, given).times, simulate(free, given).times
    for a in p.positions(Kind.ALL_TO_ALL):
        assert with_reduces.start[a] == pytest.approx(without.start[a])
