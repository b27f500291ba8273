"""Start and end times against ones worked out by hand."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st

from lancet_kernels.graph.costs.costs import durations
from lancet_kernels.graph.program import Kind, Program
from lancet_kernels.schedules.order.ordering import Ready, issue_early
from lancet_kernels.schedules.time.peak_memory import MemoryBudget, Storages, alive_bytes, peak_memory
from lancet_kernels.schedules.time.simulate import COMPUTE, LINK, simulate
from lancet_kernels.schedules.time.timeline import Prediction
from tests.examples import examples
from tests.schedules.small_programs import given, program, random_programs


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


def test_microbatches_sum_gradients_in_the_last_one():
    p = program("A c b 2", "R r b 1 A", "B c b 3")
    shared = tuple(replace(i, microbatches=4) if i.name == "R" else i for i in p.instructions)
    timeline = simulate(replace(p, instructions=shared), given)
    # Three without R, which then takes 4 ms: 2-6, beside B.
    assert spans(timeline)["R", LINK] == (2, 6)
    assert (timeline.times.last_ms, timeline.iteration_ms, timeline.exposed_ms) == (6, (3 * 5 + 6) / 4, 1 / 4)
    predicted = Prediction.of(timeline)
    assert predicted.exposed_by == {"all_reduce": 1 / 4}
    assert predicted.lower_bound_ms == (3 * 5 + 6) / 4


def test_all_to_alls_keep_their_issue_order():
    p = program("A c f 1", "B c f 4", "X a f 2 B", "Y a f 2 A", "C c f 1 Y")
    assert spans(simulate(p, given))["Y", LINK] == (7, 9)


def test_a_message_waits_for_the_computation_in_front_of_it():
    lines = ["A c f 1", "B c f 4", "X a f 2 A", "C c f 1 X"]
    assert spans(simulate(program(*lines), given))["X", LINK] == (5, 7)
    assert spans(simulate(program(lines[0], lines[2], lines[1], lines[3]), given))["X", LINK] == (1, 3)


def test_an_all_reduce_under_way_is_not_interrupted_and_no_other_goes_before_an_all_to_all():
    p = program(
        "A c b 1", "R r b 5 A", "B c b 2 A", "S r b 4 B", "X a b 2 B", "C c b 1 X", "D c o 1 R", "E c o 1 S"
    )
    timeline = simulate(p, given)
    assert [(e.name, e.start_ms, e.end_ms) for e in timeline.events if e.resource == LINK] == [
        ("R", 1, 6),
        ("X", 6, 8),
        ("S", 8, 12),
    ]
    # Compute idles 3-8 and 10-12, and the link is busy all that time.
    assert (timeline.iteration_ms, timeline.exposed_ms) == (13, 7)


def test_links_work_side_by_side():
    p = program("A c f 1", "X a f 3 A", "Y a f 2 A", "Z a f 1 X", "B c f 1 Y", "C c f 1 Z")
    elsewhere = replace(p.instructions[2], attributes={"link": "second"})
    both = replace(p, instructions=(*p.instructions[:2], elsewhere, *p.instructions[3:]))
    assert spans(simulate(p, given))["Y", LINK] == (4, 6)
    timeline = simulate(both, given)
    assert spans(timeline)["Y", "second"] == (1, 3)
    assert spans(timeline)["Z", LINK] == (4, 5)
    # Idle: 1-3 with both links busy, 4-5 with one.
    assert (timeline.iteration_ms, timeline.exposed_ms) == (6, 3)


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
    assert peak_memory(program("A c f 0", "B c f 0 A")) == 200


def test_what_is_sent_is_held_until_somebody_waits():
    # At C, 100 bytes each: what X sends and what it receives, B and C; had D waited before C, less.
    p = program("A c f 1", "X a f 1 A", "B c f 1", "C c f 1 B", "D c f 1 X")
    assert peak_memory(p) == 400
    assert peak_memory(p, [p.index[name] for name in "AXDBC"]) == 300
    with_view = replace(
        p, tensors={**p.tensors, "D": replace(p.tensors["D"], bytes=0, alias_of="X")}, outputs=("D",)
    )
    # X stays, because its view is an output; A is freed behind D.
    assert alive_bytes(Storages(with_view)) == [100, 200, 300, 400, 200]


@examples(150)
@hypothesis_given(random_programs(), st.randoms(use_true_random=False), st.floats(1.0, 1.3))
def test_a_memory_budget_never_lets_the_limit_be_passed(p, random, more):
    limit = int(more * peak_memory(p))
    budget = MemoryBudget(Storages(p), limit)
    dependencies, order = Ready(p), []
    ready = {*dependencies.at_first}
    while ready:
        assert budget.first not in ready or budget.admits(budget.first)
        i = random.choice([i for i in sorted(ready) if budget.admits(i)])
        budget.issue(i)
        order.append(i)
        ready = ready - {i} | {*dependencies.done(i)}
    assert len(order) == len(p)
    assert peak_memory(p, order) <= limit


def test_communication_is_issued_behind_what_it_needs():
    p = program("A c f 1", "B c f 4", "X a f 2 A", "Y a f 2 B", "Z a f 2 A", "C c f 1 X")
    names = [p.instructions[i].name for i in issue_early(p, range(6))]
    assert names == ["A", "X", "B", "Y", "Z", "C"]  # Z stays behind Y: all-to-alls keep their order
    names = [p.instructions[i].name for i in issue_early(p, range(6), fixed={"X"})]
    assert names == ["A", "B", "X", "Y", "Z", "C"]


def event_loop(program: Program, ms: Sequence[float]) -> tuple[list[float], list[float]]:
    """Start and end by position, by looking at every moment at which something ends, without all-reduces.

    A message starts when its inputs are there and the link is free, in issue order.
    """
    pending = [len(before) for before in program.dependencies]
    queues: list[list[int]] = [[], []]
    for i, instruction in enumerate(program.instructions):
        queues[instruction.kind.is_communication].append(i)
    start, end = [0.0] * len(program), [0.0] * len(program)
    running: list[int | None] = [None, None]
    now = 0.0
    while any(queues) or any(i is not None for i in running):
        for k, queue in enumerate(queues):
            if running[k] is None and queue and not pending[queue[0]]:
                running[k] = queue.pop(0)
                start[running[k]] = now
        now = min(start[i] + ms[i] for i in running if i is not None)
        for k, i in enumerate(running):
            if i is not None and start[i] + ms[i] <= now:
                end[i], running[k] = now, None
                for j in program.dependents[i]:
                    pending[j] -= 1
    return start, end


@examples(150)
@hypothesis_given(random_programs(all_reduces=False))
def test_the_clock_agrees_with_an_event_loop_where_messages_are_issued_early(p):
    early = p.reordered(issue_early(p, range(len(p))))
    after = simulate(early, given).times
    start, end = event_loop(early, durations(early, given))
    assert (after.start, after.end) == (dict(enumerate(start)), dict(enumerate(end)))
    # Issued later, nothing gets earlier.
    before = simulate(p, given).times
    assert all(after.end[early.index[x.name]] <= before.end[i] for i, x in enumerate(p.instructions))


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
def test_no_all_reduce_starts_while_an_all_to_all_could(p):
    timeline = simulate(p, given).times
    issued, free = 0.0, 0.0
    for a, instruction in enumerate(p.instructions):
        if instruction.kind is Kind.COMPUTE:
            issued = timeline.end[a]
        elif instruction.kind is Kind.ALL_TO_ALL:
            ready = max([issued, free, *(timeline.end[j] for j in p.dependencies[a])])
            free = timeline.end[a]
            for r in p.positions(Kind.ALL_REDUCE):
                assert not ready <= timeline.start[r] < timeline.end[r] <= timeline.start[a]
