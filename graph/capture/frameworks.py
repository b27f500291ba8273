"""What PEFT and transformers do in a forward that a graph cannot hold, while it is traced.

requires_grad_() of a result     `enable_input_require_grads` calls it on the embeddings, so that a
                                 checkpointed block behind frozen ones has an input with a gradient. In a
                                 graph, what needs one follows from its parameters: it does nothing.
LoRA of experts                  `target_parameters` registers a parametrization in each forward, and
                                 removes it. In a trace the layer is told what to take for its parameter.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable

from lancet_kernels.ops.context import during, now


@contextlib.contextmanager
def frameworks_traced() -> Iterator[None]:
    """A context for a trace."""
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(TensorVariable, "method_requires_grad_", _requires_grad))
        # Who has not imported PEFT has none of its wrappers.
        wrapper = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", None)
        if wrapper is not None:
            patches.enter_context(mock.patch.object(wrapper, "_activate_lora", _adapted))
        yield


_torch_requires_grad: Callable[..., VariableTracker] = TensorVariable.method_requires_grad_


def _requires_grad(variable: TensorVariable, *arguments: object, **by_name: object) -> VariableTracker:
    """Leave a result as it is; torch refuses a graph whose outputs depend on one that this was called on."""
    flags = [a for a in (*arguments, *by_name.values()) if isinstance(a, (bool, VariableTracker))]
    is_on = all(flag is True or getattr(flag, "value", None) is True for flag in flags)
    if variable.source is None and is_on:
        return variable
    return _torch_requires_grad(variable, *arguments, **by_name)


@contextlib.contextmanager
def _adapted(wrapper: Any, active_adapters: list[str]) -> Iterator[None]:
    """In place of `ParamWrapper._activate_lora`."""
    name, weight = wrapper.parameter_name, wrapper.get_param()
    for adapter in active_adapters:
        if adapter in wrapper.lora_A:
            weight = weight + wrapper.get_delta_weight(adapter)
    with during(weights={**now.weights, name: weight}):
        yield
