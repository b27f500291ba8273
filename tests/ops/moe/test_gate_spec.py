"""Reading and writing a gate's spec, what is wrong with one, and options that cannot be."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lancet_kernels.errors import UserError
from lancet_kernels.ops.moe.gates import (
    GATES,
    BatchPrioritized,
    Gate,
    GShard,
    Hash,
    Sigmoid,
    Switch,
    TopK,
    parse_gate,
)
from tests.ops.op_cases import QUICK

OPTIONS = {
    bool: st.booleans(),
    int: st.integers(-(2**70), 2**70),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(max_size=8),
}


@st.composite
def gates(draw: st.DrawFn) -> Gate:
    """Any gate with any options of the right types: a spec need not be sensible to be read back."""
    kind = draw(st.sampled_from(list(GATES.values())))
    return kind(**{f.name: draw(OPTIONS[type(f.default)]) for f in dataclasses.fields(kind)})


@QUICK
@given(gate=gates())
def test_round_trip(gate: Gate) -> None:
    again = parse_gate(str(gate))
    assert again == gate
    assert type(again) is type(gate)
    assert str(again) == str(gate)


def test_specs_by_hand() -> None:
    assert str(TopK()) == "topk"
    assert str(TopK(renormalize=True)) == "topk(renormalize=True)"
    assert parse_gate("topk()") == TopK()
    assert parse_gate(" topk (softmax='after', renormalize=True)") == TopK("after", True)
    assert parse_gate("hash(seed=-3)") == Hash(seed=-3)
    assert parse_gate("batch-prioritized") == BatchPrioritized("max")
    assert TopK() == TopK(softmax="before", renormalize=False, groups=1, top_groups=1, scale=1.0)
    assert Sigmoid() == Sigmoid(groups=1, top_groups=1, renormalize=True, scale=1.0)
    assert parse_gate("sigmoid(groups=4,top_groups=2,scale=2)") == Sigmoid(groups=4, top_groups=2, scale=2.0)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "got '', expected one of switch, topk, gshard"),
        ("best", "got 'best', expected one of"),
        ("topk)", "expected one of"),
        ("topk(", r"got 'topk\(', expected a closing bracket; write topk, or topk\(option=value\)"),
        ("topk(=)", "name=value pairs of: softmax, renormalize, groups, top_groups, scale; write"),
        ("topk() + 1", "name=value pairs of"),
        ("topk(True)", "name=value pairs of"),
        ("topk(**{'renormalize': True})", "name=value pairs of"),
        (
            "topk(softmax=before)",
            r"softmax of gate topk: got before, expected text in quotes; write topk\(softmax='before'\), say",
        ),
        ("topk(renormalize=yes)", "renormalize of gate topk: got yes, expected a Python literal; write"),
        ("topk(seed=1)", "name=value pairs of: softmax, renormalize, groups, top_groups, scale; write"),
        ("topk(softmax='after', softmax='before')", "name=value pairs of"),
        ("topk(renormalize=__import__('os'))", "got __import__.'os'., expected a Python literal"),
        ("switch(renormalize=True)", "name=value pairs of: none; write"),
        ("topk(renormalize=1)", "renormalize of gate topk: got 1, expected bool"),
        ("topk(softmax=['after'])", "softmax of gate topk: got .*, expected str"),
        ("sigmoid(groups=True)", "groups of gate sigmoid: got True, expected int"),
        ("sigmoid(scale='big')", "scale of gate sigmoid: got 'big', expected float"),
    ],
)
def test_wrong_specs(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_gate(spec)
    assert "\n" not in str(caught.value)


def test_wrong_options_of_a_gate_object() -> None:
    with pytest.raises(UserError, match="groups of gate sigmoid: got 'a', expected int, such as 1"):
        Sigmoid(groups="a")
    with pytest.raises(TypeError):
        Sigmoid(4)  # by position it would be the scale


@pytest.mark.parametrize(
    ("gate", "experts", "top_k", "message"),
    [
        *((TopK(), 4, top_k, f"got {top_k}, expected 1 to num_experts") for top_k in (0, 5, -1)),
        (TopK(softmax="between"), 4, 2, "got 'between', expected one of before, after"),
        (Switch(), 4, 2, "got 2, expected 1"),
        (GShard(), 4, 1, "got 1, expected 2"),
        (GShard(), 1, 2, "got 2, expected 1 to num_experts"),
        (BatchPrioritized(importance="mean"), 4, 2, "got 'mean', expected one of max, sum"),
        (BatchPrioritized(), 4, 5, "top_k"),
        (Sigmoid(groups=3), 8, 2, "groups of gate sigmoid: got 3, expected a divisor"),
        (Sigmoid(groups=0), 8, 2, "groups of gate sigmoid: got 0, expected a divisor"),
        (Sigmoid(groups=4, top_groups=5), 8, 2, "top_groups of gate sigmoid: got 5"),
        (Sigmoid(groups=4, top_groups=0), 8, 2, "top_groups of gate sigmoid: got 0"),
        (Sigmoid(groups=4, top_groups=1), 8, 3, "at least top_k .3. experts"),
        *((Sigmoid(scale=x), 8, 2, f"scale of gate sigmoid: got {x}") for x in (0.0, math.inf, math.nan)),
        (Sigmoid(), 8, 9, "top_k"),
    ],
    ids=str,
)
def test_what_cannot_be(gate: Gate, experts: int, top_k: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        gate.check(experts, top_k)
