"""Views of what messages bring go right before the first reader, within a memory limit."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lancet_kernels.graph.program.program import Instruction, Program, TensorSpec
from lancet_kernels.schedules.order.ordering import ordered, read_late
from lancet_kernels.schedules.time.peak_memory import peak_memory
from tests.schedules.made_programs import program, random_programs

VIEW = "aten.view"


def with_views(made: Program) -> Program:
    """The program with a view behind each message, which all readers read."""
    instructions, tensors, viewed = [], dict(made.tensors), dict[str, str]()
    for i in made.instructions:
        instructions.append(replace(i, inputs=tuple(viewed.get(t, t) for t in i.inputs)))
        if i.kind.is_communication:
            name = viewed[i.name] = f"{i.name}_view"
            tensors[name] = TensorSpec(name, (1,), "int8", alias_of=i.name)
            instructions.append(Instruction(name, VIEW, (i.name,), (name,), phase=i.phase, milliseconds=0.0))
    return Program(made.name, tuple(instructions), tensors, made.inputs, made.outputs)


def names(p: Program, order: list[int]) -> str:
    return " ".join(p.instructions[i].name for i in order)


STEP = with_views(program("A c f 1", "X a f 2 A", "B c f 1 A", "C c f 1 B", "D c f 1 X C"))


def test_a_view_goes_to_its_first_reader():
    assert names(STEP, read_late(STEP, range(len(STEP)))) == "A X B C X_view D"


def test_a_view_that_nothing_reads_comes_last():
    p = with_views(program("A c f 1", "X a f 2 A", "B c f 1 A"))
    assert names(p, read_late(p, range(len(p)))) == "A X B X_view"


def test_what_was_sent_needs_memory_until_the_view():
    """A is sent: until X_view it stays beside X, B and then C; without it there is room for C."""
    peak = peak_memory(STEP)
    assert names(STEP, read_late(STEP, range(len(STEP)), peak)) == names(STEP, [*range(len(STEP))])
    assert names(STEP, read_late(STEP, range(len(STEP)), peak + 100)) == "A X B C X_view D"


@given(random_programs().map(with_views), st.randoms(use_true_random=False), st.sampled_from([1.0, 1.2, 9.0]))
def test_any_order_stays_valid_and_within_the_limit(p, random, room):
    keys = [random.random() for _ in range(len(p))]
    order = ordered(p, keys.__getitem__)
    limit = room * peak_memory(p, order)
    late = read_late(p, order, limit)
    p.reordered(late)
    assert peak_memory(p, late) <= limit
    others = [i for i in order if p.instructions[i].op != VIEW]
    assert [i for i in late if p.instructions[i].op != VIEW] == others
    place = {i: k for k, i in enumerate(read_late(p, order))}
    for i in place:
        if p.instructions[i].op == VIEW and p.dependents[i]:
            between = range(place[i] + 1, min(place[j] for j in p.dependents[i]))
            assert all(p.instructions[j].op == VIEW for j in place if place[j] in between)
