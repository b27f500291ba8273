"""A Plan: how to run a Program, as data that can be saved, loaded, explained, compared and applied.

All ranks must run the same plan: they compare `Plan.fingerprint` before the first step. Its `Report`
(predicted and measured times, why it was chosen, what hides which message) does not change what runs.

The time of a fused launch, by formula, for plans of clusters that are not at hand:

    max(communication, GEMMs) / EFFICIENCY + LAUNCH_MS, from the times of the ops on streams

Example: all-to-alls of 2.0 ms and GEMMs of 1.5 ms take 2.0 / 0.85 + 0.02 = 2.37 ms, and 3.5 ms on streams if
nothing overlaps. A filler of 0.4 ms adds nothing; one of 0.8 ms (GEMMs 2.3 ms) adds 0.35 ms.

Where the step can be measured, launches are measured with it. The formula then only says which weight
gradients become fillers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from lancet_kernels.graph.program import Kind, SavedJson
from lancet_kernels.graph.rules.rules import Form
from lancet_kernels.schedules.cut.ranges import PartitionRange
from lancet_kernels.schedules.time.peak_memory import Recomputation
from lancet_kernels.schedules.time.timeline import WEIGHT_GRADIENTS, Filler, Hiding, Prediction

PLAIN = "plain"
"""Key of the module without a plan among measured times."""
IN_PAIRS, ONE_BY_ONE = "in pairs", "one by one"
"""Keys of the ways to run several microbatches among measured times."""
WORTH = 0.02
"""The share of the plain module's time that a plan must save, or the module runs as it is."""
MOST_LINES = 12
"""The number of communications, longest first, in an explanation without details."""
_KINDS = {
    Kind.ALL_TO_ALL.value: "all-to-all",
    Kind.ALL_REDUCE.value: "all-reduce",
    Kind.POINT_TO_POINT.value: "shift",
    Kind.OTHER_COMMUNICATION.value: "gather or scatter",
}


@dataclass(frozen=True)
class Report:
    """The figures of a plan, and its setting.

    predicted: of the plan. compared: predictions of other strategies for the same Program and costs.
    method: the scheduling method that gave the order.
    chosen: for strategy auto, the strategy whose plan this is. impossible: impossible strategies and why.
    without_rule: ops that are never partitioned because the rule table has no rule for them.
    memory_limit_gb: the memory limit of the planner. without_limit_ms: the predicted iteration without a
    limit.
    recomputation: what the step recomputes (activation checkpointing); None: nothing.
    measured: milliseconds of real steps by strategy, and of `PLAIN`, where these were run to choose.
    pair_ms: the predicted time of the plan's `pair`. measured_microbatches: milliseconds of each of several
    real microbatches, `IN_PAIRS` and `ONE_BY_ONE`, where these were run to choose.
    hidings: what computes while messages travel, in the predicted iteration.
    options: the `PlanningOptions` of the planner, as JSON values. costs: the source of the costs
    (`graph.costs.costs.source_of`). setting: what was planned, in the user's words (`optimization.planning`);
    {}: not said.
    """

    predicted: Prediction = field(default_factory=Prediction)
    compared: Mapping[str, Prediction] = field(default_factory=dict)
    method: str = "original order"
    chosen: str = ""
    impossible: Mapping[str, str] = field(default_factory=dict)
    without_rule: tuple[str, ...] = ()
    memory_limit_gb: float | None = None
    without_limit_ms: float | None = None
    recomputation: Recomputation | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    pair_ms: float = 0.0
    measured_microbatches: Mapping[str, float] = field(default_factory=dict)
    hidings: tuple[Hiding, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    costs: str = ""
    setting: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Report:
        """The report from the values of `asdict`, as lists."""
        fields["predicted"] = Prediction(**fields["predicted"])
        fields["compared"] = {k: Prediction(**v) for k, v in fields["compared"].items()}
        if fields["recomputation"]:
            fields["recomputation"] = Recomputation(**fields["recomputation"])
        fields["hidings"] = tuple(map(Hiding.from_json, fields["hidings"]))
        fields["without_rule"] = tuple(fields["without_rule"])
        return cls(**fields)

    def fits(self) -> bool:
        """Is the predicted peak within the memory limit?"""
        return self.predicted.peak_memory_gb <= self._limit_gb

    @property
    def _limit_gb(self) -> float:
        return float("inf") if self.memory_limit_gb is None else self.memory_limit_gb

    def lines(self, strategy: str, plain: bool, pairs: bool, details: bool) -> list[str]:
        """The figures in `Plan.explain`. Args: plain: is the plan? pairs: has it any?"""
        compared, lines = self.compared, list[str]()
        if self.hidings or any(p.exposed_ms for p in (self.predicted, *compared.values())):
            lines += self._table(self.chosen or strategy, details)
            if self.chosen:
                lines += ["", self.choice(plain)]
            lines += [f"Not possible: {name} ({reason})" for name, reason in self.impossible.items()]
            lines += ["", self._account()]
        else:
            runs = "the module runs as it is" if plain else "the plan only orders computation"
            lines.append(
                f"Nothing travels in this step of {self.predicted.iteration_ms:.2f} ms, so there is nothing "
                f"to hide: {runs}. standing_for(8, link_gbps=...) shows what a plan gains on 8 ranks."
            )
        if self.memory_limit_gb is not None:
            lines += ["", self._memory()]
        lines += self._microbatches(pairs)
        if self.recomputation is not None:
            lines += ["", self.recomputation.text()]
        return lines + hidden_text(self.hidings, details)

    def choice(self, plain: bool) -> str:
        """Why this plan, or the module without one (`plain`): measured, or predicted."""
        return self._measured_choice(plain) if self.measured else self._predicted_choice()

    def _table(self, own: str, details: bool) -> list[str]:
        """A line for each strategy; that of the `own` plan is marked."""
        rows, measured = {**self.compared, own: self.predicted}, self.measured
        blocking = rows.get("none", rows[own]).iteration_ms

        def cell(name: str) -> str:
            if not measured:
                return ""
            return f"{measured[name]:>13.2f}" if name in measured else f"{'':>13}"

        head = f"  {'':<18}{'predicted ms':>14}{'measured ms' if measured else '':>{13 if measured else 0}}"
        head += f"{'exposed ms':>12}{'peak GB':>9}{'saved':>9}"
        lines = [head + (f"{'at least ms':>13}" if details else "")]
        for name, p in rows.items():
            saved = (blocking - p.iteration_ms) / blocking if blocking else 0.0
            line = f"{'>' if name == own else ' '} {name:<18}{p.iteration_ms:>14.2f}{cell(name)}"
            line += f"{p.exposed_ms:>12.2f}{p.peak_memory_gb:>9.3g}{saved:>9.1%}"
            lines.append(line + (f"{p.lower_bound_ms:>13.2f}" if details else ""))
        if PLAIN in measured:
            lines.append(f"  {PLAIN:<18}{'':>14}{cell(PLAIN)}")
        if "none" in rows:
            lines.append("  saved: predicted time against none, which waits for every all-to-all")
        return lines

    def _predicted_choice(self) -> str:
        text = f"Chosen: {self.chosen}, "
        if not self.fits():
            return text + "which needs least memory; every strategy exceeds the memory limit."
        text += "predicted fastest within the memory limit."
        for name, p in self.compared.items():
            if name == self.chosen or p.iteration_ms >= self.predicted.iteration_ms:
                continue
            # Plans that are not among the candidates have times of parts that are estimated.
            why = "is an estimate; the parts of the chosen plan were measured"
            if p.peak_memory_gb > self._limit_gb:
                why = f"exceeds the memory limit: {p.peak_memory_gb:.3g} of {self._limit_gb:.3g} GB"
            text += f" {name} ({p.iteration_ms:.2f} ms) {why}."
        return text

    def _measured_choice(self, plain: bool) -> str:
        if self.chosen not in self.measured:
            return f"Every plan refuses the step; the module runs as it is ({self.measured[PLAIN]:.2f} ms)."
        own = self.measured[self.chosen]
        if not plain:
            others = ", ".join(
                f"{name} {ms:.2f}" for name, ms in self.measured.items() if name != self.chosen
            )
            return f"Chosen: {self.chosen}, measured fastest: {own:.2f} ms a step ({others})."
        plain_ms = self.measured[PLAIN]
        saved = (plain_ms - own) / plain_ms
        saves = f"saves {saved:.1%}, less than {WORTH:.0%}" if saved > 0 else "saves nothing"
        return (
            f"Not worth planning here: {self.chosen}, the fastest plan, {saves}: {own:.2f} ms a step, the "
            f"module as it is {plain_ms:.2f} (measured on these ranks). The module runs as it is."
        )

    def _account(self) -> str:
        """The parts of the predicted iteration."""
        uncut_ms = self.compared.get("none", self.predicted).computation_ms
        text = f"Of {self.predicted.iteration_ms:.2f} ms: computation {uncut_ms:.2f}"
        if cutting := round(self.predicted.computation_ms - uncut_ms, 2):
            text += f", cutting {cutting:.2f}"
        for collective, ms in self.predicted.exposed_by.items():
            text += f", exposed {collective.replace('_', '-')} {ms:.2f}"
        return text + "."

    def _memory(self) -> str:
        """How much slower the plan is because of the memory limit."""
        limit, free_ms = f"Memory limit: {self.memory_limit_gb:.3g} GB", self.without_limit_ms
        more_ms = 0.0 if free_ms is None else self.predicted.iteration_ms - free_ms
        if more_ms <= 0:
            return f"{limit}; {'it costs nothing' if self.fits() else 'the plan needs more'}."
        return f"{limit}; it costs {more_ms:.2f} ms (without it, {free_ms:.2f} ms)."

    def _microbatches(self, pairs: bool) -> list[str]:
        """How several microbatches run."""
        measured = self.measured_microbatches
        if not pairs and not measured:
            return []
        text = "one by one."
        if pairs:
            text = "the backward of each runs together with the forward of the next, "
            text += f"predicted {self.pair_ms:.2f} ms, instead of one after the other."
        if measured:
            pairs_ms, single_ms = measured[IN_PAIRS], measured[ONE_BY_ONE]
            text += f" Measured: {pairs_ms:.2f} ms each in pairs, {single_ms:.2f} one by one."
        return ["", f"Several microbatches: {text}"]


def hidden_text(hidings: Sequence[Hiding], details: bool) -> list[str]:
    """A line for each communication of a layer: what fills it; one for all that nothing fills. Without
    `details` those that take longest."""
    if not hidings:
        return []
    together: dict[object, list[Hiding]] = defaultdict(list)
    for hiding in hidings:
        together[hiding if hiding.fillers else (hiding.kind, hiding.phase)].append(hiding)
    rows = [*together.values()]
    longest = sorted(rows, key=lambda row: -sum(h.ms for h in row))[: None if details else MOST_LINES]
    shown = [row for row in rows if row in longest]
    lines = ["", "What computes while messages travel, as predicted:", *map(_hiding_text, shown)]
    if len(shown) < len(rows):
        lines.append(f"  and {len(rows) - len(shown)} shorter ones: explain(details=True)")
    return lines


def _hiding_text(hidings: Sequence[Hiding]) -> str:
    """Example: `weight gradients of blocks 3 to 5 (1.20 ms) fill the backward all-to-all of block 5 (1.30 ms,
    0.10 ms exposed)`. Args: hidings: one, or several of one kind and phase that nothing fills."""
    first = hidings[0]
    count = sum(hiding.count for hiding in hidings)
    plural = "s" if count > 1 else ""
    if first.kind == Kind.ALL_REDUCE.value:
        what = f"{count} gradient all-reduces" if plural else "gradient all-reduce"
    else:
        place = layers_text(hiding.layer for hiding in hidings) or "the step"
        what = f"{first.phase} {_KINDS[first.kind]}{plural} of {place}"
    fillers = " and ".join(map(_filler_text, first.fillers)) or "nothing"
    several = len(first.fillers) > 1 or fillers.startswith(WEIGHT_GRADIENTS)
    ms, exposed_ms = (sum(times) for times in zip(*((h.ms, h.exposed_ms) for h in hidings), strict=True))
    times = f"({ms:.2f} ms, {exposed_ms:.2f} ms exposed)"
    return f"  {fillers} {'fill' if several else 'fills'} the {what} {times}"


def _filler_text(filler: Filler) -> str:
    places = layers_text(filler.layers)
    return f"{filler.work}{' of ' if places else ''}{places} ({filler.ms:.2f} ms)"


def layers_text(paths: Iterable[str]) -> str:
    """The blocks that modules belong to, without what belongs to none.

    Example: `model.blocks.3.norm`, `model.blocks.4.norm`, `model.head`, ``: `blocks 3 to 4, head`.
    """
    numbers: dict[str, set[int]] = defaultdict(set)
    names: dict[str, None] = {}
    for path in filter(None, paths):
        match = _NUMBERED.match(path)
        if match is not None:
            numbers[match[1]].add(int(match[2]))
        else:
            names[path.rpartition(".")[2]] = None
    blocks = [
        f"{name.removesuffix('s') if len(own) == 1 else name} {_runs(sorted(own))}"
        for name, own in numbers.items()
    ]
    return ", ".join([*blocks, *names])


_NUMBERED = re.compile(r"(?:.*?\.)??(\w+)\.(\d+)(?:\.|$)")


def _runs(numbers: list[int]) -> str:
    """Example: 1, 3, 4, 5: `1, 3 to 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


# Conservative: on one H100 0.91 to 0.94 while puts take up to 0.55 of the GEMMs' time, 0.69 forward and 0.88
# backward at 0.87 (`bench.gpu.steps eta`, 2026-11-27); kernels of others 0.87 to 0.94 (MI355X, eight GPUs).
EFFICIENCY = 0.85
LAUNCH_MS = 0.02
# A weight gradient becomes a filler if the launch hides at least this share of its time on a stream.
LEAST_HIDDEN = 0.5


class LaunchWork(NamedTuple):
    """The work of one launch, in milliseconds of separate ops."""

    communication_ms: float
    gemm_ms: float

    def milliseconds(self, fillers_ms: float = 0.0) -> float:
        """The time of the launch, fillers included."""
        return max(self.communication_ms, self.gemm_ms + fillers_ms) / EFFICIENCY + LAUNCH_MS


def best_fit(candidates: Mapping[str, float], work: LaunchWork) -> list[str]:
    """The fillers of which the launch hides at least LEAST_HIDDEN, chosen longest first.

    Args: candidates: milliseconds on a stream, by name.
    """
    chosen: list[str] = []
    chosen_ms = 0.0
    for name, ms in sorted(candidates.items(), key=lambda item: item[1], reverse=True):
        longer = work.milliseconds(chosen_ms + ms) - work.milliseconds(chosen_ms)
        if ms - longer >= LEAST_HIDDEN * ms:
            chosen.append(name)
            chosen_ms += ms
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
    (`cut.duplex`); empty: they do not.
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
        plan = cls(**fields)
        plan.explain(details=True)  # it reads every figure, and fails where somebody has written another type
        return plan

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
        """The planner's decisions, op by op."""
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
    if type(planned.parts) is not int or planned.parts < 1:
        raise TypeError(f"range from {planned.first}: the number of parts is a whole number, at least 1")
    return planned


def _forms_text(planned: PartitionRange) -> str:
    """The number of tensors in each form. Example: `cut 0: 31, irregular: 7`."""
    counts = Counter(str(form) for form in planned.forms.values())
    return "tensors by form: " + ", ".join(f"{form}: {count}" for form, count in sorted(counts.items()))
