"""What a plan was made for, in the user's words: the ranks, the model, its parameters, the inputs.

A plan applies to one graph, which its fingerprint names. This says what differs where it does not apply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.utils._pytree as pytree
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.graph.program.program import Program
from lancet_kernels.graph.program.program_json import fingerprint
from lancet_kernels.ops.comm.groups import group_size
from lancet_kernels.schedules.plan import Plan

if TYPE_CHECKING:
    from torch import nn

    from lancet_kernels.ops.comm.groups import Groups


def setting_of(model: nn.Module, groups: Groups, inputs: object) -> dict[str, Any]:
    """The setting of a step, as JSON values."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return {
        "ranks": group_size(groups.world),
        "expert_ranks": group_size(groups.expert),
        "model": type(model).__name__,
        "parameters": {name: _kind(parameter) for name, parameter in model.named_parameters()},
        "inputs": [_kind(tensor) for tensor in tensors],
    }


def check_setting(plan: Plan, program: Program, setting: Mapping[str, Any], what: str) -> None:
    """Raise UserError unless the plan is for this program. Args: setting: of the step. what: the plan."""
    own = fingerprint(program)
    if own == plan.program_fingerprint:
        return
    made, here = _difference(plan.setting, setting)
    raise UserError(
        what,
        got=f"a plan made for {made}",
        expected=f"one for this job, which has {here}",
        do=f"plan again (program {plan.program_fingerprint[:12]}, here {own[:12]})",
    )


def _difference(planned: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[str, str]:
    """What the plan was made for and what there is now: the first thing that differs."""
    for name, words in (("ranks", "rank"), ("expert_ranks", "rank that shares experts")):
        if name in planned and planned[name] != here.get(name):
            return _count(planned[name], words), _count(here.get(name, 1), words)
    if "model" in planned and planned["model"] != here.get("model"):
        return planned["model"], str(here.get("model"))
    old, new = planned.get("parameters", {}), here.get("parameters", {})
    for name in [*old, *new]:
        if old.get(name) != new.get(name) and old:
            return f"{name} {_text(old.get(name))}", _text(new.get(name))
    if "inputs" in planned and planned["inputs"] != here.get("inputs"):
        return f"inputs {_all(planned['inputs'])}", _all(here.get("inputs", []))
    return "another graph", "other instructions, of the same model"


def _kind(tensor: Tensor) -> list[object]:
    return [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]


def _text(kind: list[Any] | None) -> str:
    """Example: `[64, 32] float32`."""
    return "that it does not have" if kind is None else f"{kind[0]} {kind[1]}"


def _all(kinds: list[list[Any]]) -> str:
    return ", ".join(map(_text, kinds)) or "without tensors"


def _count(number: int, what: str) -> str:
    """Example: `1 rank`, `2 ranks`, `4 ranks that share experts`."""
    if number == 1:
        return f"1 {what}"
    return f"{number} {what.replace('rank', 'ranks', 1).replace('shares', 'share')}"
