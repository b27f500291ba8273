"""A Plan: how to run a Program, as data that can be saved, loaded, explained, compared and applied.

A plan contains the fingerprint of its Program, and applies to no other. All ranks must run the same plan:
they compare `Plan.fingerprint` before the first step.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lancet_kernels.graph.program.forms import Form
from lancet_kernels.graph.program.program import Program
from lancet_kernels.graph.program.program_json import SavedJson, check_fingerprint
from lancet_kernels.schedules.cut.ranges import LaunchFillers, PartitionRange
from lancet_kernels.schedules.explanation import (
    account_text,
    bounds_text,
    hidden_text,
    measured_choice,
    memory_text,
    microbatches_text,
    nothing_travels_text,
    predicted_choice,
    table,
)
from lancet_kernels.schedules.time.fused_launch import LaunchWork
from lancet_kernels.schedules.time.hiding import Hiding, Prediction
from lancet_kernels.schedules.time.peak_memory import Recomputation

_TORCH_DROPOUT = {"aten.native_dropout", "aten.bernoulli"}
_NOT_RUN = {
    *("predicted", "compared", "measured", "method", "options", "costs", "chosen", "impossible"),
    *("memory_limit_gb", "without_limit_ms", "recomputation", "hidings", "setting", "pair_ms"),
    *("measured_microbatches", "exposed_bounds"),
}
"""Fields of a plan that do not change what runs."""


@dataclass(frozen=True)
class FusedGroup:
    """How one overlap group, an MoE layer, runs (`schedules.rewrite.fused`).

    Attributes:
        layer: its first instruction. fused: one launch per direction; otherwise on streams.
        fillers: weight gradients of other layers that are computed in its backward launch.
        forward, backward: the work of its launches, fillers included. why: the reason, as text.
        measured: the launches were measured with the step; otherwise their times are those of a formula.
    """

    layer: str
    fused: bool
    fillers: tuple[str, ...]
    forward: LaunchWork
    backward: LaunchWork
    why: str
    measured: bool = False

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FusedGroup:
        """The group from the values of `asdict`, as lists."""
        launches = {name: LaunchWork(*data[name]) for name in ("forward", "backward")}
        return cls(**{**data, **launches, "fillers": tuple(data["fillers"])})


@dataclass(frozen=True)
class Plan(SavedJson):
    """One way to run a Program.

    order: names of all instructions of the partitioned graph, in the order of issue.
    ranges: the partitioned ranges: instructions, number of parts, forms.
    blocking: collectives that computation waits for (empty for Lancet's own plans).
    method: the scheduling method that gave the order.
    without_rule: ops that are never partitioned because the rule table has no rule for them.
    compared: predictions of other strategies for the same Program and costs.
    options: the `PlanningOptions` of the planner, as JSON values.
    fused: for each MoE layer, whether it runs in fused launches; the plan's program contains these launches.
    costs: the source of the costs (`graph.costs.costs.source_of`).
    chosen: for strategy auto, the strategy whose plan this is. impossible: impossible strategies and why.
    recomputation: what the step recomputes (activation checkpointing); None: nothing.
    memory_limit_gb: the memory limit of the planner. without_limit_ms: the predicted iteration without a
    limit.
    measured: milliseconds of real steps by strategy, and of `PLAIN`, where these were run to choose.
    plain: the module runs as it is, with gradients summed while backward runs; the rest is the best plan.
    pair: the order in which the backward of a microbatch and the forward of the next run together
    (`rewrite.pairs`); empty: they do not. pair_ms: the predicted time of such a pair.
    measured_microbatches: milliseconds of each of several real microbatches, `IN_PAIRS` and `ONE_BY_ONE`,
    where these were run to choose.
    hidings: what computes while messages travel, in the predicted iteration.
    exposed_bounds: by collective, milliseconds that every order of the partitioned program exposes.
    setting: what the plan was made for, in the user's words (`optimization.planning`); {}: not said.
    """

    KIND, VERSION, AGAIN = "plan", 9, "plan again"

    program: str
    program_fingerprint: str
    strategy: str
    order: tuple[str, ...]
    ranges: tuple[PartitionRange, ...]
    predicted: Prediction
    blocking: tuple[str, ...] = ()
    method: str = "original order"
    without_rule: tuple[str, ...] = ()
    compared: Mapping[str, Prediction] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    fused: tuple[FusedGroup, ...] = ()
    costs: str = ""
    chosen: str = ""
    impossible: Mapping[str, str] = field(default_factory=dict)
    memory_limit_gb: float | None = None
    without_limit_ms: float | None = None
    recomputation: Recomputation | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    plain: bool = False
    hidings: tuple[Hiding, ...] = ()
    setting: Mapping[str, Any] = field(default_factory=dict)
    pair: tuple[str, ...] = ()
    pair_ms: float = 0.0
    measured_microbatches: Mapping[str, float] = field(default_factory=dict)
    exposed_bounds: Mapping[str, float] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """64 hex digits that depend on what runs, not on predictions or on how the plan was chosen: ranks
        that run the same plan have the same."""
        data = {name: value for name, value in self.to_json().items() if name not in _NOT_RUN}
        data["fused"] = [(group.layer, group.fillers) for group in self.fused if group.fused]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    def check(self, program: Program) -> None:
        """Raise UserError unless the plan belongs to this program."""
        what = f"plan for {self.program}"
        check_fingerprint(program, self.program_fingerprint, what, "made", "plan again")

    def fields_to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**asdict(replace(self, ranges=())), "ranges": [*map(_range_to_json, self.ranges)]}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Plan:
        """The plan with the fields that `fields_to_json` gave."""
        fields["ranges"] = tuple(_range_from_json(saved) for saved in fields["ranges"])
        fields["predicted"] = Prediction(**fields["predicted"])
        fields["compared"] = {k: Prediction(**v) for k, v in fields["compared"].items()}
        if fields.get("recomputation"):
            fields["recomputation"] = Recomputation(**fields["recomputation"])
        fields["fused"] = tuple(map(FusedGroup.from_json, fields.get("fused", ())))
        fields["hidings"] = tuple(map(Hiding.from_json, fields["hidings"]))
        for name in ("order", "blocking", "without_rule", "pair"):
            fields[name] = tuple(fields[name])
        return cls(**fields)

    def explain(self, details: bool = False) -> str:
        """The plan as text for people: its time beside that of others, predicted and measured, why it was
        chosen, and what computes while messages travel. Args: details: also what the planner did."""
        own = self.chosen or self.strategy
        lines = [f"Plan `{self.strategy}` for {self.program} (program {self.program_fingerprint[:12]})", ""]
        if self.hidings or any(p.exposed_ms for p in (self.predicted, *self.compared.values())):
            lines += table(own, {**self.compared, own: self.predicted}, self.measured, details)
            if self.chosen:
                lines += ["", self.choice_text()]
            lines += [f"Not possible: {name} ({reason})" for name, reason in self.impossible.items()]
            lines += ["", account_text(self.predicted, self.compared.get("none", self.predicted))]
        else:
            lines.append(nothing_travels_text(self.predicted, self.plain))
        if self.memory_limit_gb is not None:
            lines += ["", memory_text(self.predicted, self.memory_limit_gb, self.without_limit_ms)]
        lines += microbatches_text(self.pair_ms if self.pair else None, self.measured_microbatches)
        if self.recomputation is not None:
            lines += ["", self.recomputation.text()]
        lines += hidden_text(self.hidings, details)
        if self.fused:
            fused = sum(group.fused for group in self.fused)
            lines += ["", f"Fused launches: {fused} of {len(self.fused)} MoE layers"]
            lines += [f"  {group.layer}: {group.why}" for group in self.fused]
        if _TORCH_DROPOUT & set(self.without_rule):
            advice = "use lancet_kernels.Dropout, whose numbers do not depend on the cut"
            lines += ["", f"torch's dropout is never cut into parts: {advice}"]
        return "\n".join(lines + (self._details() if details else []))

    def choice_text(self) -> str:
        """Why this plan, or the module without one: measured, or predicted."""
        if self.measured:
            return measured_choice(self.chosen, self.measured, self.plain)
        return predicted_choice(self.chosen, self.predicted, self.compared, self.memory_limit_gb)

    def _details(self) -> list[str]:
        """What the planner did, op by op."""
        lines = ["", *([f"Costs: {self.costs}"] if self.costs else [])]
        lines.append(f"Order: {self.method}, {len(self.order)} instructions.")
        if self.exposed_bounds:
            lines.append(bounds_text(self.exposed_bounds, self.predicted))
        if self.blocking:
            lines.append(f"Computation waits for {len(self.blocking)} collectives.")
        lines.append(f"Partitioned ranges: {len(self.ranges) or 'none'}")
        for r in self.ranges:
            lines.append(f"  {r.first} .. {r.last}: {r.parts} parts, {_forms_text(r)}")
            lines += [f"    {f.launch} also computes {', '.join(f.gradients)}" for f in r.fillers]
        lines += [f"  {g.layer} also computes {', '.join(g.fillers)}" for g in self.fused if g.fillers]
        if self.without_rule:
            lines.append(f"Never partitioned, because they have no rule: {', '.join(self.without_rule)}")
        return lines


def _range_to_json(planned: PartitionRange) -> dict[str, Any]:
    forms = {tensor: str(form) for tensor, form in planned.forms.items()}
    return {**asdict(replace(planned, forms={})), "forms": forms}


def _range_from_json(data: Mapping[str, Any]) -> PartitionRange:
    forms = {t: Form.parse(f) for t, f in data["forms"].items()}
    fillers = tuple(
        LaunchFillers(**{**one, "gradients": tuple(one["gradients"])}) for one in data.get("fillers", ())
    )
    planned = PartitionRange(**{**data, "forms": forms, "fillers": fillers})
    if type(planned.parts) is not int:
        raise TypeError(f"range from {planned.first}: the number of parts is a whole number")
    return planned


def _forms_text(planned: PartitionRange) -> str:
    """The number of tensors in each form. Example: `cut 0: 31, irregular: 7`."""
    counts = Counter(str(form) for form in planned.forms.values())
    return "tensors by form: " + ", ".join(f"{form}: {count}" for form, count in sorted(counts.items()))
