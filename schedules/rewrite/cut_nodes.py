"""What do nodes of an fx graph say about partitioning? Rules, shapes and layouts of rows, read from a graph.

`CutError` is raised wherever a range cannot be cut.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from lancet_kernels.errors import UserError
from lancet_kernels.graph.program.forms import WHOLE, Form, Forms
from lancet_kernels.graph.program.from_fx import op_name, tensor_names
from lancet_kernels.graph.rules.rules import RULES, Rule

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
        row = dispatch.args[rule_of(dispatch).row_argument]
        if rule_of(row).routing != "rows" or rule_of(row.args[2]).routing != "counts":
            raise refuse(f"{dispatch.name} without send_rows or kept_counts", "the ops of an MoELayer")
        expert, slot, count = row.args
        return cls(dispatch, row, expert, slot, count, count.meta["val"].numel(), count.args[1])


def rule_of(node: fx.Node) -> Rule:
    """The rule of a node's op; an empty one if it has none."""
    return RULES.get(op_name(node), _NO_RULE) if node.op == "call_function" else _NO_RULE


def form_of(node: fx.Node, forms: Forms) -> Form:
    """The form of the tensor that a node stands for; whole for a tuple."""
    if isinstance(node.meta.get("val"), (tuple, list)):
        return WHOLE  # Also if one tensor is all it has: of a frozen norm the gradient of its input.
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
    while "rows_by_expert" not in node.meta:
        rule = rule_of(node)
        if rule.most_rows_argument is not None:
            return False
        if rule.to_experts_argument is not None:
            return node.args[rule.to_experts_argument]
        if not rule.count_arguments:
            raise refuse(f"rows of {node.name}", "rows of a dispatch or an all-to-all")
        node = node.args[0]
    return node.meta["rows_by_expert"]
