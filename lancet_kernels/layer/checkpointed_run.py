"""What a layer computed in the first run of a block inside `torch.utils.checkpoint`, for when the block runs
again in the backward.

A router need not choose twice alike: equal scores, products whose sums are taken in another order, noise that
is drawn anew. Other choices in the second run are other rows, whose gradients belong to another function. So
the choices of the first run are kept, 4 bytes each, as a plan keeps them (`graph.capture.recompute`); of
gates whose slots follow from logits, the slots, too.

torch tells a module neither that it runs in such a block, nor which first run it repeats. Both stand on the
stack of Python's frames (torch 2.11 to 2.13):

    use_reentrant   first run                                        second run
    True            `CheckpointFunction.forward` with its `ctx`      `CheckpointFunction.backward` with it
    False           `checkpoint` with its `_CheckpointFrame`         its `unpack_hook` with it

What is kept lies on that object, and is freed with the graph of autograd. A walk over 35 frames takes 7 us
(2-core CPU, 2026-11-26). Blocks of other implementations of checkpointing (DeepSpeed's, say) are not known.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

_FILE = torch.utils.checkpoint.__file__
_KEPT = "lancet_first_run"
"""Attribute of a block: what layers computed in its first run."""

T = TypeVar("T")


class CheckpointedRun:
    """A run inside at least one block.

    first: the blocks that run for the first time. again: the innermost one that runs again, in which they
    are; None: there is none.
    """

    def __init__(self, first: list[Any], again: Any | None) -> None:
        self.first, self.again = first, again

    def as_at_first(self, layer: nn.Module, value: T) -> T:
        """The value, or in a second run what stood in its place in the first one."""
        if self.again is not None:
            kept = getattr(self.again, _KEPT, None) or {}
            # Each backward runs a block again once, from its start.
            this_time = layer, torch._C._current_graph_task_id()
            if layer in kept and this_time not in kept:
                kept[this_time] = iter(kept[layer])
            value = next(kept.get(this_time, iter(())), value)
        for block in self.first:
            if not hasattr(block, _KEPT):
                setattr(block, _KEPT, {})
            getattr(block, _KEPT).setdefault(layer, []).append(value)
        return value


def checkpointed_run(x: Tensor) -> CheckpointedRun | None:
    """The blocks in which this thread runs now; None outside of them, and where x is traced."""
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return None
    first: list[Any] = []
    for name, values in _frames_of_checkpoint():
        if name == "backward":
            return CheckpointedRun(first, values.get("ctx"))
        if name == "unpack_hook":
            return CheckpointedRun(first, values.get("frame"))
        if name == "forward" and "ctx" in values:
            first.append(values["ctx"])
        elif name == "checkpoint" and "gen" in values:
            first.append(values["gen"].gi_frame.f_locals["new_frame"])
    return CheckpointedRun(first, None) if first else None


def _frames_of_checkpoint() -> Iterator[tuple[str, Any]]:
    """Functions of torch.utils.checkpoint on the stack, the innermost first, with their local variables."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == _FILE:
            yield frame.f_code.co_name, frame.f_locals
        frame = frame.f_back
