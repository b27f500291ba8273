"""One part of an instruction in an fx graph: its node, its slice of the operands, its rows and counts.

A part reads the parts of partitioned tensors, slices of tensors from outside the range, and the complete sums
of partial tensors. `CutError` is raised wherever a range cannot be cut.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.captured_graph import fake_mode_of, set_value
from lancet_kernels.graph.capture.trace import layer_meta
from lancet_kernels.graph.costs.part_instruction import part_name
from lancet_kernels.graph.from_fx import facts_of, tensor_names, with_elements
from lancet_kernels.graph.meta import KEPT_BYTES, ROWS_BY_EXPERT, SAME_CALL
from lancet_kernels.graph.ops import argument, argument_names
from lancet_kernels.graph.rules.rules import PARTIAL, WHOLE, WINDOW, Form, Forms, Rule

aten, lancet = torch.ops.aten, torch.ops.lancet
_SUM_OF_MEAN = {aten.mean.default: aten.sum.default, aten.mean.dim: aten.sum.dim_IntList}

Values = dict[Any, dict[str, Any]]
"""Cache of the `meta` of nodes, fake results included, by op and shapes of the arguments: repeated layers are
computed once."""
_NO_RULE = Rule()


class CutError(UserError):
    """A range cannot be cut into parts as asked."""


def refuse(got: str, expected: str) -> CutError:
    """The error for a range that cannot be cut."""
    return CutError(
        "range to cut", got=got, expected=expected, do="leave the range whole, or choose another one"
    )


@dataclass(frozen=True)
class Routing:
    """The routing of an MoE layer whose dispatch (or fused launch) is in the range: this op, its send_rows,
    and what that reads."""

    dispatch: fx.Node
    row: fx.Node
    expert: fx.Node
    slot: fx.Node
    count: fx.Node
    num_experts: int
    capacity: int

    @classmethod
    def of(cls, dispatch: fx.Node) -> Routing:
        """The routing that a dispatch reads. Raises: CutError for ops other than those of an MoELayer."""
        row = argument(dispatch, rule_of(dispatch).row_argument)
        if rule_of(row).routing != "rows" or rule_of(row.args[2]).routing != "counts":
            raise refuse(f"{dispatch.name} without send_rows or kept_counts", "the ops of an MoELayer")
        expert, slot, count = row.args
        return cls(dispatch, row, expert, slot, count, count.meta["val"].numel(), count.args[1])


def rule_of(node: fx.Node) -> Rule:
    """The rule of a node's op; an empty one if it has none."""
    return (facts_of(node).rule if node.op == "call_function" else None) or _NO_RULE


def form_of(node: fx.Node, forms: Forms) -> Form:
    """The form of the tensor that a node stands for; whole for a tuple."""
    if isinstance(node.meta.get("val"), (tuple, list)):
        return WHOLE  # even a tuple of one tensor, as of the backward of a frozen norm
    names = tensor_names(node)
    return forms.get(names[0], WHOLE) if names else WHOLE


def shape_of(node: fx.Node) -> list[int]:
    """The sizes as ints: graph inputs may have symbolic sizes."""
    return [int(size) for size in node.meta["val"].shape]


def element_of(node: fx.Node, index: int) -> fx.Node:
    """The getitem node of an element of a tuple."""
    return next(user for user in node.users if user.target is operator.getitem and user.args[1] == index)


def are_by_expert(node: fx.Node) -> bool:
    """Are these received rows, sorted by local expert, rather than rows to send, sorted by rank?"""
    while not ROWS_BY_EXPERT.on(node):
        rule = rule_of(node)
        if rule.most_rows_argument:
            return False
        if rule.to_experts_argument:
            return argument(node, rule.to_experts_argument)
        if not rule.count_arguments:
            raise refuse(f"rows of {node.name}", "rows of a dispatch or an all-to-all")
        node = node.args[0]
    return ROWS_BY_EXPERT.of(node)


class Parts:
    """The nodes of all parts of a range. `env[p][node]` is the node that replaces `node` in part p.

    Args:
        cut: the nodes that run part by part. count: the number of parts.
        whole: gives the node with the complete sum of a partial tensor.
        empty: parts may have no elements.
    """

    def __init__(
        self,
        graph: fx.Graph,
        cut: Sequence[fx.Node],
        forms: Forms,
        count: int,
        routings: Sequence[Routing],
        values: Values | None,
        whole: Callable[[fx.Node], fx.Node],
        empty: bool = False,
    ) -> None:
        self.graph, self.forms, self.count, self.routings, self._cut = graph, forms, count, routings, cut
        self.partitioned = {element for node in cut for element in with_elements(node)}
        self.env: list[dict[fx.Node, fx.Node]] = [{} for _ in range(count)]
        self._values, self._whole = values, whole
        self._rows_and_counts: list[dict[Routing, tuple[fx.Node, fx.Node]]] = [{} for _ in range(count)]
        self._windows: dict[tuple[fx.Node, int], fx.Node] = {}
        self._units = _units(cut, forms, count, 0 if empty else count)
        # The first part is the largest, so that what is allocated for its size is enough for all.
        self._bounds = [-(-self._units * p // count) for p in range(count + 1)]

    def form(self, node: fx.Node) -> Form:
        """The form of a tensor in the parts."""
        return form_of(node, self.forms)

    def copy(self, node: fx.Node, part: int) -> None:
        """Insert one part of an instruction at the graph's insertion point."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: self.part(source, part, node))
        rule, is_cut = rule_of(node), self.form(node).is_cut
        names = argument_names(node.target)
        args = rule.arguments_of_slice(args, names, self._part_shape(node, part) if is_cut else None)
        if part:
            for output, name in rule.carries:
                args[names.index(name)] = self.env[part - 1][element_of(node, output)]
        if rule.most_rows_argument:
            # At most one row per choice, and at most one per slot.
            args[names.index(rule.most_rows_argument)] = min(args[1].meta["val"].numel(), shape_of(node)[0])
        if rule.num_rows_argument:
            args[names.index(rule.num_rows_argument) :] = [None]
        if rule.count_arguments and self.form(node.args[0]) == WHOLE:
            raise refuse(
                f"a part of {node.name} that reads all of {node.args[0].name}", "only the rows of the part"
            )
        if rule.count_arguments and self.form(node.args[0]) == WINDOW:
            for position in map(names.index, rule.count_arguments):
                args[position] = self.window_counts(node.args[position], part)
        is_share = rule.averages and self.form(node) == PARTIAL
        is_empty = is_share and not args[0].meta["val"].numel()
        # The mean of an empty part is NaN, its sum zero.
        target = _SUM_OF_MEAN[node.target] if is_empty else node.target
        copy = self.call(target, tuple(args), dict(kwargs), part_name(node.name, part))
        if is_share:
            share = args[0].meta["val"].numel() / node.args[0].meta["val"].numel()
            copy = self.call(aten.mul.Tensor, (copy, share), {}, f"{part_name(node.name, part)}_share")
        copy.meta.update(layer_meta(node))
        if KEPT_BYTES.on(node):
            KEPT_BYTES.set(copy, KEPT_BYTES.of(node) // self.count)
        self.env[part][node] = copy
        for user in node.users:
            if user.target is operator.getitem:
                element = self.call(operator.getitem, (copy, user.args[1]), {}, part_name(user.name, part))
                self.env[part][user] = element

    def part(self, node: fx.Node, part: int, reader: fx.Node | None = None) -> fx.Node:
        """The node that stands for `node` in a part: the part's copy, rows or counts, a slice, or the node.

        Args: reader: the op that reads it; its count argument gives the number of rows.
        """
        if node in self.partitioned and self.form(node) == PARTIAL:
            return self._whole(node)
        if node in self.env[part]:
            return self.env[part][node]
        if node in self.partitioned:
            raise refuse(
                f"{node.name} of part {part} read before it is computed", "an order that computes it first"
            )
        for routing in self.routings:
            if node in (routing.row, routing.count):
                row, count = self.rows_and_counts(routing, part)
                return row if node is routing.row else count
        form = self.form(node)
        own = node
        if form == WINDOW and reader is not None:
            count = argument(reader, rule_of(reader).count_arguments[0])
            own = self.rows(
                lancet.window_rows.default,
                (node, count, part, self.count),
                are_by_expert(node),
                f"{node.name}_window{part}",
            )
        elif form.dimension is not None:
            first, end = self._window(shape_of(node)[form.dimension], part)
            args = (node, form.dimension, first, end)
            own = self.call(aten.slice.Tensor, args, {}, f"{node.name}_slice{part}")
        elif form != WHOLE:
            raise refuse(
                f"irregular rows of {node.name}, which is outside the range",
                "a range that contains the dispatch",
            )
        self.env[part][node] = own
        return own

    def _part_shape(self, node: fx.Node, part: int) -> list[int]:
        shape, dimension = shape_of(node), self.form(node).dimension
        assert dimension is not None, f"{node.name} is not cut"
        first, end = self._window(shape[dimension], part)
        shape[dimension] = end - first
        return shape

    def _window(self, size: int, part: int) -> tuple[int, int]:
        """Start and end index (exclusive) of a part in a dimension of this size."""
        scale = size // max(1, self._units)
        return self._bounds[part] * scale, self._bounds[part + 1] * scale

    def rows_and_counts(self, routing: Routing, part: int) -> tuple[fx.Node, fx.Node]:
        """The nodes of a part's row_TK and counts[W, E_l]."""
        if routing not in self._rows_and_counts[part]:
            expert, slot = self.part(routing.expert, part), self.part(routing.slot, part)
            args = expert, slot, routing.num_experts, routing.capacity
            name = f"{routing.dispatch.name}_rows_part{part}"
            both = self.call(lancet.part_rows.default, args, {}, name)
            row = self.call(operator.getitem, (both, 0), {}, f"{name}_row")
            count = self.call(operator.getitem, (both, 1), {}, f"{name}_count")
            shape = shape_of(routing.count)
            count = self.call(aten.view.default, (count, shape), {}, f"{name}_counts")
            self._rows_and_counts[part][routing] = row, count
        return self._rows_and_counts[part][routing]

    def window_counts(self, count: fx.Node, part: int) -> fx.Node:
        """The number of rows of each (rank, expert) in a part's window of slots."""
        if (count, part) not in self._windows:
            args = (count, part, self.count)
            name = f"{count.name}_window{part}"
            self._windows[count, part] = self.call(lancet.window_counts.default, args, {}, name)
        return self._windows[count, part]

    def rows(self, target, args: tuple, by_expert: bool, name: str) -> fx.Node:
        """A node whose result is received rows (by expert) or rows to send."""
        node = self.call(target, (*args, by_expert), {}, name)
        ROWS_BY_EXPERT.set(node, by_expert)
        return node

    def call(self, target, args: tuple, kwargs: dict, name: str) -> fx.Node:
        """A new node that calls an op, with its fake result."""
        node = self.graph.create_node("call_function", target, args, kwargs, name)
        try:
            self._set_value(node)
        except BaseException:
            self.graph.erase_node(node)
            raise
        return node

    def _set_value(self, node: fx.Node) -> None:
        """Set the fake result of a new node."""
        if self._values is not None:
            key = node.target, fx.map_arg((node.args, node.kwargs), _cache_key_of_result)
            if key in self._values:
                node.meta.update(self._values[key])
                return
        fake = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        with fake_mode_of(self._cut[0]):
            set_value(node, node.target(*fake[0], **fake[1]))
        if self._values is not None:
            SAME_CALL.set(node, {})
            self._values[key] = dict(node.meta)


def _units(cut: Sequence[fx.Node], forms: Forms, parts: int, least: int) -> int:
    """The size of the shortest dimension that is cut, `least` or more: every other one is a multiple of
    it."""
    sizes = set()
    for node in cut:
        for n in (*node.all_input_nodes, *with_elements(node)):
            form = form_of(n, forms)
            if form.dimension is not None:
                sizes.add(shape_of(n)[form.dimension])
    # Windows of slots fit any number of rows.
    units = min(sizes, default=parts)
    if units < least or any(size % max(1, units) for size in sizes):
        raise refuse(
            f"{parts} parts of dimensions {sorted(sizes)}",
            "dimensions that are multiples of the shortest one, which has at least one element per part",
        )
    return units


def _cache_key_of_result(node: fx.Node) -> tuple:
    same = node.meta.setdefault(SAME_CALL.key, {})
    if "result" not in same:
        same["result"] = _cache_key(node.meta["val"])
    return same["result"]


def _cache_key(value: Any) -> Any:
    """Everything of a tensor but its contents."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_cache_key, value))
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return value
