"""An `Op` gives the same eagerly, with its autograd formula, and in a graph."""

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from lancet_kernels.ops.registration import op


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
