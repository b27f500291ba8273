"""Conversions between forms on ranks: values and gradients as those of the whole tensor."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lancet_kernels.graph.capture.capture import capture
from lancet_kernels.graph.from_fx import op_name
from lancet_kernels.graph.rules.rules import PARTIAL, WHOLE, Form, cut_along
from lancet_kernels.ops.comm.groups import group_name
from tests.grids import few_of

SHAPE = (4, 8, 12)
FORMS = (WHOLE, cut_along(0), cut_along(1), cut_along(2), PARTIAL)
PAIRS = [(source, target) for source in FORMS for target in FORMS if source != target and target != PARTIAL]


def held(whole: Tensor, form: Form, rank: int, ranks: int) -> Tensor:
    """What a rank holds of a tensor; summands are at random and add up to it."""
    if form == WHOLE:
        return whole
    if form.dimension is not None:
        return whole.chunk(ranks, form.dimension)[rank]
    generator = torch.Generator().manual_seed(5)
    summands = [torch.randn(whole.shape, dtype=whole.dtype, generator=generator) for _ in range(ranks - 1)]
    return [*summands, whole - sum(summands)][rank]


def dual(form: Form) -> Form:
    """The form of the gradient."""
    return {WHOLE: PARTIAL, PARTIAL: WHOLE}.get(form, form)


def converted(tensor: Tensor, source: Form, target: Form, group: str) -> Tensor:
    op = torch.ops.lancet
    if source == WHOLE:
        return op.take_shard(tensor, target.dimension, group)
    if (source, target) == (PARTIAL, WHOLE):
        return op.all_reduce(tensor, group)
    if source == PARTIAL:
        return op.reduce_scatter(tensor, target.dimension, group)
    if target == WHOLE:
        return op.all_gather(tensor, source.dimension, group)
    return op.exchange_shards(tensor, source.dimension, target.dimension, group)


def errors_of(source: str, target: str) -> tuple[float, float]:
    """Largest errors of a conversion's result and of its gradient."""
    source, target = Form.parse(source), Form.parse(target)
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), group_name(None)
    generator = torch.Generator().manual_seed(3)
    whole, gradient = (torch.randn(SHAPE, dtype=torch.float64, generator=generator) for _ in range(2))
    tensor = held(whole, source, rank, ranks).clone().requires_grad_()
    result = converted(tensor, source, target, group)
    error = (result - held(whole, target, rank, ranks)).abs().max().item()
    result.backward(held(gradient, dual(target), rank, ranks))
    found = tensor.grad
    if dual(source) == PARTIAL:  # only what the ranks' summands add up to is known
        found = found.clone()
        dist.all_reduce(found)
        return error, (found - gradient).abs().max().item()
    return error, (found - held(gradient, dual(source), rank, ranks)).abs().max().item()


@pytest.mark.parametrize("ranks", few_of([2, 4]))
def test_every_conversion_and_its_gradient(pool, ranks):
    for source, target in PAIRS:
        for error, gradient_error in pool.run(errors_of, str(source), str(target), ranks=ranks):
            sums = PARTIAL in (source, dual(target))
            assert error <= (1e-14 if sums else 0.0), (source, target)
            assert gradient_error <= 1e-14, (source, target)


def results() -> list[float]:
    """Errors of the gradients of results, which are whole on every rank."""
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), group_name(None)
    generator = torch.Generator().manual_seed(3)
    whole, gradient = (torch.randn(SHAPE, dtype=torch.float64, generator=generator) for _ in range(2))
    op = torch.ops.lancet
    errors = []
    for form, call in (
        (cut_along(1), lambda x: op.all_gather(x, 1, group, True)),
        (PARTIAL, lambda x: op.all_reduce(x, group, True)),
        (WHOLE, lambda x: op.share_gradient(x, group)),
    ):
        tensor = held(whole, form, rank, ranks).clone().requires_grad_()
        result = call(tensor)
        result.backward(gradient)
        errors.append((result - whole).abs().max().item())
        wanted = gradient / ranks if form == WHOLE else held(gradient, dual(form), rank, ranks)
        errors.append((tensor.grad - wanted).abs().max().item())
    return errors


def test_results_have_one_gradient_for_all_ranks(pool):
    for errors in pool.run(results):
        assert max(errors) < 1e-14


def other_dtypes() -> bool:
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), group_name(None)
    rows, columns = cut_along(0), cut_along(1)
    same = []
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.float32):
        whole = (torch.arange(16).reshape(4, 4) % 3).to(dtype)
        for source, target in ((rows, WHOLE), (rows, columns), (columns, rows)):
            result = converted(held(whole, source, rank, ranks), source, target, group)
            same.append(torch.equal(result, held(whole, target, rank, ranks)))
    return all(same)


def test_truth_values_and_numbers_travel_unchanged(pool):
    assert all(pool.run(other_dtypes))


def test_fakes_have_the_shapes_of_results():
    x = torch.randn(4, 6)
    for name, arguments in (("take_shard", (0, "")), ("place_shard", (0, "")), ("share_gradient", ("",))):
        op = getattr(torch.ops.lancet, name).default
        torch.library.opcheck(op, (x.clone().requires_grad_(name != "place_shard"), *arguments))


def test_alone_nothing_travels():
    x = torch.randn(4, 6, requires_grad=True)
    op = torch.ops.lancet
    results = op.all_gather(x, 0, ""), op.reduce_scatter(x, 1, ""), op.exchange_shards(x, 0, 1, "")
    for result in (*results, op.all_reduce(x, "")):
        assert torch.equal(result, x)
        assert torch.equal(*torch.autograd.grad(result.sum(), x), torch.ones_like(x))


def traced_ops(name: str, *arguments: object) -> list[str]:
    """What a captured graph has of an op and its gradient."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return getattr(torch.ops.lancet, name)(x, *arguments, group_name(None)).square().sum()

    joint = capture(Model(), (torch.randn(4, 4, requires_grad=True),)).joint
    ops = [op_name(node) for node in joint.graph.nodes if node.op == "call_function"]
    return [op.removeprefix("_c10d_functional.") for op in ops if op.startswith(("_c10d", "lancet"))]


def test_graphs_have_the_collectives_of_torch(pool):
    for name, arguments, ops in (
        ("all_gather", (1,), ["all_gather_into_tensor", "reduce_scatter_tensor"]),
        ("reduce_scatter", (0,), ["reduce_scatter_tensor", "all_gather_into_tensor"]),
        ("exchange_shards", (0, 1), ["all_to_all_single"] * 2),
        ("all_reduce", (), ["all_reduce"] * 2),
    ):
        there, back = ops
        expected = [there, "wait_tensor", back, "wait_tensor"]
        assert pool.run(traced_ops, name, *arguments) == [expected] * 2
