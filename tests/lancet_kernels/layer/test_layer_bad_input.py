"""What MoELayer refuses, in one clear line: on one rank, and on all ranks where they disagree."""

import math

import pytest
import torch
import torch.distributed as dist

from lancet_kernels import MoELayer, UserError, moe_losses
from lancet_kernels.ops.moe.gate import Gate
from lancet_kernels.ops.moe.gates import GATES, TopK
from tests.refusals import refusal

BAD_LAYERS = {
    "d_model": ({"d_model": 0}, "d_model: got 0, expected at least 1"),
    "d_ff": ({"d_ff": -1}, "d_ff: got -1, expected at least 1"),
    "num_experts": ({"num_experts": 0}, "num_experts: got 0, expected at least 1"),
    "top_k": ({"gate": "topk", "top_k": 5}, r"top_k: got 5, expected 1 to num_experts \(4\)"),
    "capacity 0": ({"capacity_factor": 0}, "capacity_factor: got 0, expected a positive number, or None"),
    "capacity nan": ({"capacity_factor": math.nan}, "capacity_factor: got nan"),
    "dropless expert choice": (
        {"gate": "expert-choice", "capacity_factor": None},
        "capacity_factor of gate expert-choice: got None, expected a number",
    ),
    "gate": ({"gate": "best"}, f"gate: got 'best', expected one of {', '.join(GATES)}"),
    "activation": ({"activation": "relu"}, "activation: got 'relu', expected one of gelu, silu, swiglu"),
    "shared": ({"shared_expert_d_ff": 0}, "shared_expert_d_ff: got 0"),
    "d_model of no number": ({"d_model": None}, "d_model: got None, expected a whole number"),
    "fractional experts": ({"num_experts": 2.5}, "num_experts: got 2.5, expected a whole number"),
    "top_k as float": ({"gate": "topk", "top_k": 2.0}, "top_k: got 2.0, expected a whole number"),
    "top_k as bool": ({"top_k": True}, "top_k: got True, expected a whole number"),
    "shared as text": ({"shared_expert_d_ff": "8"}, "shared_expert_d_ff: got '8', expected a whole number"),
    "capacity as text": ({"capacity_factor": "1.25"}, "capacity_factor: got '1.25', expected a positive"),
    "no gate": ({"gate": None}, "gate: got None, expected one of switch, .*, or a Gate"),
    "device": ({"device": "cuda"}, "device: got 'cuda', expected a device that this machine has"),
    "no device": ({"device": "gpu"}, "device: got 'gpu', expected a device of torch"),
    "dtype": ({"dtype": "bf16"}, "dtype: got 'bf16', expected a floating-point dtype"),
    "class as gate": ({"gate": GATES["topk"]}, "gate: got <class .*, or a Gate"),
}


class Unnamed(TopK):
    """A gate that was given no name of its own."""


def of_attributes(**attributes: object) -> Gate:
    """A gate that sends every token to experts 0, 1, ..., registered as "own"."""
    first = {"select": lambda self, logits, *_: torch.arange(2).expand(len(logits), 2)}
    GATES["own"] = type("Own", (Gate,), {"name": "own", **first, **attributes})
    return GATES["own"]()


def test_bad_gates_of_users(monkeypatch):
    """None of them routes as another gate does."""
    monkeypatch.setitem(GATES, "own", Gate)

    def check(message: str, gate: Gate) -> None:
        with pytest.raises(UserError, match=message) as caught:
            MoELayer(4, 8, 4, gate=gate, top_k=2)(torch.zeros(3, 4))
        assert_one_line(caught.value)

    check("gate Unnamed: got name 'topk', which is not that of this class in GATES", Unnamed())
    check("key of gate own: got 'tokens', expected one of token, index", of_attributes(key="tokens"))
    check("score of gate own: got 'tanh', expected one of softmax, sigmoid", of_attributes(score="tanh"))
    three = torch.zeros(3, 3, dtype=torch.int64)
    check(r"select of gate own: got \[3, 3\] of torch.int64", of_attributes(select=lambda *_: three))
    check("torch.int32, expected .* of torch.int64", of_attributes(select=lambda *_: three[:, :2].int()))
    routed = [
        MoELayer(4, 8, 4, gate=of_attributes(select=lambda *_, experts=experts: experts), top_k=2)(
            torch.ones(3, 4), return_sums=True
        )[1].assigned_E
        for experts in (three[:, :2] + torch.arange(2), three[:, :2] + torch.tensor([2, 3]))
    ]
    assert routed[0].tolist() == [3, 3, 0, 0]
    assert routed[1].tolist() == [0, 0, 3, 3], "a gate that is defined anew counts"


@pytest.mark.parametrize("name", BAD_LAYERS)
def test_bad_layer(name, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    changes, message = BAD_LAYERS[name]
    with pytest.raises(UserError, match=message) as caught:
        MoELayer(**{"d_model": 4, "d_ff": 8, "num_experts": 4} | changes)
    assert_one_line(caught.value)


def test_bad_input():
    layer = MoELayer(4, 8, 4)
    ids = torch.zeros(3, dtype=torch.int64)
    for given, message in [
        ({"x": torch.zeros(3, 5)}, r"input of MoELayer: got shape \[3, 5\], expected \[..., 4\]"),
        ({"x": None}, "input of MoELayer: got a NoneType, expected a tensor; give"),
        ({"token_ids": [0, 1, 2]}, "token_ids of MoELayer: got a list, expected a tensor"),
        ({"x": torch.zeros(())}, r"got shape \[\], expected \[..., 4\]"),
        ({"x": torch.zeros(3, 4, dtype=torch.float64)}, "got torch.float64, expected torch.float32"),
        ({"token_ids": ids}, r"token_ids of MoELayer: got shape \[3\], expected \[2\]"),
        ({"token_ids": ids[:2].float()}, "token_ids of MoELayer: got torch.float32, expected int64"),
        ({"mask": torch.ones(4)}, "mask of MoELayer: got torch.float32, expected bool"),
        ({"mask": ids.bool()}, r"mask of MoELayer: got shape \[3\], expected \[2\]"),
        ({"x": torch.zeros(2, 3, 4), "mask": ids.bool().expand(2, 3).T}, r"got shape \[3, 2\], expected"),
        ({"mask": [1, 1]}, "mask of MoELayer: got a list, expected a tensor"),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            layer(**{"x": torch.zeros(2, 4)} | given)
        assert_one_line(caught.value)
    y, sums = layer(torch.zeros(3, 4), return_sums=True)
    of_six = MoELayer(4, 8, 6)(torch.zeros(3, 4), return_sums=True)[1]
    for wrong, message in [
        ([], "sums: got none, expected one RoutingSums per MoE layer"),
        (sums, "sums: got a RoutingSums, expected one"),
        (y, "sums: got a Tensor, expected one"),
        ([sums, y], "sums: got a Tensor in the list, expected one"),
        ([sums, of_six], r"sums: got layers of \d and 6 experts, expected as many"),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            moe_losses(wrong)
        assert_one_line(caught.value)


def assert_one_line(error: UserError) -> None:
    text = str(error)
    assert "\n" not in text
    assert ": got " in text
    assert ", expected " in text
    assert "; " in text, "no word on what to do"


def odd_experts_on_rank() -> str:
    return refusal(lambda: MoELayer(4, 8, 3))


def test_experts_that_do_not_divide(pool):
    message = "num_experts: got 3, expected a multiple of the 2 ranks of the group; change the number of "
    assert pool.run(odd_experts_on_rank) == [message + "experts or of ranks"] * 2


def disagree_on_rank(what: str) -> str:
    """Rank 1's layer differs in `what`. -> the error."""
    odd = dist.get_rank() == 1
    dtype = torch.bfloat16 if what == "dtype" and odd else torch.float32
    width = 16 if what == "width" and odd else 8
    experts = 8 if what == "experts" and odd else 4
    layer = MoELayer(width, 8, experts, dtype=dtype)
    return refusal(lambda: layer(torch.randn(16, width, dtype=dtype)))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("dtype", "(8, 'float32', 2) on rank 0 and (8, 'bfloat16', 2) on rank 1"),
        ("width", "(8, 'float32', 2) on rank 0 and (16, 'float32', 2) on rank 1"),
        ("experts", "(8, 'float32', 2) on rank 0 and (8, 'float32', 4) on rank 1"),
    ],
)
def test_ranks_that_disagree_all_raise(pool, what, message):
    results = pool.run(disagree_on_rank, what, ranks=2)
    for error in results:
        assert error.startswith("MoE layer across ranks"), error
    assert message in results[0]
    first, second = message.split(" and ")
    assert f"{second} and {first}" in results[1]
