"""What is said about a plan: predicted and measured times, why it was chosen, what hides which message.

None of it changes what runs. `Plan.explain` is made of the words of this file.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lancet_kernels.graph.program.program import Kind
from lancet_kernels.schedules.time.hiding import WEIGHT_GRADIENTS, Filler, Hiding, Prediction
from lancet_kernels.schedules.time.peak_memory import Recomputation

PLAIN = "plain"
"""The module without a plan, among what was measured."""
IN_PAIRS, ONE_BY_ONE = "in pairs", "one by one"
"""How several microbatches run, among what was measured."""
WORTH = 0.02
"""The share of the plain module's time that a plan must save, or the module runs as it is."""
MOST_LINES = 12
"""Communications that are explained without details, those that take longest."""
_KINDS = {
    Kind.ALL_TO_ALL.value: "all-to-all",
    Kind.ALL_REDUCE.value: "all-reduce",
    Kind.POINT_TO_POINT.value: "shift",
    Kind.OTHER_COMMUNICATION.value: "gather or scatter",
}


@dataclass(frozen=True)
class Report:
    """The figures of a plan, and what it was planned for.

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
    hidings: what computes while messages travel, in the predicted iteration. exposed_bounds: by collective,
    milliseconds that every order of the partitioned program exposes.
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
    exposed_bounds: Mapping[str, float] = field(default_factory=dict)
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
        return self.memory_limit_gb is None or self.predicted.peak_memory_gb <= self.memory_limit_gb


def table(
    own: str, rows: Mapping[str, Prediction], measured: Mapping[str, float], details: bool
) -> list[str]:
    """A line for each strategy; that of the `own` plan is marked. Args: measured: milliseconds; {}: none."""
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


def predicted_choice(
    chosen: str, predicted: Prediction, compared: Mapping[str, Prediction], limit_gb: float | None
) -> str:
    """Why this plan, where only predictions were compared."""
    limit = float("inf") if limit_gb is None else limit_gb
    if predicted.peak_memory_gb > limit:
        return f"Chosen: {chosen}, which needs least memory; every strategy exceeds the memory limit."
    text = f"Chosen: {chosen}, predicted fastest within the memory limit."
    for name, p in compared.items():
        if name == chosen or p.iteration_ms >= predicted.iteration_ms:
            continue
        # Plans that are not among the candidates have times of parts that are estimated.
        why = "is an estimate; the parts of the chosen plan were measured"
        if p.peak_memory_gb > limit:
            why = f"exceeds the memory limit: {p.peak_memory_gb:.3g} of {limit:.3g} GB"
        text += f" {name} ({p.iteration_ms:.2f} ms) {why}."
    return text


def measured_choice(chosen: str, measured: Mapping[str, float], plain: bool) -> str:
    """Why this plan, or the module as it is (`plain`), where real steps were run."""
    own = measured[chosen]
    if not plain:
        others = ", ".join(f"{name} {ms:.2f}" for name, ms in measured.items() if name != chosen)
        return f"Chosen: {chosen}, measured fastest: {own:.2f} ms a step ({others})."
    as_it_is = measured[PLAIN]
    saved = (as_it_is - own) / as_it_is
    saves = f"saves {saved:.1%}, less than {WORTH:.0%}" if saved > 0 else "saves nothing"
    return (
        f"Not worth planning here: {chosen}, the fastest plan, {saves}: {own:.2f} ms a step, the "
        f"module as it is {as_it_is:.2f} (measured on these ranks). The module runs as it is."
    )


def nothing_travels_text(predicted: Prediction, plain: bool) -> str:
    """What to say of a step without communication. Args: plain: the module runs as it is."""
    runs = "the module runs as it is" if plain else "the plan only orders computation"
    return (
        f"Nothing travels in this step of {predicted.iteration_ms:.2f} ms, so there is nothing to hide: "
        f"{runs}. standing_for(8, link_gbps=...) shows what a plan gains on 8 ranks."
    )


def microbatches_text(pair_ms: float | None, measured: Mapping[str, float]) -> list[str]:
    """How several microbatches run. Args: pair_ms: of a pair, predicted; None: one after the other.
    measured: milliseconds of each, in pairs and one by one; {}: neither was run."""
    text = "Several microbatches: "
    if pair_ms is not None:
        text += "the backward of each runs together with the forward of the next, "
        text += f"predicted {pair_ms:.2f} ms, instead of one after the other."
    elif measured:
        text += "one by one."
    else:
        return []
    if measured:
        text += (
            f" Measured: {measured[IN_PAIRS]:.2f} ms each in pairs, {measured[ONE_BY_ONE]:.2f} one by one."
        )
    return ["", text]


def account_text(predicted: Prediction, uncut: Prediction) -> str:
    """Where the milliseconds of a predicted iteration go. Args: uncut: of the step that nothing cuts."""
    text = f"Of {predicted.iteration_ms:.2f} ms: computation {uncut.computation_ms:.2f}"
    cutting = predicted.computation_ms - uncut.computation_ms
    if cutting:
        text += f", cutting {cutting:.2f}"
    for collective, ms in predicted.exposed_by.items():
        text += f", exposed {collective.replace('_', '-')} {ms:.2f}"
    return text + "."


def bounds_text(bounds: Mapping[str, float], predicted: Prediction) -> str:
    """What is exposed of each kind of communication, and what every order exposes. Args: bounds: ms."""
    kinds = [
        f"{name.replace('_', '-')} {predicted.exposed_by.get(name, 0.0):.2f} of at least {ms:.2f}"
        for name, ms in bounds.items()
    ]
    return f"Exposed ms, and what no order of these instructions can hide: {', '.join(kinds)}."


def memory_text(predicted: Prediction, limit_gb: float, without_limit_ms: float | None) -> str:
    """How much slower the plan is because of the memory limit."""
    limit = f"Memory limit: {limit_gb:.3g} GB"
    if without_limit_ms is None or without_limit_ms >= predicted.iteration_ms:
        return f"{limit}; it costs nothing."
    more = predicted.iteration_ms - without_limit_ms
    return f"{limit}; it costs {more:.2f} ms (without it, {without_limit_ms:.2f} ms)."


def hidden_text(hidings: Sequence[Hiding], details: bool) -> list[str]:
    """A line for each communication of a layer: what fills it; one for those of all layers that nothing
    fills. Without `details` those that take longest."""
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
        f"{name.removesuffix('s') if len(of) == 1 else name} {_runs(sorted(of))}"
        for name, of in numbers.items()
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
