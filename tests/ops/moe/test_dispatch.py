"""Ops on the path that they take on a GPU: the Triton kernels, here in the interpreter.

They give what torch's path gives, and never ask the device for a number: the host need not wait, and a CUDA
graph can capture them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lancet_kernels import ops
from lancet_kernels.kernels.runtime import INTERPRETED
from lancet_kernels.ops.moe import dispatch
from lancet_kernels.ops.moe.gates import GATES, parse_gate
from tests.grids import few_of
from tests.ops.moe.test_gate import gate_args
from tests.ops.op_cases import routed_batch

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here: see the tests marked gpu")

# They make the host wait for a GPU.
WAITING = {
    "_local_scalar_dense", "nonzero", "bincount", "masked_select", "unique", "_unique2", "equal", "item",
}  # fmt: skip


class NoQuestions(TorchDispatchMode):
    """Refuses what would need a number from the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").partition(".")[0]
        assert name not in WAITING, f"{name} makes the host wait"
        if name == "index":
            assert all(i is None or i.dtype != torch.bool for i in args[1]), (
                "a mask as index makes the host wait"
            )
        if name == "repeat_interleave":
            assert (kwargs or {}).get("output_size") is not None, "repeat_interleave makes the host wait"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def in_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """Runs an op twice, in torch and in kernels. -> both results; `.alone`: in kernels only."""

    def in_kernels_alone(op: Any, *args: object) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "_kernels_run_on", lambda device: True)
            # The implementation itself: inside a dispatched op the mode would not see anything.
            with NoQuestions():
                return (getattr(op, "function", None) or op._init_fn)(*args)

    def both(op: Any, *args: object) -> tuple[Any, Any]:
        return op(*args), in_kernels_alone(op, *args)

    both.alone = in_kernels_alone
    return both


def test_the_guard_sees_what_waits() -> None:
    for question in (
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.bincount(x),
        lambda x: torch.repeat_interleave(x, x),
    ):
        with pytest.raises(AssertionError, match="wait"), NoQuestions():
            question(torch.tensor([1, 2]))


@pytest.mark.parametrize("kind", few_of(["normal", "ties", "one"]))
@pytest.mark.parametrize("name", [*GATES, "topk(softmax='after')", "sigmoid(groups=2,top_groups=1)"])
def test_gate(name: str, kind: str, in_kernels: Callable) -> None:
    logits, used, *rest = gate_args(name, 29, torch.float32, 3, kind)
    if parse_gate(name).partitionable:  # the others take a batch as a whole: no slot is used before
        used = torch.arange(len(used)) % 3
    expected, found = in_kernels(ops.gate, logits, used, *rest)
    for what, one, other in zip(("expert", "slot", "weight", "used"), expected, found, strict=True):
        assert torch.equal(one, other), what


def batch_in_float32():
    return routed_batch(
        tokens=23, width=12, ranks=2, local_experts=3, top_k=2, capacity=5, dtype=torch.float32
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_dispatch_and_combine(weighted: bool, in_kernels: Callable) -> None:
    batch = batch_in_float32()
    weight, row = batch.routing.weight_TK.float() if weighted else None, batch.row_TK
    expected, found = in_kernels(ops.dispatch, batch.x_TD, row, weight, row.numel())
    assert found.shape[0] == row.numel() > batch.num_rows  # the host does not know how many are real
    assert torch.equal(expected, found[: batch.num_rows])
    found[batch.num_rows :] = torch.nan
    torch.testing.assert_close(*in_kernels(ops.combine, found, row, weight), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(*in_kernels(ops.combine_dweight, batch.x_TD, found, row))


def test_rows_of_a_part(in_kernels: Callable) -> None:
    batch = batch_in_float32()
    places = batch.routing.expert_TK, batch.routing.slot_TK
    assert torch.equal(*in_kernels(ops.send_rows, *places, batch.count_WL))
    expected, found = in_kernels(ops.part_rows, *places, batch.num_experts, batch.capacity)
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("kind", ["gelu", "silu", "swiglu"])
def test_activation(kind: str, in_kernels: Callable) -> None:
    """With rows of NaN behind the real ones, which the torch path is not given."""
    count = batch_in_float32().count_WL
    real = int(count.sum())
    rng = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=rng)  # noqa: E731
    hidden, wide = 16, 32 if kind == "swiglu" else 16
    dh, da = make(real, wide), make(real, hidden)
    for op, args in (
        (ops.expert_activation, (dh, count, kind)),
        (ops.expert_activation_backward, (da, dh, count, kind)),
    ):
        more = [
            torch.nn.functional.pad(a, (0, 0, 0, 5), value=torch.nan)
            if isinstance(a, Tensor) and a.is_floating_point() and len(a) == real
            else a
            for a in args
        ]
        expected, found = op(*args), in_kernels.alone(op, *more)
        torch.testing.assert_close(expected, found[: len(expected)], rtol=1e-5, atol=1e-5)
