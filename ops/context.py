"""What ops share beside their arguments: the objects of a planned step, and what this process does now.

    context = Context(Accumulation())         one for each planned step, which keeps it alive
    fused_experts(..., context.number, "dispatch_1")      a graph has numbers and names, no objects
    context_of(number).layers["dispatch_1"]   in the op

The emulated link (`ops.comm.link`) is not in it: ranks have one wire, whatever steps they run.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

_numbers = itertools.count()


class Context:
    """The objects of a planned step, also of that for inputs of other shapes.

    number: by which its graphs refer to it. accumulation: its sums of gradients, an
    `ops.comm.all_reduce.Accumulation`. layers: by name, the exchanges of its fused MoE layers
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
    """What this process does now: of all threads, as autograd runs a backward in threads of its own.

    layer: the MoE layer whose collectives are entered next, for messages. runs_a_plan: the collectives of a
    plan differ from those of the module, so it is an error if a rank runs the plan while another runs the
    module. expects_sizes: ops that make rows give a trace the expected number of them, instead of a symbol.
    padding_mask: of the batch, for MoE layers that are called without one (`MoELayer.forward`). weights: by
    name, what the MoE layer that runs takes for its parameters, in a trace. routed: by layer, the rows of
    each of this rank's experts, where somebody counts.
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
