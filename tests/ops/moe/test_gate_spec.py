"""Reading and writing a gate's spec, and what is wrong with one."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lancet_kernels.errors import UserError
from lancet_kernels.ops.moe.gates import GATES, Gate, Hash, Sigmoid, TopK, parse_gate
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
