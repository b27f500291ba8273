"""How an op of this library is registered, so that eager calls cost no more than the work they do.

torch's `custom_op` passes each call twice through the dispatcher and checks its results, 15 to 40 us; a layer
calls ten of them forward and as many backward. Traced tensors (fake, functional, subclasses, under a dispatch
mode) need it. Others call the function itself, or an autograd Function with the same formula.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter)
_FUNCTIONS: dict[object, Callable[..., Any]] = {}
"""By op as it stands in graphs."""


class Op:
    """The op `torch.ops.<name>`, made of a function; a call gives what that gives. See `custom_op` of torch.

    Args: name: "lancet::combine", say. function: typed, its arguments by position; mutates none of them, and
        returns tensors of its own.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self._in_graphs = torch.library.custom_op(name, function, mutates_args=())
        self.function = _FUNCTIONS[self._in_graphs._opoverload] = function
        self._autograd: type[torch.autograd.Function] | None = None
        parameters = inspect.signature(function).parameters.values()
        self._defaults = tuple(p.default for p in parameters)
        self.register_fake = self._in_graphs.register_fake
        self.__name__, self.__doc__, self.__module__ = name, function.__doc__, function.__module__
        self.__wrapped__ = function

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[[Any, tuple, Any], None]
    ) -> None:
        """The formula of the gradients, as for `custom_op`."""
        self._in_graphs.register_autograd(backward, setup_context=setup_context)
        function = self.function

        class Eager(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *inputs):
                output = function(*inputs)
                setup_context(ctx, inputs, output)
                return output

            @staticmethod
            def backward(ctx, *gradients):
                return backward(ctx, *gradients)

        self._autograd = Eager

    def __call__(self, *inputs: Any, **by_name: Any) -> Any:
        if by_name or is_traced(inputs):
            return self._in_graphs(*inputs, **by_name)
        if (
            self._autograd is not None
            and torch.is_grad_enabled()
            and any(isinstance(value, Tensor) and value.requires_grad for value in inputs)
        ):
            return self._autograd.apply(*inputs, *self._defaults[len(inputs) :])
        with torch.no_grad():
            return self.function(*inputs)


def op(name: str, like: str = "") -> Callable[[Callable[..., Any]], Op]:
    """Decorator that makes a function an `Op`.

    Args: like: the parameter whose shape, dtype and device the result has, contiguous; "": `register_fake`
        says what the result is.
    """

    def registered(function: Callable[..., Any]) -> Op:
        of_library = Op(name, function)
        if like:
            position = list(inspect.signature(function).parameters).index(like)
            contiguous = partial(torch.empty_like, memory_format=torch.contiguous_format)
            of_library.register_fake(lambda *inputs: contiguous(inputs[position]))
        return of_library

    return registered


def function_of(target: object) -> Callable[..., Any] | None:
    """What an op of this library computes, given its target in a graph; None: it is none."""
    return _FUNCTIONS.get(target)


def is_traced(inputs: Iterable[Any]) -> bool:
    """Is someone watching a call: dynamo, a tensor that is more than its numbers, a mode, or a transform?"""
    return (
        torch.compiler.is_compiling()
        or any(_is_more(value) for value in inputs)
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _is_more(value: Any) -> bool:
    """Is a value, or one in a list of them, a tensor that is more than its numbers?"""
    if isinstance(value, list):
        return any(map(_is_more, value))
    return isinstance(value, Tensor) and type(value) not in _PLAIN
