"""What this library writes on nodes of fx graphs: typed entries of `node.meta`, all in one place.

The entries of torch ("val", "desc", "partitioner_tag") are read under their own names.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from torch import fx

T = TypeVar("T")


class Entry(Generic[T]):
    """One entry of `meta`. Example: `MILLISECONDS.set(node, 2.5)`; then `MILLISECONDS.get(node) == 2.5`."""

    def __init__(self, key: str) -> None:
        self.key = key

    def on(self, node: fx.Node) -> bool:
        """Does the node have the entry?"""
        return self.key in node.meta

    def get(self, node: fx.Node) -> T | None:
        """The entry; None if the node has none."""
        return node.meta.get(self.key)

    def of(self, node: fx.Node) -> T:
        """The entry of a node that has it."""
        return node.meta[self.key]

    def set(self, node: fx.Node, value: T) -> None:
        """Write the entry."""
        node.meta[self.key] = value


MILLISECONDS: Entry[float] = Entry("milliseconds")
"""The time of an instruction that needs no measurement."""
GROUP: Entry[str] = Entry("group")
"""The name of a collective's group, for its costs."""
STANDS_FOR: Entry[str] = Entry("stands_for")
"""The name of the tensor that a node reassembles from its parts."""
KEPT_BYTES: Entry[int] = Entry("kept_bytes")
"""The bytes that the ticket of a fused forward launch, its last result, keeps alive."""
ROWS_BY_EXPERT: Entry[bool] = Entry("rows_by_expert")
"""Are the rows sorted by local expert, rather than by rank?"""
REGION: Entry[int] = Entry("recomputed_region")
"""The number of a recomputed node's checkpointed region (`graph.capture.recompute`), in the order in which
the backward reads them."""
UNIT: Entry[tuple[Any, int]] = Entry("gathered_unit")
"""In which pass over the model a node gathers sharded parameters (`schedules.rewrite.gathers`), and the
number of their unit."""
IN_BACKWARD: Entry[bool] = Entry("in_backward")
"""The node belongs to the backward although it depends on no tangent."""
GRADIENTS_OF: Entry[tuple] = Entry("gradients_of")
"""What identifies a sum of gradients over the ranks, with the names of its parameters, which other sums may
have, too."""
WRITTEN_INTO: Entry[str] = Entry("written_into")
"""The name of the tensor into whose storage the node writes its result."""
IN_PLACE: Entry[bool] = Entry("parts_in_place")
"""The node joins parts that are written in place (`schedules.rewrite.apply`)."""
HOLDS_PARTS: Entry[bool] = Entry("holds_parts")
"""The node is only the storage of parts, or a slice of it."""
