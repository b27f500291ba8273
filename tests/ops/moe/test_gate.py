"""The gate as a torch op: checks, gradient, registration, determinism."""

import pytest
import torch
from torch.library import opcheck

from lancet_kernels import ops
from lancet_kernels.ops.moe.gates import GATES
from tests.grids import few_of
from tests.ops.op_cases import no_use, skewed_logits, transposed_in_memory, with_gaps

SPECS = [
    "switch",
    "topk",
    "topk(renormalize=True)",
    "topk(softmax='after')",
    "gshard",
    "batch-prioritized",
    "batch-prioritized(importance='sum')",
    "expert-choice",
    "sigmoid",
    "sigmoid(groups=2,renormalize=False,scale=2.5)",
    "sigmoid(groups=3,top_groups=2)",
]
ONE_OF_EACH = [
    "topk",
    "expert-choice",
    "switch",
    "gshard",
    "batch-prioritized",
    "sigmoid(groups=3,top_groups=2)",
]
"""What torch is told of the op depends on the gate, not on its options."""
KEYED = ["hash", "random"]


def top_k_of(spec: str) -> int:
    return 1 if spec == "switch" else 2


def gate_args(
    spec: str, tokens: int = 7, dtype: torch.dtype = torch.float64, seed: int = 0, kind: str = "normal"
) -> tuple:
    """Arguments of the op for 6 experts and a capacity of 2, which drops some."""
    logits_TE = None if spec in KEYED else skewed_logits(kind, tokens, 6, dtype, seed)
    key_T = torch.arange(tokens) if spec in KEYED else None
    bias_E = torch.linspace(-0.2, 0.2, 6) if spec.startswith("sigmoid") else None
    return logits_TE, no_use(6), key_T, bias_E, spec, top_k_of(spec), 2


def test_every_gate_is_here() -> None:
    assert {spec.partition("(")[0] for spec in SPECS + KEYED} == set(GATES)


@pytest.mark.parametrize("value", few_of([torch.nan, torch.inf, -torch.inf]))
@pytest.mark.parametrize("spec", SPECS)
def test_logits_that_are_not_finite_are_routed(spec: str, value: float) -> None:
    """Somewhere, and to different experts; other tokens have the weights that they had."""
    args = gate_args(spec)
    before_TK = ops.gate(*args)[2]
    args[0][3, 2] = args[0][5] = value
    expert_TK, slot_TK, weight_TK, used_E = ops.gate(*args)
    assert all(len(set(row)) == len(row) and set(row) <= set(range(6)) for row in expert_TK.tolist())
    taken_N = (expert_TK * 2 + slot_TK)[slot_TK < 2]
    assert len(set(taken_N.tolist())) == len(taken_N) == used_E.clamp(max=2).sum()
    others = [t for t in range(7) if t not in (3, 5)]
    assert torch.equal(weight_TK[others], before_TK[others])
    if not (spec.startswith("sigmoid") and value is not torch.nan):  # whose scores are 0 and 1 there
        assert weight_TK[5].isnan().all()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("relayout", few_of([with_gaps, transposed_in_memory]))
def test_memory_layout_does_not_matter(spec: str, relayout) -> None:
    args = gate_args(spec, tokens=33, dtype=torch.float32)
    logits_TE, used_E, *rest = args
    expected = ops.gate(*args)
    actual = ops.gate(relayout(logits_TE), with_gaps(used_E), *rest)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert all(t.is_contiguous() for t in actual)


@pytest.mark.parametrize("spec", few_of(SPECS, 0, 1, 4, 5, 7, 8))
def test_gradcheck(spec: str) -> None:
    args = gate_args(spec)
    logits_TE = args[0].requires_grad_()
    torch.autograd.gradcheck(lambda logits: ops.gate(logits, *args[1:])[2], logits_TE)


def test_integers_carry_no_gradient() -> None:
    args = gate_args("topk")
    args[0].requires_grad_()
    assert [t.requires_grad for t in ops.gate(*args)] == [False, False, True, False]
    assert not any(t.requires_grad for t in ops.gate(*gate_args("hash")))


@pytest.mark.parametrize("spec", few_of(ONE_OF_EACH + KEYED, 0, 2))
def test_opcheck(spec: str) -> None:
    opcheck(torch.ops.lancet.gate.default, gate_args(spec))
    if spec in SPECS:
        logits_TE, *rest = gate_args(spec)
        opcheck(torch.ops.lancet.gate.default, (transposed_in_memory(logits_TE), *rest))


STATIC_UTILS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("spec", few_of(ONE_OF_EACH, 0, 1))
def test_opcheck_with_gradient(spec: str) -> None:
    """opcheck's AOT test adds outputs up in place, which fails for any op whose first output is an integer:
    that part is done here by compiling, forward and backward, with sizes dynamic.
    """
    logits_TE, *rest = gate_args(spec)
    opcheck(torch.ops.lancet.gate.default, (logits_TE.requires_grad_(), *rest), test_utils=STATIC_UTILS)

    torch.compiler.reset()  # one code object for all specs: their guards must not add up
    compiled = torch.compile(
        lambda logits: ops.gate(logits, *rest), backend="aot_eager", fullgraph=True, dynamic=True
    )
    grads = []
    outputs = [compiled(logits_TE), ops.gate(logits_TE, *rest)]
    for _, _, weight_TK, _ in outputs:
        grad_TK = torch.linspace(-1, 1, weight_TK.numel(), dtype=torch.float64).view_as(weight_TK)
        grads.append(torch.autograd.grad(weight_TK, logits_TE, grad_TK)[0])
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    assert torch.equal(*grads)


@pytest.mark.parametrize("spec", few_of(ONE_OF_EACH, 0, 1))
def test_opcheck_backward(spec: str) -> None:
    args = gate_args(spec)
    expert_TK, _, weight_TK, _ = ops.gate(*args)
    for relayout in (torch.clone, transposed_in_memory):
        backward_args = (torch.ones_like(weight_TK), relayout(args[0]), relayout(expert_TK), spec)
        opcheck(torch.ops.lancet.gate_backward.default, backward_args)


def test_slots_of_choices_from_outside() -> None:
    """Part by part, with `used` handed on, they are those of the whole batch; and those of the gate."""
    expert_TK, slot_TK, _, used_E = ops.gate(*gate_args("topk"))
    no_use = torch.zeros_like(used_E)
    assert all(map(torch.equal, ops.assign_slots(expert_TK, no_use), (slot_TK, used_E)))
    slots, used = [], no_use
    for part in expert_TK.split([3, len(expert_TK) - 3]):
        slot, used = ops.assign_slots(part, used)
        slots.append(slot)
    assert torch.equal(torch.cat(slots), slot_TK)
    assert torch.equal(used, used_E)
    opcheck(torch.ops.lancet.assign_slots.default, (expert_TK, used_E))
