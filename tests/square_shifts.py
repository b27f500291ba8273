"""What travels in a forward and backward of a SquareLinear."""

from collections.abc import Iterator

from lancet_kernels import SquareLinear
from lancet_kernels.graph.rules.slices import moves


def shifts_of(layer: SquareLinear) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Each shift in which something travels: its phase or end, the tensor of which tiles travel (x, weight,
    y, dy, dx), and their sources."""
    for name, steps in layer._movements._asdict().items():
        yield from ((*name.split("_"), step) for step in steps if moves(step))
    for end, tensors, way in (("enter", ("x", "dx"), layer.enter), ("leave", ("y", "dy"), layer.leave)):
        for tensor, plan in zip(tensors, (way.there, way.back), strict=True):
            if moves(plan.sources):
                yield end, tensor, plan.sources
