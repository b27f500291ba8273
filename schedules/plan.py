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
from lancet_kernels.graph.program.program_json import check_fingerprint
from lancet_kernels.graph.program.saved_json import SavedJson
from lancet_kernels.schedules.fuse.fused_prediction import LaunchWork
from lancet_kernels.schedules.partition.ranges import LaunchFillers, PartitionRange
from lancet_kernels.schedules.time.recomputation import Recomputation
from lancet_kernels.schedules.time.simulate import Timeline, lower_bound_ms

PLAIN = "plain"
"""The module without a plan, among what was measured."""
WORTH = 0.02
"""The share of the plain module's time that a plan must save, or the module runs as it is."""
_TORCH_DROPOUT = {"aten.native_dropout", "aten.bernoulli"}


@dataclass(frozen=True)
class Prediction:
    """The simulated iteration of a plan."""

    iteration_ms: float
    exposed_ms: float
    """Communication time during which compute idles."""
    peak_memory_gb: float
    lower_bound_ms: float = 0.0
    """A bound for every order of this Program: the compute time, the link time, or the critical path."""

    @classmethod
    def of(cls, timeline: Timeline) -> Prediction:
        times = timeline.times
        ms = [end - start for start, end in zip(times.start, times.end, strict=True)]
        bound = lower_bound_ms(timeline.program, ms)
        return cls(timeline.iteration_ms, timeline.exposed_ms, timeline.peak_memory_bytes / 1e9, bound)


@dataclass(frozen=True)
class FusedGroup:
    """How one overlap group, an MoE layer, runs (`schedules.fuse.fused`).

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
    """

    KIND, VERSION, AGAIN = "plan", 6, "plan again"

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

    @property
    def fingerprint(self) -> str:
        """64 hex digits that depend on what runs, not on predictions or on how the plan was chosen: ranks
        that run the same plan have the same."""
        data = self.to_json()
        not_done = ("predicted", "compared", "measured", "method", "options", "costs", "chosen", "impossible")
        for other in (*not_done, "memory_limit_gb", "without_limit_ms", "recomputation"):
            del data[other]
        data["fused"] = [(group.layer, group.fillers) for group in self.fused if group.fused]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    def check(self, program: Program) -> None:
        """Raise UserError unless the plan belongs to this program."""
        what = f"plan for {self.program}"
        check_fingerprint(program, self.program_fingerprint, what, "made", "plan again")

    def for_program(self, program_fingerprint: str) -> Plan:
        """The same plan for a program with the same instructions, on tensors of other sizes."""
        return replace(self, program_fingerprint=program_fingerprint)

    def with_comparison(self, compared: Mapping[str, Prediction]) -> Plan:
        """The same plan, with the predictions of other strategies in `compared`."""
        return replace(self, compared=dict(compared))

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
        for name in ("order", "blocking", "without_rule"):
            fields[name] = tuple(fields[name])
        return cls(**fields)

    def explain(self) -> str:
        """The plan and its predictions as text for people: what is moved, cut and fused, and what that
        saves."""
        lines = [f"Plan `{self.strategy}` for {self.program} (program {self.program_fingerprint[:12]})", ""]
        header = f"{'predicted':<20}{'iteration ms':>14}{'at least ms':>13}{'exposed ms':>12}"
        lines.append(f"{header}{'peak GB':>9}{'saved':>9}")
        blocking = self.compared.get("none", self.predicted).iteration_ms
        for name, p in {**self.compared, self.strategy: self.predicted}.items():
            saved = (blocking - p.iteration_ms) / blocking if blocking else 0.0
            line = f"{name:<20}{p.iteration_ms:>14.2f}{p.lower_bound_ms:>13.2f}{p.exposed_ms:>12.2f}"
            lines.append(f"{line}{p.peak_memory_gb:>9.3g}{saved:>9.1%}")
        if self.chosen:
            lines += ["", self.choice_text()]
        lines += [f"Not possible: {name} ({reason})" for name, reason in self.impossible.items()]
        if self.memory_limit_gb is not None:
            lines += ["", self._memory_text()]
        if self.recomputation is not None:
            lines += ["", self.recomputation.text()]
        if self.costs:
            lines += ["", f"Costs: {self.costs}"]
        lines += ["", f"Order: {self.method}, {len(self.order)} instructions."]
        if self.blocking:
            lines.append(f"Computation waits for {len(self.blocking)} collectives.")
        lines.append(f"Partitioned ranges: {len(self.ranges) or 'none'}")
        for r in self.ranges:
            lines.append(f"  {r.first} .. {r.last}: {r.parts} parts, {_forms_text(r)}")
            lines += [f"    {f.launch} also computes {', '.join(f.gradients)}" for f in r.fillers]
        if self.fused:
            lines.append(
                f"Fused launches: {sum(g.fused for g in self.fused)} of {len(self.fused)} MoE layers"
            )
            for group in self.fused:
                riding = f", with {', '.join(group.fillers)}" if group.fillers else ""
                lines.append(f"  {group.layer}: {group.why}{riding}")
        if self.without_rule:
            lines.append(f"Never partitioned, because they have no rule: {', '.join(self.without_rule)}")
        if _TORCH_DROPOUT & set(self.without_rule):
            lines.append(
                "  Use lancet_kernels.Dropout, which can be partitioned: its numbers do not depend on the cut"
            )
        return "\n".join(lines)

    def choice_text(self) -> str:
        """Why this plan, or the module without one: measured, or predicted."""
        limit = float("inf") if self.memory_limit_gb is None else self.memory_limit_gb
        if self.measured:
            return self._measured_text()
        if self.predicted.peak_memory_gb > limit:
            return (
                f"Chosen: {self.chosen}, which needs least memory; every strategy exceeds the memory limit."
            )
        text = f"Chosen: {self.chosen}, predicted fastest within the memory limit."
        for name, p in self.compared.items():
            if name == self.chosen or p.iteration_ms >= self.predicted.iteration_ms:
                continue
            # Plans that are not among the candidates have times of parts that are estimated.
            why = "is an estimate; the parts of the chosen plan were measured"
            if p.peak_memory_gb > limit:
                why = f"exceeds the memory limit: {p.peak_memory_gb:.3g} of {limit:.3g} GB"
            text += f" {name} ({p.iteration_ms:.2f} ms) {why}."
        return text

    def _measured_text(self) -> str:
        """The choice by real steps."""
        own = self.measured[self.chosen]
        others = ", ".join(f"{n} {ms:.2f}" for n, ms in self.measured.items() if n != self.chosen)
        if not self.plain:
            return f"Chosen: {self.chosen}, measured fastest: {own:.2f} ms a step ({others})."
        plain = self.measured[PLAIN]
        saves = (
            f"saves {(plain - own) / plain:.1%}, less than {WORTH:.0%}" if own < plain else "saves nothing"
        )
        return (
            f"Not worth planning here: {self.chosen}, the fastest plan, {saves}: {own:.2f} ms a step, the "
            f"module as it is {plain:.2f} (measured on these ranks). The module runs as it is."
        )

    def _memory_text(self) -> str:
        """How much slower the plan is because of the memory limit."""
        limit = f"Memory limit: {self.memory_limit_gb:.3g} GB"
        if self.without_limit_ms is None or self.without_limit_ms >= self.predicted.iteration_ms:
            return f"{limit}; it costs nothing."
        more = self.predicted.iteration_ms - self.without_limit_ms
        return f"{limit}; it costs {more:.2f} ms (without it, {self.without_limit_ms:.2f} ms)."


def _range_to_json(planned: PartitionRange) -> dict[str, Any]:
    forms = {tensor: str(form) for tensor, form in planned.forms.items()}
    fillers = [asdict(one) for one in planned.fillers]
    data = {"first": planned.first, "last": planned.last, "parts": planned.parts, "forms": forms}
    return {**data, "fillers": fillers}


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
