"""The result of a search over shardings: forms of tensors, stages, and what overlaps what.

HiDup, section 4. It can be saved, read and explained. All times are of one microbatch, except the predicted
one: that of both, which run in turns, forward and backward.

What a strategy costs on its way through the graph, block by block, equations (4) and (5): for stages with
communication c_i and computation k_i of one microbatch,

    psi = k_1 + sum over i > 1 of (max(k_{i-1}, c_i) + max(c_i, k_i)) + k_m,    phi = -k_m

(stage 1 has c_1 = 0 in the paper; here it may gather weights). Backward runs the stages from the last to the
first, and what it costs is the same sum over its own times: the adjoint collectives, and `BACKWARD` times
the computation. Both are added up as one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any, NamedTuple

from lancet_kernels.graph.program import SavedJson
from lancet_kernels.graph.rules.rules import Form
from lancet_kernels.schedules.shard.blocks import ADJOINT

BACKWARD = 2.0
"""Backward computes twice as much as forward: gradients of inputs and of weights."""
COPIES = 2
STATE_COPIES = 4
"""A weight on a device: itself, its gradient, and Adam's two moments."""
EPSILON = 1e-9


class Communication(NamedTuple):
    """A tensor whose form changes in a stage, and its collective; of a parameter that is whole at rest and
    when it is read, the all-reduce of its gradient. Milliseconds of one microbatch, forward and backward."""

    tensor: str
    source: Form
    target: Form
    collective: str
    ms: float
    backward_ms: float


class Label(NamedTuple):
    """A strategy on its way: costs, and the step that led here.

    front: time until both the communication of the open stage and the computation before it are over.
    slack, slack_b: communication that would still hide behind the stage before, forward and backward.
    comm, comm_b: of the open stage. comp: its computation so far, forward. bytes: held on a device.
    """

    front: float
    slack: float
    slack_b: float
    comm: float
    comm_b: float
    comp: float
    bytes: float
    before: Label | None
    step: Any
    """One block more; or what a search that passes many blocks at once puts here."""

    @property
    def psi(self) -> float:
        """Were the stage closed here: equation (5), forward and backward together."""
        comp_b = BACKWARD * self.comp
        return self.front + max(self.comm, self.comp) + self.comp + max(self.comm_b, comp_b) + comp_b

    def closed(self) -> Label:
        """The next stage is open, and empty."""
        return self._replace(
            front=self.psi,
            slack=self.comp,
            slack_b=BACKWARD * self.comp,
            comm=0.0,
            comm_b=0.0,
            comp=0.0,
        )

    def grown(
        self,
        comm: float,
        comm_b: float,
        comp: float,
        more_bytes: float,
        step: Any,
        exposed: float = 0.0,
    ) -> Label:
        """The open stage with one more block. exposed: communication of both microbatches that nothing
        hides."""
        late, late_b = max(0.0, comm - self.slack), max(0.0, comm_b - self.slack_b)
        return Label(
            self.front + late + late_b + exposed,
            max(0.0, self.slack - comm),
            max(0.0, self.slack_b - comm_b),
            self.comm + comm,
            self.comm_b + comm_b,
            self.comp + comp,
            self.bytes + more_bytes,
            self,
            step,
        )


def dominates(a: Label, b: Label, with_memory: bool, tolerance: float = EPSILON) -> bool:
    """Is `a` at least as good as `b` whatever follows (up to a tolerance), both being in the same state?

    What follows costs `a` at most as much more as it has less slack and more communication in the open
    stage; a longer computation costs twice (that of the second microbatch comes, too), a shorter one gains
    at least what it hides less.
    """
    allowed = b.front + tolerance - a.front
    if allowed < 0 or (with_memory and a.bytes > b.bytes):
        return False
    # Without calls of max: this is where a search spends its time.
    if a.slack < b.slack:
        allowed -= b.slack - a.slack
    if a.slack_b < b.slack_b:
        allowed -= b.slack_b - a.slack_b
    if a.comm > b.comm:
        allowed -= a.comm - b.comm
    if a.comm_b > b.comm_b:
        allowed -= a.comm_b - b.comm_b
    if a.comp > b.comp:
        allowed -= 2 * (1 + BACKWARD) * (a.comp - b.comp)
    return allowed >= 0


WIDTH = 118


@dataclass(frozen=True)
class ShardingStage:
    """A communication step, then a computation step (section 4.1).

    computation: for each instruction, the forms of its inputs and outputs by position.
    comm_ms, comp_ms and their backward: of one microbatch, on every rank.
    """

    communication: tuple[Communication, ...]
    computation: Mapping[str, tuple[Form, ...]]
    comm_ms: float
    comm_backward_ms: float
    comp_ms: float

    @property
    def comp_backward_ms(self) -> float:
        return BACKWARD * self.comp_ms


@dataclass(frozen=True)
class ShardingStrategy(SavedJson):
    """One way to run a Program on `ranks` ranks.

    parameters: the form in which each rests. predicted_ms: both microbatches, forward and backward: psi of
    equation (5). memory_bytes: weights, gradients, Adam's moments, and the activations that backward reads.
    """

    KIND, VERSION, AGAIN = "sharding", 2, "search again"
    WHAT, MADE = "sharding of", "searched"

    name: str
    program: str
    program_fingerprint: str
    ranks: int
    stages: tuple[ShardingStage, ...]
    parameters: Mapping[str, Form]
    predicted_ms: float
    memory_bytes: float
    costs: str = ""
    strategies_looked_at: int = 0
    borders: int = 0
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def computation_ms(self) -> float:
        """Computation of both microbatches, forward and backward."""
        return COPIES * sum(s.comp_ms + s.comp_backward_ms for s in self.stages)

    @property
    def communication_ms(self) -> float:
        """Communication of both microbatches, forward and backward."""
        return COPIES * sum(s.comm_ms + s.comm_backward_ms for s in self.stages)

    @property
    def serial_ms(self) -> float:
        """The same without any overlap."""
        return self.computation_ms + self.communication_ms

    @property
    def overlapped(self) -> float:
        """Time in which both work, as a share of the shorter one (table 4)."""
        shorter = min(self.computation_ms, self.communication_ms)
        return (self.serial_ms - self.predicted_ms) / shorter if shorter else 0.0

    def fields_to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        stages = [
            {
                **vars(stage),
                "communication": [
                    {**c._asdict(), "source": str(c.source), "target": str(c.target)}
                    for c in stage.communication
                ],
                "computation": {i: [*map(str, forms)] for i, forms in stage.computation.items()},
            }
            for stage in self.stages
        ]
        return {
            **vars(self),
            "shapes": {t: list(shape) for t, shape in self.shapes.items()},
            "stages": stages,
            "parameters": {t: str(form) for t, form in self.parameters.items()},
        }

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> ShardingStrategy:
        """The strategy with the fields that `fields_to_json` gave."""
        fields["parameters"] = {t: Form.parse(form) for t, form in fields["parameters"].items()}
        fields["stages"] = tuple(_stage_from_json(stage) for stage in fields["stages"])
        fields["shapes"] = {t: tuple(shape) for t, shape in fields["shapes"].items()}
        return cls(**fields)

    def explain(self, names: Mapping[str, str] | None = None) -> str:
        """Forms of tensors, stages and their overlap, as text.

        Args: names: what to call tensors of the program, parameters by their names in the model, say.
        """
        names = names or {}
        parameters = {names.get(t, t): form for t, form in self.parameters.items()}
        shapes = {names.get(t, t): shape for t, shape in self.shapes.items()}
        exposed = max(0.0, self.predicted_ms - self.computation_ms)  # not -0.00
        sliced = sum(form.is_cut for form in parameters.values())
        lines = [
            f"Sharding `{self.name}` of {self.program} on {self.ranks} ranks",
            f"  predicted {self.predicted_ms:.2f} ms for two microbatches, forward and backward: computation "
            f"{self.computation_ms:.2f} ms, and {exposed:.2f} ms in which it waits for communication",
            f"  communication {self.communication_ms:.2f} ms; {self.overlapped:.0%} of the shorter of both "
            f"is overlapped; without any overlap {self.serial_ms:.2f} ms",
            f"  {self.strategies_looked_at} strategies looked at over {self.borders} borders in the graph",
            f"  memory {self.memory_bytes / 1e9:.3g} GB a device: weights, gradients, Adam's moments, "
            "and what the backward reads",
            f"  costs: {self.costs}",
            f"Parameters at rest: {len(parameters) - sliced} whole on every rank, {sliced} in slices",
            *_by_form(parameters, shapes),
            f"Stages: {len(self.stages)}. While one microbatch communicates for a stage, the other computes.",
        ]
        for n, stage in enumerate(self.stages):
            lines += [f"Stage {n}", *_overlaps(self.stages, n)]
            lines += [f"    {_message(c, names)}" for c in stage.communication]
            lines.append(
                f"  computes {len(stage.computation)} instructions (forms of inputs and outputs), "
                f"{stage.comp_ms:.3f} ms, backward {stage.comp_backward_ms:.3f} ms"
            )
            operands = [f"{name} ({', '.join(map(str, forms))})" for name, forms in stage.computation.items()]
            lines += _wrapped("; ".join(operands), "    ")
        return "\n".join(lines)


def _stage_from_json(data: Mapping[str, Any]) -> ShardingStage:
    communication = tuple(
        Communication(**{**c, "source": Form.parse(c["source"]), "target": Form.parse(c["target"])})
        for c in data["communication"]
    )
    computation = {i: tuple(map(Form.parse, forms)) for i, forms in data["computation"].items()}
    return ShardingStage(**{**data, "communication": communication, "computation": computation})


def _by_form(forms: Mapping[str, Form], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Names and shapes by form, on lines of readable width."""
    names: dict[str, list[str]] = {}
    for t, form in forms.items():
        names.setdefault(str(form), []).append(f"{t} [{'x'.join(map(str, shapes.get(t, ())))}]")
    return [line for form, own in names.items() for line in _wrapped(f"{form}: {', '.join(own)}", "  ")]


def _wrapped(text: str, indent: str) -> list[str]:
    return wrap(text, WIDTH, initial_indent=indent, subsequent_indent="    ", break_long_words=False)


def _message(c: Communication, names: Mapping[str, str]) -> str:
    """Example: `all_to_all of x: cut 0 -> cut 1, 0.310 ms, backward all_to_all 0.310 ms`."""
    tensor = names.get(c.tensor, c.tensor)
    if c.source == c.target:
        return f"all_reduce of the gradient of {tensor}, backward {c.backward_ms:.3f} ms"
    backward = f", backward {ADJOINT[c.collective]} {c.backward_ms:.3f} ms" if c.backward_ms else ""
    return f"{c.collective} of {tensor}: {c.source} -> {c.target}, {c.ms:.3f} ms{backward}"


def _overlaps(stages: Sequence[ShardingStage], n: int) -> list[str]:
    """Computation beside a stage's messages, and their exposed part, of both microbatches."""
    stage = stages[n]
    if not stage.communication:
        return ["  communicates nothing"]
    lines = []
    for direction, comm, times in (
        ("forward", stage.comm_ms, [s.comp_ms for s in stages]),
        ("backward", stage.comm_backward_ms, [s.comp_backward_ms for s in stages]),
    ):
        before, own = (times[n - 1] if n else 0.0), times[n]
        exposed = max(0.0, comm - before) + max(0.0, comm - own)
        beside = f"computation of stage {n - 1} ({before:.3f} ms)" if n else "nothing"
        lines.append(
            f"  {direction}: {comm:.3f} ms of messages, once beside {beside}, once beside computation of "
            f"stage {n} ({own:.3f} ms): {exposed:.3f} ms exposed"
        )
    return lines
