"""A step's objects are found by a number while somebody has it; what the process does now is restored.

An `Op` gives the same eagerly, with its autograd formula, and in a graph.
"""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from lancet_kernels import optimize
from lancet_kernels.errors import UserError
from lancet_kernels.ops.base import Context, context_of, during, now, op


def test_a_context_is_found_by_its_number_until_it_is_gone():
    one, other = Context("sums"), Context("other sums")
    one.layers["dispatch_1"] = "exchange"
    assert context_of(one.number).layers == {"dispatch_1": "exchange"}
    assert context_of(other.number).accumulation == "other sums"
    number = one.number
    assert copy.deepcopy({"of a graph": one})["of a graph"] is one
    del one
    with pytest.raises(KeyError):
        context_of(number)


def test_what_the_process_does_is_restored_after_an_error():
    with during(layer="outer"):
        with contextlib.suppress(ZeroDivisionError), during(layer="inner", runs_a_plan=True):
            assert (now.layer, now.runs_a_plan, now.expects_sizes) == ("inner", True, False)
            raise ZeroDivisionError
        assert (now.layer, now.runs_a_plan) == ("outer", False)


def test_a_backward_finds_its_context_when_the_module_is_gone():
    step = optimize(nn.Linear(4, 1), (torch.ones(2, 4),), strategy="none", cluster="local")
    context = weakref.ref(step._step.context)
    loss = step(torch.ones(2, 4)).sum()
    del step
    gc.collect()
    assert context() is not None
    loss.backward()
    del loss
    gc.collect()
    assert context() is None


@op("lancet_test::times")
def times(x: Tensor, factor: float = 2.0) -> Tensor:
    """x * factor."""
    return x * factor


@times.register_fake
def _(x, factor=2.0):
    return torch.empty_like(x)


def _setup_context(ctx, inputs, output) -> None:
    ctx.factor = inputs[1]


times.register_autograd(lambda ctx, dy: (times(dy, ctx.factor), None), setup_context=_setup_context)


def test_forward_derivatives_are_refused() -> None:
    """torch's jvp gives zero for a `custom_op` whose inputs train nothing, without a word."""
    x = torch.ones(3)
    with pytest.raises(UserError, match=r"got torch.func.jvp.*, expected backward\(\)"):
        torch.func.jvp(times, (x,), (x,))
    assert torch.func.vmap(times)(torch.ones(2, 3)).tolist() == [[2.0] * 3] * 2


def test_eager_gradients_use_the_formula_and_defaults() -> None:
    x = torch.randn(3, requires_grad=True)
    y = times(x)
    assert "Eager" in type(y.grad_fn).__name__
    torch.testing.assert_close(y, 2 * x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert dx.tolist() == [2.0] * 3
    assert not times(x.detach(), 3.0).requires_grad


def test_what_is_traced_sees_the_op() -> None:
    graph = make_fx(lambda x: times(x, 3.0))(torch.randn(3))
    assert torch.ops.lancet_test.times.default in [node.target for node in graph.graph.nodes]
    torch.library.opcheck(torch.ops.lancet_test.times.default, (torch.randn(3, requires_grad=True), 3.0))


def test_compiled_and_checkpointed() -> None:
    x = torch.randn(3, requires_grad=True)
    compiled = torch.compile(lambda x: times(x, 3.0), backend="aot_eager", fullgraph=True)
    for y in (compiled(x), checkpoint(times, x, 3.0, use_reentrant=False)):
        torch.testing.assert_close(y, 3 * x)
        assert torch.autograd.grad(y.sum(), x)[0].tolist() == [3.0] * 3
