"""Rows of `test_setups`: what a forward reads beside its parameters. Numbers are constants of the plan;
tensors are read anew in each call."""

from __future__ import annotations

import random
import sys
import warnings
from collections import OrderedDict
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from tests.optimized import BOUND, optimized
from tests.setups import B, D, Plain, Setup, batch, changed, refused

HERE = sys.modules[__name__]
SHIFT = torch.ones(D, dtype=torch.float64)
FACTOR = 2.0


class Reading(Plain):
    """Reads tensors that are neither parameters nor buffers, and a number of this module."""

    def __init__(self) -> None:
        super().__init__()
        # No two of them may be one tensor.
        self.field, self.listed, self.named, self.configured, self.inner = self.tensors(1.0)

    @staticmethod
    def tensors(value: float, size: int = D) -> list[object]:
        """What its attributes may be."""
        full = [torch.full((size,), value + n / 8, dtype=torch.float64) for n in range(5)]
        return [full[0], [full[1]], {"key": full[2]}, SimpleNamespace(scale=full[3]), full[4]]

    def forward(self, x: Tensor, target: Tensor, scale: float = 1.0) -> Tensor:
        x = x * self.field * self.listed[0] + self.named["key"] * self.configured.scale
        return super().forward(x + SHIFT, target * self.inner, scale)


def plain_tensors(_setup: Setup) -> None:
    """Tensors that are neither parameters nor buffers: replaced, or changed in place."""
    own = Setup(Reading())
    model = own.model
    for number, place in enumerate(("field", "listed", "named", "configured", "inner")):
        value = Reading.tensors(3.0 + number)[number]
        with changed(model, **{place: value}):
            own.compare(*batch())
    model.listed[0], model.named["key"] = torch.rand(2, D, dtype=torch.float64)
    model.configured.scale = torch.rand(D, dtype=torch.float64)
    own.compare(*batch())
    model.field.mul_(2)
    own.compare(*batch(1, B - 1))
    with changed(HERE, SHIFT=SHIFT + 1):
        own.compare(*batch())
        own.compare(*batch(2, B - 1))


class Counting(Plain):
    """Changes a plain tensor and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.scalar = torch.zeros(D, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
        self.register_buffer("seen", torch.ones(D, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        self.calls.add_(1)
        self.seen.add_(x.detach().mean((0, 1)))
        return super().forward(x * self.calls * self.scalar, target + self.seen)


def tensors_that_the_forward_changes(_setup: Setup) -> None:
    """Buffers and other tensors that the forward changes in place, or that are replaced."""
    own, plain = Setup(Counting()), Counting()
    for number in range(4):
        if number == 2:
            for model in (own.model, plain):
                model.calls, model.seen = model.calls + 1, model.seen * 2
                model.scalar = torch.tensor(3.0, dtype=torch.float64)
        loss, expected = own.ready(*batch(number)), plain(*batch(number))
        assert abs(loss - expected) < BOUND
        for name in ("calls", "seen"):
            assert (getattr(own.model, name) - getattr(plain, name)).abs().max() < BOUND
    assert not own.ready.fallbacks


class Scaled(Plain):
    """Numbers and flags among its inputs, one of them a size."""

    def forward(self, x: Tensor, target: Tensor, size: int, options: dict[str, object]) -> Tensor:
        loss = super().forward(x[:, :size], target[:, :size], options["scale"])
        return loss.square() if options["squared"] else loss


def numbers_as_inputs(_setup: Setup) -> None:
    """Numbers, flags, None and texts as inputs: constants of the plan."""
    x, target = batch()
    options = {"scale": 3, "squared": True, "unused": None, "name": "step"}
    own = Setup(Scaled(), (x, target, 2, options))
    own.compare(x, target, 2, options)
    own.falls_back("another number among the inputs", x, target, 3, options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the same reason again
        options["squared"] = False
        own.compare_calls(lambda module: module(x, target, 2, options), fallbacks=1)


class Unusual(Plain):
    """An LSTM, a frozen batch norm in eval mode, operators in place; its result is a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(D, D, batch_first=True).double()
        self.norm = nn.BatchNorm1d(D).double().eval().requires_grad_(False)
        self.norm.running_mean.fill_(0.25)

    def forward(self, x: Tensor, target: Tensor) -> OrderedDict[str, object]:
        y = self.norm(self.recurrent(x)[0].transpose(1, 2)).transpose(1, 2).relu_() * 1.5
        y[:, :1].add_(x[:, 1:2]).clamp_(max=1.5)
        y[0].masked_fill_(y[0] > 1, 0.5)
        return OrderedDict(loss=super().forward(y, target), hidden=[y, None])


def unusual_parts(_setup: Setup) -> None:
    """LSTMs, frozen norms in eval mode, operators in place, and results in containers."""
    own = Setup(Unusual())
    assert not own.model.norm.training
    own.compare_calls(lambda module: module(*batch())["loss"])
    assert not own.model.norm.training


WORKS = (unusual_parts, plain_tensors, tensors_that_the_forward_changes, numbers_as_inputs)


class Times(Plain):
    """Reads a number of this module."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return super().forward(x, target, FACTOR)


def numbers_of_a_module(_setup: Setup) -> None:
    """A number of a Python module, changed."""
    own = Setup(Times())
    own.compare(*batch())
    with changed(HERE, FACTOR=3.0):
        own.falls_back("no longer so: G.FACTOR == 2.0")


def plain_tensor_of_another_shape(_setup: Setup) -> None:
    """A tensor that is neither parameter nor buffer, replaced by one of another shape."""
    own = Setup(Reading())
    with changed(own.model, field=Reading.tensors(3.0, size=1)[0]):
        own.falls_back("no longer so: tensor 'field' size mismatch at index 0. expected 8, actual 1")


FALLS_BACK = (numbers_of_a_module, plain_tensor_of_another_shape)


class Array(Plain):
    """Reads a numpy array."""

    def __init__(self) -> None:
        super().__init__()
        self.array = torch.ones(D, dtype=torch.float64).numpy()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return super().forward(x * torch.from_numpy(self.array), target)


def numpy_array(_setup: Setup) -> None:
    """A numpy array that the forward reads."""
    with refused("forward of Array: got the numpy array array", "torch.from_numpy() where it is assigned"):
        optimized(Array(), batch())


class Drawing(Plain):
    """Draws a number with Python's generator."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return super().forward(x, target, random.randint(1, 3))


def random_number_of_python(_setup: Setup) -> None:
    """A number of Python's random generator that the forward draws."""
    with refused("forward of Drawing: got a random number of Python's", "torch.rand"):
        optimized(Drawing(), batch())


class Hidden(Plain):
    """A module that is not registered, and a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [nn.Linear(D, D).double()]
        self.scale = torch.ones(D, dtype=torch.float64)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return super().forward(self.blocks[0](x) * self.scale, target)


def trained_and_not_registered(_setup: Setup) -> None:
    """Trained tensors that are not registered, a module in a plain list, say; frozen, they work."""
    model = Hidden()
    with refused("got blocks[0].weight, which requires a gradient and is not registered", "nn.ModuleList"):
        optimized(model, batch())
    model.blocks[0].requires_grad_(False)
    for trained in (torch.ones(D, dtype=torch.float64, requires_grad=True), model.input.weight[0] * 2):
        with changed(model, scale=trained), refused("got scale, which requires a gradient", "in forward"):
            optimized(model, batch())
    own = Setup(model)
    own.compare(*batch())
    model.blocks[0].weight = nn.Parameter(torch.rand(D, D, dtype=torch.float64), requires_grad=False)
    own.compare(*batch())


class Lazy(Plain):
    """A layer that gets its shape in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(D, dtype=torch.float64)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return super().forward(self.lazy(x), target)


def lazy_parameters(_setup: Setup) -> None:
    """Lazy parameters, which have no shape yet; after a first call they work."""
    model = Lazy()
    with refused("model Lazy: got lazy.weight, a lazy parameter", "call the model once before"):
        optimized(model, batch())
    model.lazy(batch()[0])
    Setup(model).compare(*batch())


REFUSED = (lazy_parameters, numpy_array, random_number_of_python, trained_and_not_registered)
