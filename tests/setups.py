"""What tests of set-ups share: a small model with an MoE layer, its batches, and how it is compared with what
`optimize` makes of it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lancet_kernels import MoELayer, OptimizedModule, moe_losses
from lancet_kernels.errors import UserError
from tests.optimized import BOUND, optimized
from tests.planned_steps import gradients, outcome, sum_over_ranks

B, S, D = 4, 3, 8


class Plain(nn.Module):
    """x[B, S, D], target[B, S, D] -> loss, without experts: captured in half the time. Dropout does nothing
    unless a test says so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.input = nn.Linear(D, D)
        self.drop = nn.Dropout(0.0)
        self.output = nn.Linear(D, D)
        self.double()

    def forward(self, x: Tensor, target: Tensor, scale: float = 1.0) -> Tensor:
        y = torch.tanh(self.input(x))
        return scale * (self.output(self.drop(x + y)) - target).square().mean()


class Model(Plain):
    """The same with an MoE layer, for rows in which experts matter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = MoELayer(D, 12, 4, top_k=2, gate="topk", capacity_factor=1.0).double()
        for parameter in self.parameters():
            parameter.data *= 3

    def forward(self, x: Tensor, target: Tensor, scale: float = 1.0) -> Tensor:
        y, sums = self.layer(torch.tanh(self.input(x)), return_sums=True)
        loss = (self.output(self.drop(x + y)) - target).square().mean()
        return scale * loss + 0.1 * moe_losses([sums]).balance.mean()


def batch(number: int = 0, size: int = B) -> tuple[Tensor, Tensor]:
    """Another one on every rank."""
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return tuple(torch.randn(size, S, D, dtype=torch.float64, generator=generator) for _ in range(2))


def compare_mean(model: Model, batches: list[tuple[Tensor, Tensor]], run: Callable[[], object]) -> None:
    """`run` leaves the gradients of the mean loss of these microbatches of all ranks."""
    model.zero_grad()
    for inputs in batches:
        (model(*inputs) / (len(batches) * dist.get_world_size())).backward()
    expected = sum_over_ranks(model, gradients(model))
    model.zero_grad()
    run()
    got = gradients(model)
    assert set(got) == set(expected)
    assert all((got[name] - expected[name]).abs().max() < BOUND for name in expected)


class Setup:
    """A model with its optimized module, and how what they give is compared."""

    def __init__(
        self, model: nn.Module | None = None, inputs: object = None, strategy: str = "none", **options: object
    ) -> None:
        self.model = Model() if model is None else model
        self.ready: OptimizedModule = optimized(self.model, inputs or batch(), strategy, **options)

    def compare(self, *inputs: object, **by_name: object) -> None:
        """Loss and gradients of the optimized module are those of the plain one, and its plan runs."""
        self.compare_calls(lambda module: module(*inputs, **by_name))

    def compare_calls(self, loss_of: Callable[[nn.Module], Tensor], fallbacks: int = 0) -> None:
        """The same for any call of either, in which it falls back so many times."""
        before = self.ready.fallbacks.total()
        plain = outcome(self.model, loss_of(self.model), reduced=False)
        planned = outcome(self.model, loss_of(self.ready), reduced=True)
        assert plain.gradients
        assert planned.distance(plain) < BOUND
        assert self.ready.fallbacks.total() == before + fallbacks

    def falls_back(self, reason: str, *inputs: object, **by_name: object) -> None:
        """It gives what the plain module gives, counts that, and says so once."""
        inputs = inputs or (() if by_name else batch())
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                self.compare_calls(lambda module: module(*inputs, **by_name), fallbacks=1)
        found = [str(w.message) for w in said if "runs without its plan" in str(w.message)]
        assert len(found) == 1, found
        assert f"runs without its plan: {reason}" in found[0], found[0]
        assert self.ready.fallbacks[reason] == 2


@contextlib.contextmanager
def changed(thing: object, **values: object) -> Iterator[None]:
    """Attributes with other values, for a while."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(thing, name, value)
        yield


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Afterwards every submodule has the class, parameters, submodules and hooks that it had."""
    kept = ("_parameters", "_modules", "_forward_hooks", "_forward_pre_hooks")
    before = [(m, type(m), {name: dict(getattr(m, name)) for name in kept}) for m in model.modules()]
    try:
        yield
    finally:
        for module, kind, values in before:
            module.__class__ = kind
            for name, value in values.items():
                getattr(module, name).clear()
                getattr(module, name).update(value)


@contextlib.contextmanager
def refused(*words: str) -> Iterator[None]:
    """One line, with these words in it, before a rank communicates."""
    try:
        yield
    except UserError as error:
        message = str(error)
    else:
        raise AssertionError("no error")
    assert "\n" not in message
    for word in words:
        assert word in message, message
