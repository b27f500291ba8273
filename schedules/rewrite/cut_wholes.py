"""Reassembly of a partitioned range: nodes that join the parts of tensors, for readers outside the parts."""

from __future__ import annotations

import operator
import re

import torch
from torch import Tensor, fx

from lancet_kernels.graph.capture.captured_graph import set_value
from lancet_kernels.graph.from_fx import is_view, tensor_names, with_elements
from lancet_kernels.graph.meta import STANDS_FOR
from lancet_kernels.graph.ops import argument
from lancet_kernels.graph.program.forms import CARRIED, IRREGULAR, PARTIAL, WINDOW
from lancet_kernels.graph.rules.rules import MEAN
from lancet_kernels.schedules.rewrite.cut_parts import (
    Parts,
    Routing,
    are_by_expert,
    element_of,
    refuse,
    rule_of,
)

aten, lancet = torch.ops.aten, torch.ops.lancet

JOIN_STEP = re.compile(r"_(laid_out(_\d+)?|joined)$")
"""The end of the names of steps that join parts in the layout of the whole; the last step has none."""

Replacement = tuple[fx.Node, fx.Node, fx.Node]
"""(reader, its old input, its new input)"""


class Reassembly:
    """The whole tensors of a partitioned range. `wholes[element]` is the reassembled tensor."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.wholes: dict[fx.Node, fx.Node] = {}

    def replacements(self, node: fx.Node) -> list[Replacement]:
        """For the results of a cut node: readers outside the parts get the reassembled tensors."""
        replacements = []
        for element in with_elements(node):
            readers = [user for user in element.users if user not in self.parts.partitioned]
            if readers and tensor_names(element):
                whole = self.whole(element)
                replacements += [(reader, element, whole) for reader in readers]
        return replacements

    def whole(self, element: fx.Node) -> fx.Node:
        """The node with the reassembled tensor; created on first use."""
        if element not in self.wholes:
            node = element.args[0] if element.target is operator.getitem else element
            whole = self._view_again(node) or self._join(node, element)
            if whole.target is not operator.getitem:
                STANDS_FOR.set(whole, tensor_names(element)[0])
            self.wholes[element] = whole
        return self.wholes[element]

    def _view_again(self, node: fx.Node) -> fx.Node | None:
        """Repeat a view on the whole tensor, which is free; joining the parts of a view would copy them.

        None if the op is not a view, or cannot be one here: reassembled tensors are contiguous, even if the
        original was not (attention's transposed result).
        """
        if not is_view(node):
            return None
        args = fx.map_arg(
            node.args, lambda source: self.whole(source) if source in self.parts.partitioned else source
        )
        try:
            return self.parts.call(node.target, args, dict(node.kwargs), f"{node.name}_whole")
        except (RuntimeError, ValueError):
            return None

    def _join(self, node: fx.Node, element: fx.Node) -> fx.Node:
        if any(element not in env for env in self.parts.env):
            raise refuse(
                f"{element.name} read before all its parts are computed", "an order that computes them first"
            )
        parts = [self.parts.env[p][element] for p in range(self.parts.count)]
        name, form = f"{element.name}_whole", self.parts.form(element)
        if form == CARRIED:
            return parts[-1]
        if form == PARTIAL or rule_of(node).is_count:
            total = parts[0]
            for other in parts[1:]:
                total = self.parts.call(aten.add.Tensor, (total, other), {}, name)
            if self._is_mean_of_sums(node, element):
                weight = self.whole(element_of(node, 1))
                total = self.parts.call(aten.div.Tensor, (total, weight), {}, f"{element.name}_mean")
            return total
        if form in (WINDOW, IRREGULAR):
            count = self._count_of(node)
            pick = self.parts.window_counts if form == WINDOW else self.parts.part
            counts = [pick(count, p) for p in range(self.parts.count)]
            merged = self.parts.rows(lancet.merge_parts.default, (parts, counts), are_by_expert(node), name)
            # The expected row counts of the parts are bounded one by one, and need not add up to the whole's.
            set_value(merged, element.meta["val"])
            return merged
        if form.dimension is not None:
            return self._concatenate(parts, form.dimension, element.meta["val"], name)
        raise refuse(
            f"{element.name}, whole in every part, read after the range", "tensors that can be reassembled"
        )

    def _is_mean_of_sums(self, node: fx.Node, element: fx.Node) -> bool:
        name = rule_of(node).reduction_argument
        return bool(name) and argument(node, name) == MEAN and element.args[1] == 0

    def _count_of(self, node: fx.Node) -> fx.Node:
        """The counts of the rows that an op returns."""
        rule = rule_of(node)
        if rule.count_arguments:
            return argument(node, rule.count_arguments[-1])
        return next(routing.count for routing in self.parts.routings if routing.dispatch is node)

    def _concatenate(self, parts: list[fx.Node], axis: int, whole: Tensor, name: str) -> fx.Node:
        """The concatenated parts, in the memory layout of the uncut tensor, which its readers may rely on.

        Names of all steps but the last one end as `JOIN_STEP` says.
        """
        order = sorted(range(whole.dim()), key=lambda d: -whole.stride()[d])
        if order == list(range(whole.dim())):
            return self.parts.call(aten.cat.default, (parts, axis), {}, name)
        laid_out = [
            self.parts.call(aten.permute.default, (part, order), {}, f"{name}_laid_out") for part in parts
        ]
        joined = self.parts.call(aten.cat.default, (laid_out, order.index(axis)), {}, f"{name}_joined")
        back = [order.index(d) for d in range(whole.dim())]
        return self.parts.call(aten.permute.default, (joined, back), {}, name)

    def merged_rows(self, routing: Routing) -> list[Replacement]:
        """Readers of row indices after the range get the indices into the merged rows."""
        readers = [user for user in routing.row.users if user not in self.parts.partitioned]
        if not readers:
            return []
        experts = [self.parts.part(routing.expert, p) for p in range(self.parts.count)]
        rows, counts = zip(
            *(self.parts.rows_and_counts(routing, p) for p in range(self.parts.count)), strict=True
        )
        name = f"{routing.row.name}_merged"
        merged = self.parts.call(lancet.merge_rows.default, (experts, list(rows), list(counts)), {}, name)
        return [(reader, routing.row, merged) for reader in readers]
