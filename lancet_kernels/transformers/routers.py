"""Routers of transformers models: the same choices when `torch.utils.checkpoint` recomputes a block,
state that stays float32, and logits in a trace.

A router need not choose twice alike (`layer.moe_layer`), and its weights and gradient belong to its choices.
So in the recomputation of a block with experts, `torch.topk` and the like return the indices of the first
run, with the recomputed values at them.

    first run     topk([.3, .3, .1], 1) -> .3, 0        index 0 is kept
    second run    topk([.3, .3, .1], 1) -> .3, 1        becomes .3, 0: the gradient reaches logit 0
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lancet_kernels.layer.expert_layer import ExpertLayer
from lancet_kernels.layer.moe_layer import CheckpointedRun, checkpointed_run
from lancet_kernels.ops.base import BEFORE_A_TRACE
from lancet_kernels.transformers.experts import Derived, derived

_DIMENSION = {"topk": 2, "sort": 1, "max": 1}
"""Functions that return values and indices -> position of the argument `dim`."""
_CHOOSES = {
    getattr(where, name): name
    for where in (torch, Tensor)
    for name in (*_DIMENSION, "argmax", "argsort", "multinomial")
}
_OPEN = "_lancet_choices"
"""Attribute of a block: a stack of modes, one for each of its running forwards."""


def keep_choices(block: nn.Module) -> None:
    """Make a block with a router and experts choose in a recomputation as in the first run."""
    if _enter not in block._forward_pre_hooks.values():
        block.register_forward_pre_hook(_enter, with_kwargs=True)
        block.register_forward_hook(_leave, always_call=True)


class _ChoicesAsAtFirst(TorchFunctionMode):
    def __init__(self, block: nn.Module, run: CheckpointedRun) -> None:
        super().__init__()
        self.block, self.run = block, run

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _CHOOSES.get(func)
        if name is None:
            return func(*args, **kwargs)
        # torch checks that both runs save as many tensors: in both only `gather` saves any.
        with torch.no_grad():
            result = func(*args, **kwargs)
        if not isinstance(result, Tensor):
            first = self._first(result.indices)
            return type(result)((_gathered(name, args, kwargs, first), first))
        # `max` without a dimension returns a value alone.
        return func(*args, **kwargs) if name in _DIMENSION else self._first(result)

    def _first(self, index: Tensor) -> Tensor:
        first: Tensor = self.run.as_at_first(self.block, index.int())
        return first.to(index.dtype)


class KeepsFloat32(Derived):
    """Base of modules with state that stays float32, as a correction bias: updates of 1e-3 are lost in 16
    bits."""

    float32_names: frozenset[str]

    def _apply(self, fn: Callable, recurse: bool = True) -> Any:
        state = {name: getattr(self, name) for name in self.float32_names}
        before = {name: tensor.data for name, tensor in state.items()}
        super()._apply(fn, recurse)
        for name, data in before.items():
            tensor = getattr(self, name)
            if tensor.dtype.itemsize < data.dtype.itemsize:
                tensor.data = data.to(tensor.device)
        return self


def keep_float32(model: nn.Module, block: str) -> None:
    """Let state that transformers loads in float32 stay so under `model.to(torch.bfloat16)`.

    Args: block: the name of the block with the router.
    """
    lists = (getattr(part, "_keep_in_fp32_modules_strict", None) or () for part in model.modules())
    names = {re.escape(name) for own in lists for name in own}
    pattern = re.compile(rf"(^|\.)({'|'.join(sorted(names))})($|\.)")
    for path, part in model.get_submodule(block).named_modules(prefix=block):
        own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        kept = frozenset(name for name, _ in own if names and pattern.search(f"{path}.{name}"))
        if kept and not isinstance(part, ExpertLayer):
            part.__class__, part.float32_names = derived(KeepsFloat32, type(part)), kept


def _gathered(name: str, args: tuple, kwargs: dict[str, Any], index: Tensor) -> Tensor:
    """The elements of the input of topk, sort or max at these indices."""
    x = args[0] if args else kwargs["input"]
    place = _DIMENSION[name]
    dim = args[place] if len(args) > place else kwargs.get("dim", -1)
    if index.dim() < x.dim():
        return x.gather(dim, index.unsqueeze(dim)).squeeze(dim)
    return x.gather(dim, index)


def _enter(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    x = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
    run = None if x is None else checkpointed_run(x)
    # If the hooks came too late for the first run, the second has no mode either, to save as much.
    is_kept = run is not None and (run.again is None or run.repeats(block))
    mode = _ChoicesAsAtFirst(block, run).__enter__() if run is not None and is_kept else None
    block.__dict__.setdefault(_OPEN, []).append(mode)


def _leave(block: nn.Module, args: tuple, output: Any) -> None:
    modes = block.__dict__.get(_OPEN)
    # Hooks that were added during this forward have entered no mode.
    if torch.compiler.is_compiling() or not modes:
        return
    mode = modes.pop()
    if mode is not None:
        mode.__exit__(None, None, None)


def record_outputs(module: nn.Module) -> None:
    """Let transformers 5 set its hooks that collect router logits before a trace: at the first forward it
    would do so under a lock, which cannot be traced."""
    if "transformers" not in sys.modules:
        return
    try:
        from transformers import PreTrainedModel
        from transformers.utils.output_capturing import maybe_install_capturing_hooks
    except ImportError:  # transformers 4.5x: nothing to set
        return
    models = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    for model in models:
        # Those of a model reach the ones inside it, which must not have them already.
        inside = [part for part in model.modules() if part is not model and part in models]
        if not any(getattr(part, "_output_capturing_hooks_installed", False) for part in inside):
            maybe_install_capturing_hooks(model)


BEFORE_A_TRACE.append(record_outputs)
