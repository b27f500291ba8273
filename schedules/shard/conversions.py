"""The collective that converts a tensor from one form to another, and its adjoint in the backward.

HiDup, section 4.1. The gradient of a tensor has the dual form: of a slice a slice, of a partial tensor the
whole, and of a whole tensor a partial one, because each rank computes the gradient from its own readers only.
So the backward needs no signatures of its own, and every collective has one adjoint:

    from      to        forward           backward
    whole     cut i     slice (local)     zeros around the slice (local)
    cut i     whole     all-gather        reduce-scatter
    cut i     cut j     all-to-all        all-to-all
    partial   whole     all-reduce        all-reduce
    partial   cut i     reduce-scatter    all-gather
"""

from __future__ import annotations

from dataclasses import dataclass

from lancet_kernels.graph.costs.costs import Cost
from lancet_kernels.graph.program.forms import PARTIAL, WHOLE, Form, cut_along
from lancet_kernels.graph.program.program import Instruction, Kind, TensorSpec

SLICE = "slice"
ADJOINT = {
    SLICE: SLICE,
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
    "all_reduce": "all_reduce",
}
MESSAGE_KINDS = {
    "all_to_all": Kind.ALL_TO_ALL,
    "all_reduce": Kind.ALL_REDUCE,
    "all_gather": Kind.OTHER_COMMUNICATION,
    "reduce_scatter": Kind.OTHER_COMMUNICATION,
}


def collective(source: Form, target: Form) -> str | None:
    """The collective that converts a tensor from one form to another; None if there is none."""
    if source == WHOLE and target.is_cut:
        return SLICE
    if source.is_cut and target == WHOLE:
        return "all_gather"
    if source.is_cut and target.is_cut:
        return "all_to_all"
    if source == PARTIAL and target == WHOLE:
        return "all_reduce"
    if source == PARTIAL and target.is_cut:
        return "reduce_scatter"
    return None


def forms_of(spec: TensorSpec, ranks: int) -> list[Form]:
    """Whole, and cut along each dimension that the ranks divide."""
    return [
        WHOLE,
        *(cut_along(d) for d, size in enumerate(spec.shape) if size >= ranks and size % ranks == 0),
    ]


def held_bytes(spec: TensorSpec, form: Form, ranks: int) -> float:
    """Bytes of a tensor's values on one rank."""
    return spec.content_bytes / (ranks if form.is_cut else 1)


@dataclass(frozen=True)
class CollectiveCosts:
    """Milliseconds of collectives among `ranks` ranks, from a `Cost` that covers communication."""

    cost: Cost
    ranks: int

    def milliseconds(self, name: str, spec: TensorSpec) -> float:
        """The time of one collective on a tensor. Args: spec: of the whole tensor; the cost of an all-to-all
        depends on the bytes of a rank's slice, that of all others on the bytes of the whole."""
        if name == SLICE or self.ranks == 1:
            return 0.0
        size = spec.content_bytes / (self.ranks if name == "all_to_all" else 1)
        message = Instruction(
            f"{name} of {spec.name}",
            f"sharding.{name}",
            kind=MESSAGE_KINDS[name],
            bytes=size,
            attributes={"collective": name},
        )
        return self.cost(message, {})
