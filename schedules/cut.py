"""A range of a graph, cut into parts: the nodes of every part, and the whole tensors where they are read.

Lancet, section 5 and figures 5(c) and 8. Of `range` = [dispatch, all_to_all, ..., next layer's
attention] and k = 2 it makes

    dispatch_0 dispatch_1 all_to_all_0 ...  (in the order that was asked for)  and, where somebody behind
    the range reads a tensor of it, one node that puts the parts together.

How a part has a tensor says its form (`graph.forms`); which arguments of an op are others in a part says its
rule (`graph.rules`). Behind the gate, rows are irregular: each part has its own counts, its own exchange of
counts and its own rows. `CutError` means that the range can't be cut like that; the graph is then as it was.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture import fake_mode_of, set_value
from lancet_kernels.graph.forms import (
    CARRIED,
    IRREGULAR,
    PARTIAL,
    WHOLE,
    WINDOW,
    Form,
    Forms,
    any_made_in_parts,
)
from lancet_kernels.graph.from_fx import is_instruction, is_view, op_name, tensor_names
from lancet_kernels.graph.part_instruction import part_name
from lancet_kernels.graph.rules import RULES, Rule
from lancet_kernels.schedules.in_place import mark_join

aten, lancet = torch.ops.aten, torch.ops.lancet

_NO_RULE = Rule()
MEAN, SUM = 1, 2
"""What torch's losses call a reduction."""

_Replacement = tuple[fx.Node, fx.Node, fx.Node]
"""(reader, what it reads, what it shall read instead)"""


class CutError(UserError):
    """A range cannot be cut into parts as asked."""


@dataclass(frozen=True)
class Cut:
    """What to cut: instructions by name (in any order), how many parts, and the form of every tensor they
    touch that is not whole."""

    instructions: tuple[str, ...]
    parts: int
    forms: Forms


@dataclass(frozen=True)
class _Layer:
    """The routing of an MoE layer whose dispatch lies in the range."""

    dispatch: fx.Node
    row: fx.Node

    @property
    def expert(self) -> fx.Node:
        return self.row.args[0]

    @property
    def slot(self) -> fx.Node:
        return self.row.args[1]

    @property
    def count(self) -> fx.Node:
        return self.row.args[2]

    @property
    def num_experts(self) -> int:
        return self.count.meta["val"].numel()

    @property
    def capacity(self) -> int:
        return self.count.args[1]


Values = dict[Any, Any]
"""What an op gives for arguments of certain shapes, by both: layers that look alike are asked once."""


def cut_range(
    graph: fx.Graph,
    cut: Cut,
    order: Sequence[tuple[str, int | None]] | None = None,
    values: Values | None = None,
) -> list[str]:
    """Replace the instructions of a range by those of its parts.

    Args:
        order: (instruction, part) in the order to run, part None for one that is not cut; default: all parts
            of an instruction, then the next.
        values: of ops seen before, for a graph that is only looked at: nodes then share their
            `meta["val"]`, and so what torch takes for their storage. None: each node has its own.
    Returns: names of the new instruction nodes, in order.
    Raises: CutError.
    """
    before = {node.name for node in graph.nodes}
    _Cutter(graph, cut, values).run(order)
    return [node.name for node in graph.nodes if node.name not in before and is_instruction(node)]


class _Cutter:
    """`env[p][node]` is what stands for `node` in part p."""

    def __init__(self, graph: fx.Graph, cut: Cut, values: Values | None) -> None:
        self.graph, self.forms, self.parts, self.values = graph, cut.forms, cut.parts, values
        names = set(cut.instructions)
        self.inside = [node for node in graph.nodes if node.name in names]
        if len(self.inside) != len(names) or not names:
            raise _refuse(
                f"{len(names) - len(self.inside)} unknown instructions", "instructions of the graph"
            )
        dispatches = [node for node in self.inside if _rule(node).most_rows_argument is not None]
        self.layers = [self._layer(node) for node in dispatches]
        # Parts have counts and rows of their own; the whole's come from the slots that all parts used.
        self.late = [node for node in self.inside if _rule(node).routing]
        self.cut = [node for node in self.inside if node not in self.late and self._is_cut(node)]
        self.made = {element for node in self.cut for element in _with_elements(node)}
        self.env: list[dict[fx.Node, fx.Node]] = [{} for _ in range(self.parts)]
        self.local: list[dict[_Layer, tuple[fx.Node, fx.Node]]] = [{} for _ in range(self.parts)]
        self.windows: dict[tuple[fx.Node, int], fx.Node] = {}
        self.wholes: dict[fx.Node, fx.Node] = {}
        self.bounds = self._unit_bounds()

    def run(self, order: Sequence[tuple[str, int | None]] | None) -> None:
        """Put the range together anew, in order; mend the readers of what is cut, take the originals out."""
        nodes = {node.name: node for node in self.inside if node not in self.late}
        cut = set(self.cut)
        if order is None:
            order = [(n.name, p) for n in self.inside for p in (range(self.parts) if n in cut else (None,))]
        order = [(name, part) for name, part in order if name in nodes]
        wanted: list[tuple[str, int | None]] = [
            (n.name, p) for n in nodes.values() if n in cut for p in range(self.parts)
        ]
        wanted += [(n.name, None) for n in nodes.values() if n not in cut]
        if Counter(order) != Counter(wanted):
            raise _refuse("an order that is not every instruction once per part", "all of them")
        end = _with_elements(self.inside[-1])[-1].next
        before = list(self.graph.nodes)
        try:
            with self.graph.inserting_before(end):
                for name, part in order:
                    if part is None:
                        self._move(nodes[name], end)
                    else:
                        self._copy(nodes[name], part)
                        if part + 1 == self.parts:
                            self._add_up(nodes[name])
                rows = {layer.row: layer for layer in self.layers}.values()
                replacements = [r for layer in rows for r in self._mended_rows(layer)]
                replacements += [r for node in self.cut for r in self._reassembled(node)]
        except (RuntimeError, ValueError, IndexError) as error:
            present = set(before)
            for node in reversed(self.graph.nodes):
                if node not in present:
                    self.graph.erase_node(node)
            for node, follower in pairwise(before):
                node.append(follower)
            if isinstance(error, CutError):
                raise
            reason = str(error).splitlines()[0]
            raise _refuse(f"parts that do not fit together: {reason}", "axes that the rules allow") from error
        for reader, old, new in replacements:
            reader.replace_input_with(old, new)
        for node in reversed(self.cut):
            for element in reversed(_with_elements(node)):
                self.graph.erase_node(element)
        for node in self.late:
            end.prepend(node)
        for node in (*reversed(self.late), *reversed(self.wholes.values())):
            if not node.users:
                self.graph.erase_node(node)
        for whole in self.wholes.values():
            if whole.users:
                mark_join(whole)

    def _move(self, node: fx.Node, end: fx.Node) -> None:
        """To the end of what is there so far, behind the whole tensors that it reads."""
        for source in node.all_input_nodes:
            if source in self.made:
                self._whole(source)
            if source in self.late:
                raise _refuse(f"{node.name} as a whole, which reads {source.name}", "a part of it")
        for element in _with_elements(node):
            end.prepend(element)

    def _add_up(self, node: fx.Node) -> None:
        """Summands are added when the last one is there, so that they need not be kept."""
        for element in _with_elements(node):
            if self._form(element) == PARTIAL and element.users and tensor_names(element):
                self._whole(element)

    # What is in the range

    def _layer(self, dispatch: fx.Node) -> _Layer:
        row = dispatch.args[1]
        if _rule(row).routing != "rows" or _rule(row.args[2]).routing != "counts":
            raise _refuse(f"{dispatch.name} without send_rows or kept_counts", "the ops of an MoELayer")
        return _Layer(dispatch, row)

    def _is_cut(self, node: fx.Node) -> bool:
        return any_made_in_parts(self.forms, tensor_names(node))

    def _unit_bounds(self) -> list[int]:
        """Borders of the parts, in units of the shortest dimension that is cut."""
        sizes = set()
        for node in self.cut:
            for n in (*node.all_input_nodes, *_with_elements(node)):
                form = self._form(n)
                if form.dimension is not None:
                    sizes.add(_shape(n)[form.dimension])
        # Windows of slots fit any number of rows.
        units = min(sizes, default=self.parts)
        if units < self.parts or any(size % units for size in sizes):
            raise _refuse(
                f"{self.parts} parts of dimensions {sorted(sizes)}", "dimensions that the parts divide alike"
            )
        self.units = units
        return [units * p // self.parts for p in range(self.parts + 1)]

    def _form(self, node: fx.Node) -> Form:
        names = tensor_names(node)
        return self.forms.get(names[0], WHOLE) if len(names) == 1 else WHOLE

    def _window(self, size: int, part: int) -> tuple[int, int]:
        """First and behind-the-last index of a part in a dimension of that size."""
        scale = size // self.units
        return self.bounds[part] * scale, self.bounds[part + 1] * scale

    # One instruction of one part

    def _copy(self, node: fx.Node, part: int) -> None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: self._part(source, part, node))
        args, rule = list(args), _rule(node)
        if part:
            for output, argument in rule.carries:
                args[argument] = self.env[part - 1][_element(node, output)]
        if rule.most_rows_argument is not None:
            # No more than one row per choice, and no more than there are slots.
            args[rule.most_rows_argument] = min(args[1].meta["val"].numel(), _shape(node)[0])
        if rule.num_rows_argument is not None:
            args[rule.num_rows_argument :] = [None]
        if rule.count_arguments and self._form(node.args[0]) == WHOLE:
            raise _refuse(f"{node.args[0].name} as a whole, read by a part of {node.name}", "rows of a part")
        if rule.count_arguments and self._form(node.args[0]) == WINDOW:
            for position in rule.count_arguments:
                args[position] = self._window_counts(node.args[position], part)
        if rule.shape_argument is not None and self._form(node).is_cut:
            args[rule.shape_argument] = self._part_shape(node, part)
        if rule.reduction_argument is not None and args[rule.reduction_argument] == MEAN:
            args[rule.reduction_argument] = SUM
        copy = self._call(node.target, tuple(args), dict(kwargs), part_name(node.name, part))
        if rule.averages and self._form(node) == PARTIAL:
            share = args[0].meta["val"].numel() / node.args[0].meta["val"].numel()
            copy = self._call(aten.mul.Tensor, (copy, share), {}, f"{part_name(node.name, part)}_share")
        self.env[part][node] = copy
        self._copy_elements(node, copy, part)

    def _copy_elements(self, node: fx.Node, copy: fx.Node, part: int) -> None:
        for user in node.users:
            if user.target is operator.getitem:
                element = self._call(operator.getitem, (copy, user.args[1]), {}, part_name(user.name, part))
                self.env[part][user] = element

    def _call(self, target, args: tuple, kwargs: dict, name: str) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, kwargs, name)
        try:
            set_value(node, self._value(target, args, kwargs))
        except BaseException:
            self.graph.erase_node(node)
            raise
        return node

    def _value(self, target, args: tuple, kwargs: dict) -> object:
        """The result without contents."""
        given = fx.map_arg((args, kwargs), lambda source: source.meta["val"])
        key = None if self.values is None else _looks((target, *given))
        if self.values is not None and key in self.values:
            return self.values[key]
        with fake_mode_of(self.inside[0]):
            value = target(*given[0], **given[1])
        if self.values is not None:
            self.values[key] = value
        return value

    def _part(self, node: fx.Node, part: int, reader: fx.Node | None = None) -> fx.Node:
        """What stands for a node in a part: its copy, its own rows or counts, a slice of it, or itself.

        Args: reader: who reads it; it says how many rows there are.
        """
        if node in self.made and self._form(node) == PARTIAL:
            return self._whole(node)
        if node in self.env[part]:
            return self.env[part][node]
        if node in self.made:
            raise _refuse(
                f"{node.name} of part {part} read before it is made", "an order that makes it first"
            )
        layer = self._layer_of(node)
        if layer is not None:
            row, count = self._local(layer, part)
            return row if node is layer.row else count
        form = self._form(node)
        own = node
        if form == WINDOW and reader is not None:
            count = reader.args[_rule(reader).count_arguments[0]]
            own = self._rows(
                lancet.window_rows.default,
                (node, count, part, self.parts),
                _lie_by_expert(node),
                f"{node.name}_window{part}",
            )
        elif form.dimension is not None:
            first, behind = self._window(_shape(node)[form.dimension], part)
            args = (node, form.dimension, first, behind)
            own = self._call(aten.slice.Tensor, args, {}, f"{node.name}_slice{part}")
        elif form != WHOLE:
            raise _refuse(f"{node.name}, which is made outside, irregular", "an all-to-all with its dispatch")
        self.env[part][node] = own
        return own

    def _part_shape(self, node: fx.Node, part: int) -> list[int]:
        shape, dimension = _shape(node), self._form(node).dimension
        assert dimension is not None, f"{node.name} is not cut"
        first, behind = self._window(shape[dimension], part)
        shape[dimension] = behind - first
        return shape

    # The routing of a part

    def _layer_of(self, node: fx.Node) -> _Layer | None:
        """The layer whose rows or counts a node is."""
        return next((layer for layer in self.layers if node in (layer.row, layer.count)), None)

    def _local(self, layer: _Layer, part: int) -> tuple[fx.Node, fx.Node]:
        """The part's own row_TK and counts [W, L]."""
        if layer not in self.local[part]:
            args = (self._part(layer.expert, part), self._part(layer.slot, part), layer.num_experts)
            name = f"{layer.dispatch.name}_rows_part{part}"
            both = self._call(lancet.part_rows.default, (*args, layer.capacity), {}, name)
            row = self._call(operator.getitem, (both, 0), {}, f"{name}_row")
            count = self._call(operator.getitem, (both, 1), {}, f"{name}_count")
            shape = _shape(layer.count)
            count = self._call(aten.view.default, (count, shape), {}, f"{name}_counts")
            self.local[part][layer] = row, count
        return self.local[part][layer]

    def _window_counts(self, count: fx.Node, part: int) -> fx.Node:
        """How many rows of each (rank, expert) are in a part's window of slots."""
        if (count, part) not in self.windows:
            args = (count, part, self.parts)
            name = f"{count.name}_window{part}"
            self.windows[count, part] = self._call(lancet.window_counts.default, args, {}, name)
        return self.windows[count, part]

    # The whole again

    def _reassembled(self, node: fx.Node) -> list[_Replacement]:
        """Readers outside the parts get whole tensors."""
        found = []
        for element in _with_elements(node):
            readers = [user for user in element.users if user not in self.made]
            if readers and tensor_names(element):
                whole = self._whole(element)
                found += [(reader, element, whole) for reader in readers]
        return found

    def _whole(self, element: fx.Node) -> fx.Node:
        """One node that is the whole tensor again; made once."""
        if element not in self.wholes:
            node = element.args[0] if element.target is operator.getitem else element
            whole = self._view_again(node) or self._join(node, element)
            if whole.target is not operator.getitem:
                whole.meta["stands_for"] = tensor_names(element)[0]
            self.wholes[element] = whole
        return self.wholes[element]

    def _view_again(self, node: fx.Node) -> fx.Node | None:
        """A view of the whole costs nothing; joining the parts of a view would copy them.

        None for what is no view, or no longer is one: joined parts are contiguous, whatever strides the
        original had (attention's result, transposed, had others).
        """
        if not is_view(node):
            return None
        args = fx.map_arg(node.args, lambda source: self._whole(source) if source in self.made else source)
        try:
            return self._call(node.target, args, dict(node.kwargs), f"{node.name}_whole")
        except (RuntimeError, ValueError):
            return None

    def _join(self, node: fx.Node, element: fx.Node) -> fx.Node:
        if any(element not in env for env in self.env):
            raise _refuse(f"{element.name} read before all parts of it are made", "an order that makes them")
        parts = [self.env[p][element] for p in range(self.parts)]
        name, form = f"{element.name}_whole", self._form(element)
        if form == CARRIED:
            return parts[-1]
        if form == PARTIAL or _rule(node).is_count:
            total = parts[0]
            for other in parts[1:]:
                total = self._call(aten.add.Tensor, (total, other), {}, name)
            if self._is_mean_of_sums(node, element):
                weight = self._whole(_element(node, 1))
                total = self._call(aten.div.Tensor, (total, weight), {}, f"{element.name}_mean")
            return total
        if form in (WINDOW, IRREGULAR):
            count = self._count_of(node)
            pick = self._window_counts if form == WINDOW else self._part
            counts = [pick(count, p) for p in range(self.parts)]
            merged = self._rows(lancet.merge_parts.default, (parts, counts), _lie_by_expert(node), name)
            # Expected sizes of parts, each bounded alone, need not add up to that of the whole.
            set_value(merged, element.meta["val"])
            return merged
        if form.dimension is not None:
            return self._concatenate(parts, form.dimension, element.meta["val"], name)
        raise _refuse(f"{element.name}, which is read behind the range", "a tensor that parts add up to")

    def _is_mean_of_sums(self, node: fx.Node, element: fx.Node) -> bool:
        position = _rule(node).reduction_argument
        return position is not None and node.args[position] == MEAN and element.args[1] == 0

    def _rows(self, target, args: tuple, by_expert: bool, name: str) -> fx.Node:
        """A node whose result are rows, received ones (by expert) or ones to send."""
        node = self._call(target, (*args, by_expert), {}, name)
        node.meta["rows_by_expert"] = by_expert
        return node

    def _count_of(self, node: fx.Node) -> fx.Node:
        """The counts of the rows that an op makes."""
        rule = _rule(node)
        if rule.count_arguments:
            return node.args[rule.count_arguments[-1]]
        return next(layer.count for layer in self.layers if layer.dispatch is node)

    def _concatenate(self, parts: list[fx.Node], axis: int, whole: Tensor, name: str) -> fx.Node:
        """Parts one after the other, in the memory layout of the uncut tensor: its readers may count on
        it."""
        order = sorted(range(whole.dim()), key=lambda d: -whole.stride()[d])
        if order == list(range(whole.dim())):
            return self._call(aten.cat.default, (parts, axis), {}, name)
        laid_out = [self._call(aten.permute.default, (part, order), {}, f"{name}_laid_out") for part in parts]
        joined = self._call(aten.cat.default, (laid_out, order.index(axis)), {}, f"{name}_joined")
        back = [order.index(d) for d in range(whole.dim())]
        return self._call(aten.permute.default, (joined, back), {}, name)

    def _mended_rows(self, layer: _Layer) -> list[_Replacement]:
        """Whoever reads merged rows behind the range needs to know where they are there."""
        readers = [user for user in layer.row.users if user not in self.made]
        if not readers:
            return []
        experts = [self._part(layer.expert, p) for p in range(self.parts)]
        rows, counts = zip(*(self._local(layer, p) for p in range(self.parts)), strict=True)
        name = f"{layer.row.name}_merged"
        merged = self._call(lancet.merge_rows.default, (experts, list(rows), list(counts)), {}, name)
        return [(reader, layer.row, merged) for reader in readers]


def _shape(node: fx.Node) -> list[int]:
    """Sizes as plain numbers: a graph's inputs may carry symbols that stand for one."""
    return [int(size) for size in node.meta["val"].shape]


def _looks(value: Any) -> Any:
    """What a result depends on: of tensors all but the contents."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_looks, value))
    if isinstance(value, dict):
        return tuple((name, _looks(one)) for name, one in value.items())
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return value


def _rule(node: fx.Node) -> Rule:
    return RULES.get(op_name(node), _NO_RULE) if node.op == "call_function" else _NO_RULE


def _lie_by_expert(node: fx.Node) -> bool:
    """Are these rows received ones, by local expert, or rows to send, by rank?"""
    while "rows_by_expert" not in node.meta:
        rule = _rule(node)
        if rule.most_rows_argument is not None:
            return False
        if rule.to_experts_argument is not None:
            return node.args[rule.to_experts_argument]
        if not rule.count_arguments:
            raise _refuse(f"rows of {node.name}", "rows of a dispatch or an all-to-all")
        node = node.args[0]
    return node.meta["rows_by_expert"]


def _element(node: fx.Node, index: int) -> fx.Node:
    return next(user for user in node.users if user.target is operator.getitem and user.args[1] == index)


def _with_elements(node: fx.Node) -> list[fx.Node]:
    """The node and, of a tuple, the nodes that take its elements."""
    return [node, *(user for user in node.users if user.target is operator.getitem)]


def _refuse(got: str, expected: str) -> CutError:
    return CutError(
        "range to cut", got=got, expected=expected, do="leave the range whole, or choose another one"
    )
