"""A Plan: how to run a Program, as data that can be saved, loaded, explained, compared and applied.

A plan contains the fingerprint of its Program, and applies to no other. All ranks must run the same plan:
they compare `Plan.fingerprint` before the first step. What is said about it is its `Report`.

How long would a fused launch take? A formula, for plans of clusters that are not at hand.

    max(communication, GEMMs) / EFFICIENCY + LAUNCH_MS, from the times of the ops on streams

Example: all-to-alls of 2.0 ms and GEMMs of 1.5 ms take 2.0 / 0.85 + 0.02 = 2.37 ms, and 3.5 ms on streams if
nothing overlaps. A filler of 0.4 ms adds nothing; one of 0.8 ms (GEMMs 2.3 ms) adds 0.35 ms.

Where the step can be measured, launches are measured with it. The formula then only says which weight
gradients become fillers.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from lancet_kernels.graph.program.program_json import SavedJson
from lancet_kernels.graph.rules.rules import Form
from lancet_kernels.schedules.cut.ranges import PartitionRange
from lancet_kernels.schedules.report import Report

# Conservative: on one H100 0.91 to 0.94 while puts take up to 0.55 of the GEMMs' time, 0.69 forward and 0.88
# backward at 0.87 (`bench.gpu.steps eta`, 2026-11-27); kernels of others 0.87 to 0.94 (MI355X, eight GPUs).
EFFICIENCY = 0.85
LAUNCH_MS = 0.02
# A weight gradient becomes a filler if the launch hides at least this share of its time on a stream.
LEAST_HIDDEN = 0.5


class LaunchWork(NamedTuple):
    """What one launch does, in milliseconds as separate ops."""

    communication_ms: float
    gemm_ms: float

    def milliseconds(self, fillers_ms: float = 0.0) -> float:
        """The time of the launch, with so many milliseconds of more computation in it."""
        return max(self.communication_ms, self.gemm_ms + fillers_ms) / EFFICIENCY + LAUNCH_MS


def best_fit(candidates: Mapping[str, float], work: LaunchWork) -> list[str]:
    """The fillers of which the launch hides at least LEAST_HIDDEN, chosen longest first.

    Args: candidates: milliseconds on a stream, by name.
    """
    chosen: list[str] = []
    taken_ms = 0.0
    for name, ms in sorted(candidates.items(), key=lambda item: item[1], reverse=True):
        longer = work.milliseconds(taken_ms + ms) - work.milliseconds(taken_ms)
        if ms - longer >= LEAST_HIDDEN * ms:
            chosen.append(name)
            taken_ms += ms
    return chosen


_TORCH_DROPOUT = {"aten.native_dropout", "aten.bernoulli"}


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
    fused: for each MoE layer, whether it runs in fused launches; the plan's program contains these launches.
    plain: the module runs as it is, with gradients summed while backward runs; the rest is the best plan.
    pair: the order in which the backward of a microbatch and the forward of the next run together
    (`rewrite.pairs`); empty: they do not.
    report: figures, which do not change what runs.
    """

    KIND, VERSION, AGAIN = "plan", 11, "plan again"
    WHAT, MADE = "plan for", "made"

    program: str
    program_fingerprint: str
    strategy: str
    order: tuple[str, ...] = ()
    ranges: tuple[PartitionRange, ...] = ()
    blocking: tuple[str, ...] = ()
    fused: tuple[FusedGroup, ...] = ()
    plain: bool = False
    pair: tuple[str, ...] = ()
    report: Report = field(default_factory=Report)

    def reported(self, **figures: Any) -> Plan:
        """The same plan, with these fields of its report."""
        return replace(self, report=replace(self.report, **figures))

    @property
    def fingerprint(self) -> str:
        """64 hex digits that depend on what runs, not on predictions or on how the plan was chosen: ranks
        that run the same plan have the same."""
        data = replace(self, report=Report()).to_json()
        data["fused"] = [(group.layer, group.fillers) for group in self.fused if group.fused]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    def fields_to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**asdict(replace(self, ranges=())), "ranges": [*map(_range_to_json, self.ranges)]}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Plan:
        """The plan with the fields that `fields_to_json` gave."""
        fields["ranges"] = tuple(_range_from_json(saved) for saved in fields["ranges"])
        fields["fused"] = tuple(map(FusedGroup.from_json, fields["fused"]))
        fields["report"] = Report.from_json(fields["report"])
        for name in ("order", "blocking", "pair"):
            fields[name] = tuple(fields[name])
            if not all(isinstance(instruction, str) for instruction in fields[name]):
                raise TypeError(f"{name} is no list of names")
        return cls(**fields)

    def explain(self, details: bool = False) -> str:
        """The plan as text for people: its time beside that of others, predicted and measured, why it was
        chosen, and what computes while messages travel. Args: details: also what the planner did."""
        lines = [f"Plan `{self.strategy}` for {self.program} (program {self.program_fingerprint[:12]})", ""]
        lines += self.report.lines(self.strategy, self.plain, bool(self.pair), details)
        if self.fused:
            fused = sum(group.fused for group in self.fused)
            lines += ["", f"Fused launches: {fused} of {len(self.fused)} MoE layers"]
            lines += [f"  {group.layer}: {group.why}" for group in self.fused]
        if _TORCH_DROPOUT & set(self.report.without_rule):
            advice = "use lancet_kernels.Dropout, whose numbers do not depend on the cut"
            lines += ["", f"torch's dropout is never cut into parts: {advice}"]
        return "\n".join(lines + (self._details() if details else []))

    def _details(self) -> list[str]:
        """What the planner did, op by op."""
        report = self.report
        lines = ["", *([f"Costs: {report.costs}"] if report.costs else [])]
        lines.append(f"Order: {report.method}, {len(self.order)} instructions.")
        if self.blocking:
            lines.append(f"Computation waits for {len(self.blocking)} collectives.")
        lines.append(f"Partitioned ranges: {len(self.ranges) or 'none'}")
        lines += [f"  {r.first} .. {r.last}: {r.parts} parts, {_forms_text(r)}" for r in self.ranges]
        lines += [f"  {g.layer} also computes {', '.join(g.fillers)}" for g in self.fused if g.fillers]
        if report.without_rule:
            lines.append(f"Never partitioned, because they have no rule: {', '.join(report.without_rule)}")
        return lines


def _range_to_json(planned: PartitionRange) -> dict[str, Any]:
    forms = {tensor: str(form) for tensor, form in planned.forms.items()}
    return {**asdict(replace(planned, forms={})), "forms": forms}


def _range_from_json(data: Mapping[str, Any]) -> PartitionRange:
    forms = {t: Form.parse(f) for t, f in data["forms"].items()}
    planned = PartitionRange(**{**data, "forms": forms})
    if type(planned.parts) is not int:
        raise TypeError(f"range from {planned.first}: the number of parts is a whole number")
    return planned


def _forms_text(planned: PartitionRange) -> str:
    """The number of tensors in each form. Example: `cut 0: 31, irregular: 7`."""
    counts = Counter(str(form) for form in planned.forms.values())
    return "tensors by form: " + ", ".join(f"{form}: {count}" for form, count in sorted(counts.items()))
