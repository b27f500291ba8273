"""Shared by all ops: registration with cheap eager calls, the objects of a planned step, and process-wide
state (`now`).

torch's `custom_op` passes each call twice through the dispatcher and checks its results, 15 to 40 us; a layer
calls ten of them forward and ten backward. Traced tensors (fake, functional, subclasses, under a dispatch
mode) need it. Other calls run the function itself, or an autograd Function with the same formula.

    context = Context(Accumulation())         one for each planned step, which keeps it alive
    fused_experts(..., context.number, "dispatch_1")      a graph has numbers and names, no objects
    context_of(number).layers["dispatch_1"]   in the op

The emulated link (`ops.comm.link`) is no part of a context: a rank has one wire for all its steps.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lancet_kernels.errors import UserError

_PLAIN = (Tensor, nn.Parameter)
_FUNCTIONS: dict[object, Callable[..., Any]] = {}
"""By op overload, the target of a graph's node."""
BEFORE_A_TRACE: list[Callable[[nn.Module], None]] = []
"""Called with a module that is to be traced: for what its first forward does and a trace cannot."""


class Op:
    """A function as the op `torch.ops.<name>`, like torch's `custom_op`.

    Args: name: "lancet::combine", say. function: typed, with positional arguments; mutates none of them, and
        returns new tensors.
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
        if is_traced((*inputs, *by_name.values())) or by_name:
            return self._in_graphs(*inputs, **by_name)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
            if self._autograd is None:  # its backward raises: no formula
                return self._in_graphs(*inputs)
            return self._autograd.apply(*inputs, *self._defaults[len(inputs) :])
        with torch.no_grad():
            return self.function(*inputs)


def op(name: str, like: str = "", is_own_fake: bool = False) -> Callable[[Callable[..., Any]], Op]:
    """Decorator that makes a function an `Op`.

    Args: like: the parameter whose shape, dtype and device the result has, contiguous. is_own_fake: the
        function takes fake tensors, too. Without either, `register_fake` says what the result is.
    """

    def registered(function: Callable[..., Any]) -> Op:
        new = Op(name, function)
        if like:
            position = list(inspect.signature(function).parameters).index(like)
            contiguous = partial(torch.empty_like, memory_format=torch.contiguous_format)
            new.register_fake(lambda *inputs: contiguous(inputs[position]))
        elif is_own_fake:
            new.register_fake(function)
        return new

    return registered


def function_of(target: object) -> Callable[..., Any] | None:
    """The function of one of our ops, by its target in a graph; None for other targets."""
    return _FUNCTIONS.get(target)


def is_traced(inputs: Iterable[Any]) -> bool:
    """Is a call traced: by dynamo, a tensor subclass, a dispatch mode or a functorch transform?"""
    return (
        torch.compiler.is_compiling()
        or any(map(_is_subclass, inputs))
        or torch._C._len_torch_dispatch_stack() > 0
        or _is_transformed(inputs)
    )


def _is_transformed(inputs: Iterable[Any]) -> bool:
    """Does torch.func transform this call? Raises: UserError for inputs of `jvp`, as torch (2.13) loses the
    tangents of ops: their results would have none, without a word."""
    functorch = torch._C._functorch
    if functorch.peek_interpreter_stack() is None:
        return False
    transforms = functorch.get_interpreter_stack()
    is_jvp = any(transform.key() == functorch.TransformType.Jvp for transform in transforms)
    tensors = [x for x in pytree.tree_leaves([*inputs]) if isinstance(x, Tensor)] if is_jvp else []
    if any(map(functorch.is_functorch_wrapped_tensor, tensors)):
        raise UserError(
            "derivative of MoE layers and Dropout",
            got="torch.func.jvp, or what uses it (jacfwd, hessian)",
            expected="backward()",
            do="differentiate with torch.autograd.grad",
        )
    return True


def _is_subclass(value: Any) -> bool:
    """Is a value, or one in a list of them, of a tensor subclass?"""
    if isinstance(value, list):
        return any(map(_is_subclass, value))
    return isinstance(value, Tensor) and type(value) not in _PLAIN


def cast(tensor: Any) -> Any:
    """Cast to autocast's dtype where autocast is on, because autocast does not know our ops."""
    if tensor is None or not torch.is_autocast_enabled(tensor.device.type):
        return tensor
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor  # as autocast leaves them
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


_numbers = itertools.count()


class Context:
    """The objects of a planned step, shared by its plans for other input shapes.

    number: its graphs refer to it by this. accumulation: its sums of gradients, an
    `ops.comm.collectives.Accumulation`. layers: the exchanges of its fused MoE layers by name
    (`ops.moe.fused_experts.LayerExchange`).
    """

    def __init__(self, accumulation: Any) -> None:
        self.number = next(_numbers)
        self.accumulation = accumulation
        self.layers: dict[str, Any] = {}
        _CONTEXTS[self.number] = self

    def __deepcopy__(self, _memo: object) -> Context:
        """Itself: torch copies graphs, whose numbers stay."""
        return self


_CONTEXTS: WeakValueDictionary[int, Context] = WeakValueDictionary()


def context_of(number: int) -> Context:
    """The context of a graph."""
    return _CONTEXTS[number]


@dataclass
class Now:
    """State of this process, not of a thread: autograd runs a backward in threads of its own.

    layer: the MoE layer whose collectives are entered next, for messages. runs_a_plan: is a plan running?
    Its collectives differ from the module's, so all ranks must run the plan or none. expects_sizes: in a
    trace, ops that make rows give the expected number of rows instead of a symbol. padding_mask: of the
    batch, for MoE layers that are called without one (`MoELayer.forward`). weights: in a trace, what stands
    for the parameters of the running MoE layer, by name. routed: by layer, the rows of each of this rank's
    experts; None: they are not counted.
    """

    layer: str = ""
    runs_a_plan: bool = False
    expects_sizes: bool = False
    padding_mask: Tensor | None = None
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    routed: dict[str, Tensor] | None = None


now = Now()


@contextlib.contextmanager
def during(**values: object) -> Iterator[None]:
    """A context in which `now` has these values."""
    before = {name: getattr(now, name) for name in values}
    for name, value in values.items():
        setattr(now, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(now, name, value)
