"""Equations and rules against cuts written down by hand."""

import pytest

from lancet_kernels.graph.ops import rule_for
from lancet_kernels.graph.program import Instruction, TensorSpec
from lancet_kernels.graph.rules.derived import elementwise, parse, permute, view
from lancet_kernels.graph.rules.rules import CARRIED, IRREGULAR, PARTIAL, WHOLE, WINDOW


def cuts(op, inputs, outputs, *, only_experts=False, **attributes):
    """Every way to cut an op; a cut is the number of its dimension."""
    shapes = {f"i{n}": s for n, s in enumerate(inputs)} | {f"o{n}": s for n, s in enumerate(outputs)}
    specs = {n: TensorSpec(n, s) for n, s in shapes.items()}
    names = tuple(f"i{n}" for n in range(len(inputs))), tuple(f"o{n}" for n in range(len(outputs)))
    instruction = Instruction("i", op, *names, attributes=attributes)
    ways = rule_for(instruction).assignments(instruction, specs, only_experts=only_experts)
    return {tuple(form.dimension if form.is_cut else form for form in way) for way in ways}


def test_parse():
    e = parse("... d, f d -> ... f", (3, 2, 3))
    assert e.inputs == ((".1", ".0", "d"), ("f", "d"))
    assert e.outputs == ((".1", ".0", "f"),)
    assert e.contractions == {"d"}
    assert e.cuttable == [".0", ".1", "f"]
    e = parse("t+ e -> e", (2, 1))
    assert (e.cuttable, e.summed) == (["e", "t"], {"t"})
    with pytest.raises(AssertionError, match="inputs -> outputs"):
        parse("a b", (2,))
    with pytest.raises(AssertionError, match="1 operands"):
        parse("a -> a", (1,))
    with pytest.raises(AssertionError, match="rank 3"):
        parse("a b -> a", (3, 1))


def test_derived_equations():
    assert elementwise([(4, 8), (8,)], [(4, 8)], {}) == "x1 x0, x0 -> x1 x0"
    assert elementwise([(4, 1), ()], [(4, 8)], {}) == "x1 1, - -> x1 x0"
    assert permute([(1, 2, 3)], [(3, 1, 2)], {"dims": (2, 0, 1)}) == "x0 x1 x2 -> x2 x0 x1"
    assert view([(4, 8, 6)], [(32, 6)], {}) == "x0 inner! x2 -> x0 x2"


def test_example_of_the_paper():
    assert cuts("aten.mm", [(4, 5), (5, 6)], [(4, 6)]) == {(0, WHOLE, 0), (WHOLE, 1, 1)}


@pytest.mark.parametrize(
    ("kind", "besides"),
    [
        ("flash", [(2, 4, 6), (2,), (), (0,)]),
        ("efficient", [(2, 4, 32), (), ()]),
        ("cudnn", [(2, 4, 6, 1), (), ()]),
    ],
)
def test_attention_as_cuda_has_it(kind, besides):
    """What torch 2.13's meta functions say it returns; seeds count for nothing without dropout."""
    shape = (2, 4, 6, 8)
    attention = f"aten._scaled_dot_product_{kind}_attention", [shape] * 3, [shape, *besides]
    seeds = [CARRIED] * (len(besides) - 1)
    assert cuts(*attention, dropout_p=0.0) == {(*[n] * 5, *seeds) for n in (0, 1)}
    assert cuts(*attention, dropout_p=0.1) == set()


def test_how_often_an_index_appears_is_known_of_the_whole_batch_alone():
    embedding = "aten.embedding", [(9, 8), (2, 4)], [(2, 4, 8)]
    assert cuts(*embedding) == {(WHOLE, 0, 0), (WHOLE, 1, 1), (1, WHOLE, 2)}
    assert cuts(*embedding, scale_grad_by_freq=True) == {(1, WHOLE, 2)}


W, E, ROWS, D, F, TOKENS = 2, 3, 32, 4, 6, 16


def test_moe_ops_turn_the_batch_irregular_and_back():
    routing = [(TOKENS, 2)] * 3
    used = (W * E,)
    gate = [(TOKENS, W * E), used], [*routing, used]
    assert cuts("lancet.gate", *gate) == {(0, WHOLE, 0, 0, 0, CARRIED)}
    assert cuts("lancet.gate", *gate, partitionable=False) == set()
    assert cuts("lancet.send_rows", [*routing[:2], (W, E)], [routing[0]]) == {(0, 0, IRREGULAR, 0)}
    assert cuts("lancet.dispatch", [(TOKENS, D), routing[0]], [(ROWS, D)]) == {(0, 0, IRREGULAR)}
    assert cuts("lancet.combine", [(ROWS, D), *routing[:2]], [(TOKENS, D)]) == {(IRREGULAR, 0, 0, 0)}
    assert cuts("lancet.exchange_counts", [(W, E)], [(W, E)]) == {(IRREGULAR, IRREGULAR)}


def test_rows_are_cut_only_where_nothing_but_experts_is_in_the_range():
    exchange = "lancet.all_to_all", [(ROWS, D), (W, E), (W, E)], [(ROWS, D)]
    assert cuts(*exchange) == {(IRREGULAR,) * 4}
    assert cuts(*exchange, only_experts=True) == {(WINDOW, WHOLE, WHOLE, WINDOW)}
    experts = "lancet.grouped_gemm", [(ROWS, D), (W, E), (E, D, F)], [(ROWS, F)]
    assert cuts(*experts) == {(IRREGULAR, IRREGULAR, WHOLE, IRREGULAR)}
    assert cuts(*experts, only_experts=True) == {(WINDOW, WHOLE, WHOLE, WINDOW)}
    wgrad = "lancet.grouped_gemm_dw", [(ROWS, D), (ROWS, F), (W, E)], [(E, D, F)]
    assert cuts(*wgrad, only_experts=True) == {(WINDOW, WINDOW, WHOLE, PARTIAL)}


def test_ops_that_depend_on_the_whole_batch_have_no_rule():
    assert rule_for(Instruction("i", "aten.native_dropout")) is None
    assert rule_for(Instruction("i", "aten.sort")) is None
