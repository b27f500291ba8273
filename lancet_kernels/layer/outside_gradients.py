"""Is all of a gradient summed over the ranks?

A step sums what it computes. What is added outside of it, by a penalty on its parameters say, each rank adds
by itself. A hook on each parameter compares what arrives with what the step gave, mostly the same tensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.weak import WeakTensorKeyDictionary

from lancet_kernels.errors import UserError


class GradientWatch:
    """Raises a UserError at the end of a backward in which a gradient has a part that no step gave.

    Args: parameters: by name, whose gradients are summed.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._arrivals = {name: _arrival(parameter) for name, parameter in parameters.items()}
        self._backward = -1

    def give(self, gradients: Iterable[tuple[str, Tensor | None]]) -> None:
        """In a backward: what the step gives for these parameters."""
        backward = torch._C._current_graph_task_id()
        if backward < 0:
            return
        if self._backward != backward:
            self._backward = backward
            Variable._execution_engine.queue_callback(self._finish)
        for name, gradient in gradients:
            if name in self._arrivals and gradient is not None:
                self._arrivals[name].give(gradient, backward)

    def _finish(self) -> None:
        # Backwards inside of this one (reentrant checkpointing) have higher numbers.
        outside = [name for name, arrival in self._arrivals.items() if arrival.outside >= self._backward]
        for arrival in self._arrivals.values():
            arrival.given, arrival.outside = [], -1
        if outside:
            more = f" and {len(outside) - 1} more" if len(outside) > 1 else ""
            raise UserError(
                f"gradient of {outside[0]}{more}",
                got="a part from outside the optimized step, which is not summed over the ranks",
                expected="all of it from the step",
                do="use the parameter in the forward that optimize() is given (and return what you need of "
                "it), not outside; inside, activation checkpointing with use_reentrant=False",
            )


class _Arrival:
    """What the steps gave for a parameter in a backward; a hook on it, before those of users.

    outside: the last backward in which something else arrived.
    """

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        self.backward, self.outside = -1, -1

    def give(self, gradient: Tensor, backward: int) -> None:
        if self.backward != backward:
            self.given, self.backward = [], backward
        # As long as it is kept, torch adds nothing to it in place.
        self.given.append(gradient)

    def __call__(self, gradient: Tensor | None) -> None:
        given, self.given = self.given, []
        if gradient is None or (len(given) == 1 and given[0] is gradient):
            return
        if not given or not _is_sum(gradient, given):
            self.outside = torch._C._current_graph_task_id()


def _is_sum(gradient: Tensor, given: list[Tensor]) -> bool:
    """Is it what torch adds up, in this order, for several calls of a step in one backward?"""
    total = given[0]
    for more in given[1:]:
        total = total + more
    return torch.allclose(gradient, total.to(gradient.dtype), rtol=0.0, atol=0.0, equal_nan=True)


_ARRIVALS = WeakTensorKeyDictionary()
"""By parameter, because several steps may share one."""


def _arrival(parameter: nn.Parameter) -> _Arrival:
    if parameter not in _ARRIVALS:
        _ARRIVALS[parameter] = arrival = _Arrival()
        handle = parameter.register_hook(arrival)
        hooks = parameter._backward_hooks
        assert isinstance(hooks, OrderedDict)
        hooks.move_to_end(handle.id, last=False)
    return _ARRIVALS[parameter]


def has_hooks(parameter: nn.Parameter) -> bool:
    """Do hooks of users wait for the parameter's gradient?"""
    hooks = [*(parameter._backward_hooks or {}).values()]
    after = parameter._post_accumulate_grad_hooks
    return bool(after) or any(not isinstance(hook, _Arrival) for hook in hooks)
