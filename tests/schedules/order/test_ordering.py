"""Views of what messages bring go right before the first reader, within a memory limit.

Labels and Algorithm 1 on examples small enough to work out by hand, and on random programs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st

from lancet_kernels.graph.costs.costs import durations
from lancet_kernels.graph.program import Instruction, Kind, Phase, Program, TensorSpec
from lancet_kernels.schedules.order.ordering import (
    assign,
    ordered,
    overlappable,
    read_late,
    units,
    weight_gradients,
)
from lancet_kernels.schedules.time.peak_memory import peak_memory
from lancet_kernels.schedules.time.simulate import simulate
from tests.examples import examples
from tests.schedules.small_programs import (
    backward_of_layers,
    given,
    program,
    random_programs,
    schedule_weight_gradients,
    tiny_step,
)

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


def names_of(p, positions):
    return [p.instructions[i].name for i in positions]


def names(p: Program, order: list[int]) -> str:
    return " ".join(names_of(p, order))


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


def test_what_two_views_share_is_counted_for_both():
    """Y and B send X: Y_view, moved to D, keeps it until then; B_view, behind D, would keep it there, too."""
    lines = "W c f 1", "X c f 1", "V c f 1", "A a f 1", "Y a f 1 W X", "B a f 1 W X A", "D c f 1 W V Y"
    p = with_views(program(*lines))
    limit = peak_memory(p)
    late = read_late(p, range(len(p)), limit)
    assert names(p, late) == "W X V A Y A_view B B_view Y_view D"
    assert peak_memory(p, late) <= limit


@hypothesis_given(
    random_programs().map(with_views), st.randoms(use_true_random=False), st.sampled_from([1.0, 1.2, 9.0])
)
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


def test_labels_by_absence_of_paths():
    p = program("L c f 1", "w1 c b 1 L", "x c b 1 L", "A a b 3 x", "y c b 1 A", "w2 c b 1 A", "B a b 3 y")
    assert names_of(p, weight_gradients(p)) == ["w1", "w2"]
    a, b = p.index["A"], p.index["B"]
    assert overlappable(p) == {p.index["w1"]: 1 << a | 1 << b, p.index["w2"]: 1 << b}


def assigned_names(p) -> dict[str, list[str]]:
    """all-to-all -> weight gradients that overlap it."""
    chosen = assign(p, durations(p, given))
    return {
        p.instructions[a].name: [name for u in units for name in names_of(p, u.positions)]
        for a, units in chosen.items()
    }


A, AB = "x c b 1 L;A a b 4 x;y c b 1 A", "x c b 1 L;A a b 4 x;y c b 1 A;B a b 5 y;z c b 1 B"


@pytest.mark.parametrize(
    ("lines", "assigned"),
    [
        # A (4): 3 and 5 are equally near; the first in order is 5, which overfills it. B gets 3.
        ("w5 c b 5 L;w3 c b 3 L;" + AB, {"A": ["w5"], "B": ["w3"]}),
        # 3 is nearest to 4; the 9 is more than twice the 1 that is left, so it waits for B.
        ("w9 c b 9 L;w3 c b 3 L;" + AB, {"A": ["w3"], "B": ["w9"]}),
        # The last chance is taken even if it does not fit.
        ("w9 c b 9 L;w3 c b 3 L;" + A, {"A": ["w3", "w9"]}),
        # Other work behind an all-to-all fills it already.
        ("w c b 3 L;x c b 1 L;A a b 4 x;free c b 4 x;y c b 1 A free;B a b 1 y", {"B": ["w"]}),
    ],
)
def test_which_gradients_overlap_which_all_to_all(lines, assigned):
    assert assigned_names(program("L c f 1", *lines.split(";"))) == assigned


def test_best_fit_takes_the_gradient_nearest_to_what_is_left():
    p = program("L c f 1", "w2 c b 2 L", "w5 c b 5 L", "w3 c b 3 L", "x c b 1 L", "A a b 7 x", "y c b 1 A")
    # |7 - 5| is least, then of what is left (2) the gradient of 2; 3 stays where it was.
    assert assigned_names(p) == {"A": ["w5", "w2"]}
    scheduled = schedule_weight_gradients(p, given)
    assert [i.name for i in scheduled.instructions] == ["L", "w3", "x", "A", "w2", "w5", "y"]


def test_helpers_move_with_their_gradient_and_the_all_reduce_follows():
    p = program(
        *("L c f 1", "t c b 1 L", "w c b 3 t", "cast c b 1 w", "R r b 2 cast"),
        *("x c b 1 L", "A a b 6 x", "y c b 1 A", "s c o 1 R"),
    )
    assert [names_of(p, u.positions) for u in units(p, durations(p, given))] == [["t", "w", "cast"]]
    order = [i.name for i in schedule_weight_gradients(p, given).instructions]
    assert order == ["L", "x", "A", "t", "w", "cast", "R", "y", "s"]


def test_gradients_of_a_training_step_are_found():
    p = tiny_step()
    found = set(names_of(p, weight_gradients(p)))
    # Of experts, of biases (sums over tokens), and of linear layers (products with a transpose first).
    backward = [i for i in p.instructions if i.phase is Phase.BACKWARD]
    transposes = {i.outputs[0] for i in backward if i.op == "aten.t"}
    expected = {i.name for i in backward if i.op in ("lancet.grouped_gemm_dw", "aten.sum")}
    expected |= {i.name for i in backward if i.op == "aten.mm" and i.inputs[0] in transposes}
    assert len(expected) == 8 + 7 + 2  # products (router and head among them), sums, experts
    assert expected <= found
    assert not any(i.name in found for i in p.instructions if i.phase is not Phase.BACKWARD)


def test_greedy_shortens_a_backward():
    p = backward_of_layers(3, 6.0, [3.0, 2.0, 1.0])
    assert simulate(schedule_weight_gradients(p, given), given).iteration_ms < simulate(p, given).iteration_ms


@examples(150)
@hypothesis_given(random_programs())
def test_every_schedule_is_valid_and_gradients_stand_behind_their_all_to_all(p):
    scheduled = schedule_weight_gradients(p, given)
    assert sorted(i.name for i in scheduled.instructions) == sorted(i.name for i in p.instructions)
    place = scheduled.index
    for all_to_all, moved in assigned_names(p).items():
        a = p.index[all_to_all]
        for gradient in moved:
            i = p.index[gradient]
            assert not (p.descendants[a] >> i & 1)
            assert not (p.descendants[i] >> a & 1)
            assert p.instructions[a].kind is Kind.ALL_TO_ALL
            assert place[all_to_all] < place[gradient]
