"""Dropout by counter: masks against Python integers, whole and in parts, and gradients. Indices of tokens:
against a list, and the same graph on every rank."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lancet_kernels import Dropout, UserError, dropout, ops, set_routing_step
from lancet_kernels.ops import token_index
from lancet_kernels.ops.comm.groups import group_name
from lancet_kernels.ops.random import GOLDEN, signed, splitmix64_of
from tests.ops.op_cases import QUICK, SEEDS, generator, transposed_in_memory


def naive_dropout(
    x: Tensor, token: Tensor, feature: Tensor, step: int, p: float, seed: int, site: int
) -> Tensor:
    """Reference, an element at a time in Python integers."""
    step_key = splitmix64_of(splitmix64_of(splitmix64_of(seed) + site) + step)
    least = round(p * 2**31) - 2**30
    factor = []
    for index in token.flatten().tolist():
        token_key = splitmix64_of(step_key + index)
        numbers = [signed(splitmix64_of(token_key + f * GOLDEN)) >> 33 for f in feature.tolist()]
        factor.append([1 / (1 - p) if number >= least else 0.0 for number in numbers])
    return x * torch.tensor(factor, dtype=torch.float64).view(x.shape).to(x.dtype)


def element_of(shape: tuple[int, ...], first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Token and feature indices of a tensor of that shape."""
    *tokens, width = shape
    return torch.arange(first, first + math.prod(tokens)).view(tokens), torch.arange(width)


@QUICK
@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple),
    p=st.sampled_from([0.1, 0.5, 0.97]),
    seed=st.integers(0, 2**63 - 1),
    step=st.integers(0, 2**40),
    values=SEEDS,
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_against_reference(shape, p, seed, step, values, dtype) -> None:
    x = torch.randn(shape, generator=generator(values)).to(dtype)
    token, feature = element_of(shape, first=7)
    actual = ops.dropout(x, token, feature, torch.tensor(step), p, seed, 3)
    expected = naive_dropout(x.double(), token, feature, step, p, seed, 3)
    assert actual.dtype == dtype
    assert actual.shape == x.shape
    torch.testing.assert_close(actual, expected.to(dtype))
    assert torch.equal(actual == 0, expected == 0)


@QUICK
@given(data=st.data(), values=SEEDS)
def test_parts_along_any_dimension_have_the_mask_of_the_whole(data: st.DataObject, values: int) -> None:
    shape = tuple(data.draw(st.lists(st.integers(2, 6), min_size=2, max_size=4)))
    dim = data.draw(st.integers(0, len(shape) - 1))
    border = data.draw(st.integers(1, shape[dim] - 1))
    x = transposed_in_memory(torch.randn(shape, generator=generator(values)))
    token, feature = element_of(shape)
    step = torch.tensor(5)
    whole = ops.dropout(x, token, feature, step, 0.4, 1, 2)
    found = []
    for first, behind in ((0, border), (border, shape[dim])):
        sizes = first, behind - first
        tokens = token if dim == len(shape) - 1 else token.narrow(dim, *sizes)
        features = feature.narrow(0, *sizes) if dim == len(shape) - 1 else feature
        found.append(ops.dropout(x.narrow(dim, *sizes), tokens, features, step, 0.4, 1, 2))
    assert torch.equal(torch.cat(found, dim), whole)


def test_larger_than_a_block_and_as_often_zero_as_asked_for() -> None:
    """Blocks of 32,768 elements; counts of kept elements within five standard deviations."""
    rows, width, p = 700, 300, 0.1
    x = torch.ones(rows, width, dtype=torch.float64)
    token, feature = element_of((rows, width))
    y = ops.dropout(x, token, feature, torch.tensor(0), p, 0, 0)
    assert torch.equal(y[690:], naive_dropout(x[690:], token[690:], feature, 0, p, 0, 0))
    assert y.unique().tolist() == [0.0, 1 / (1 - p)]
    for kept, size in ((y.count_nonzero(), y.numel()), *((n, rows) for n in y.count_nonzero(0))):
        assert abs(int(kept) - size * (1 - p)) < 5 * math.sqrt(size * p * (1 - p))


def test_gradient_and_recomputation_have_the_mask_of_the_forward() -> None:
    layer = Dropout(0.5, site=4)
    set_routing_step(layer, 9)
    x = torch.randn(6, 5, dtype=torch.float64, generator=generator(0), requires_grad=True)
    assert torch.autograd.gradcheck(layer, x)
    assert torch.autograd.gradgradcheck(layer, x)
    plain = layer(x.sin()).square().sum()
    again = checkpoint(lambda x: layer(x.sin()).square().sum(), x, use_reentrant=False)
    wanted, found = torch.autograd.grad(plain, x)[0], torch.autograd.grad(again, x)[0]
    assert torch.equal(wanted, found)
    assert torch.equal(wanted != 0, layer(torch.ones_like(x)) != 0)


def test_opcheck() -> None:
    x = torch.randn(2, 3, 4, requires_grad=True)
    torch.library.opcheck(
        torch.ops.lancet.dropout.default, (x, *element_of(x.shape), torch.tensor(2), 0.3, 1, 2)
    )


# ---- The module and the function


def test_identity_in_evaluation_and_without_a_probability() -> None:
    x = torch.randn(2, 3)
    assert Dropout(0.5, site=0).eval()(x) is x
    assert Dropout(0.0, site=0)(x) is x
    assert not list(Dropout(0.0, site=0).buffers())
    assert not Dropout(0.5, site=0).state_dict()
    assert dropout(x, 0.5, step=torch.tensor(1), site=0, training=False) is x


def test_a_step_draws_anew_and_can_be_repeated() -> None:
    layer, x = Dropout(0.5, site=3, seed=2), torch.ones(8, 8)
    masks = []
    for step in (1, 2, 1):
        set_routing_step(layer, step)
        masks.append(layer(x))
    assert torch.equal(masks[0], masks[2])
    assert not torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], dropout(x, 0.5, step=torch.tensor(1), site=3, seed=2))


def rows_of_rank() -> torch.Tensor:
    layer = Dropout(0.5, site=1)
    return layer(torch.ones(3, 2, 5))


def test_ranks_draw_the_masks_of_their_tokens(pool) -> None:
    whole = Dropout(0.5, site=1)(torch.ones(6, 2, 5))
    assert torch.equal(torch.cat(pool.run(rows_of_rank, ranks=2)), whole)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Dropout(1.0, site=0), "p of dropout: got 1.0"),
        (lambda: Dropout(-0.1, site=0), "p of dropout: got -0.1"),
        (lambda: Dropout(0.1, site="a"), "site of Dropout: got 'a'"),
        (lambda: Dropout(0.1, site=0, seed=2**63), "seed of Dropout: got 9223372036854775808"),
        (lambda: Dropout(0.1, site=0)(torch.tensor(1.0)), "input of dropout: got a scalar"),
        (
            lambda: ops.dropout(torch.ones(2, 3), *element_of((2, 4)), torch.tensor(1), 0.1, 0, 0),
            "indices of dropout: got tokens [2], features [4]",
        ),
        (
            lambda: set_routing_step(torch.nn.Sequential(Dropout(0.1, 3), Dropout(0.2, 3)), 1),
            "site of Dropout: got 3 twice in one model",
        ),
    ],
)
def test_bad_input(call, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        call()


# ---- indices of tokens

TOKENS = [3, 0, 2]


def indices_on_rank() -> tuple[list[int], int]:
    group, rank = group_name(None), torch.distributed.get_rank()
    index = token_index(TOKENS[rank], group, torch.device("cpu"))
    first = token_index(3, group, torch.device("cpu"), equal_ranks=True)
    assert first.tolist() == list(range(3 * rank, 3 * rank + 3))
    torch.library.opcheck(torch.ops.lancet.token_index.default, (3, group, torch.device("cpu")))
    return index.tolist(), index.dtype == torch.int64


def test_every_rank_has_its_own(pool):
    assert pool.run(indices_on_rank, ranks=3) == [([0, 1, 2], True), ([], True), ([3, 4], True)]


def test_one_process():
    assert token_index(2, "", torch.device("cpu")).tolist() == [0, 1]
