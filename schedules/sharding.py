"""How should a model for one device run on many? A `Strategy`: forms, stages, and what overlaps what.

HiDup, section 4. `search_sharding` finds one for the forward Program of a microbatch; it can be saved, read,
explained, and compared with what people choose by hand (`schedules.sharding_baselines`). All costs are of one
microbatch; the two run in turns (`duplexed`), and the predicted time is that of both, forward and backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

from lancet_kernels.atomic import file_errors, write_json_atomically
from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs import Cost, source_of
from lancet_kernels.graph.forms import Form
from lancet_kernels.graph.program import Instruction, Kind, Phase, Program, TensorSpec
from lancet_kernels.graph.program_json import check_fingerprint, fingerprint
from lancet_kernels.graph.saved_json import read_json, versioned_fields
from lancet_kernels.schedules.conversions import ADJOINT, CollectiveCosts, collective
from lancet_kernels.schedules.sharding_costs import BACKWARD, COPIES, Conversion, psi_of
from lancet_kernels.schedules.sharding_search import Search, Searched
from lancet_kernels.schedules.sharding_states import Restriction
from lancet_kernels.schedules.signatures import signature_ms

FORMAT = "lancet-sharding"
VERSION = 1
MOST_LABELS = 200
"""Strategies kept behind each cut of a large graph; those of small graphs are all kept."""
TOLERANCE = 0.01
LEAST_SLICED_BYTES = 1 << 16
WIDTH = 118
PRICES = (0.1, 0.3, 0.45, 0.65, 1.0)
"""Of memory: such a share of the fastest strategy's time for all that a device may hold."""
SMALL = 8
"""Instructions of a graph that is searched without any of these."""


@dataclass(frozen=True)
class Communication:
    """A tensor whose form changes in a stage, and its collective; of a parameter that is whole at rest and
    when it is read, the all-reduce of its gradient. Milliseconds of one microbatch, forward and backward."""

    tensor: str
    source: Form
    target: Form
    collective: str
    ms: float
    backward_ms: float


@dataclass(frozen=True)
class Stage:
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
class Strategy:
    """One way to run a Program on `ranks` ranks.

    parameters: the form in which each rests. predicted_ms: both microbatches, forward and backward: psi of
    equation (5). lower_bound_ms: what no strategy of the searched space can beat; equal to the prediction
    where the search dropped dominated strategies only. memory_bytes: weights, gradients, Adam's moments, and
    the activations that backward reads.
    """

    name: str
    program: str
    program_fingerprint: str
    ranks: int
    stages: tuple[Stage, ...]
    parameters: Mapping[str, Form]
    predicted_ms: float
    lower_bound_ms: float
    memory_bytes: float
    costs: str = ""
    strategies_looked_at: int = 0
    cuts: int = 0
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """By how much the prediction may lie above the optimum, as a share of the bound."""
        return self.predicted_ms / self.lower_bound_ms - 1 if self.lower_bound_ms else 0.0

    @property
    def computation_ms(self) -> float:
        """Of both microbatches, forward and backward."""
        return COPIES * sum(s.comp_ms + s.comp_backward_ms for s in self.stages)

    @property
    def communication_ms(self) -> float:
        """Of both microbatches, forward and backward."""
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

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values."""
        fields = asdict(replace(self, stages=(), parameters={}))
        stages = [
            {
                **asdict(replace(stage, communication=(), computation={})),
                "communication": [
                    {**asdict(c), "source": str(c.source), "target": str(c.target)}
                    for c in stage.communication
                ],
                "computation": {i: [*map(str, forms)] for i, forms in stage.computation.items()},
            }
            for stage in self.stages
        ]
        parameters = {t: str(form) for t, form in self.parameters.items()}
        return {
            "format": FORMAT,
            "version": VERSION,
            **fields,
            "shapes": {t: list(shape) for t, shape in self.shapes.items()},
            "stages": stages,
            "parameters": parameters,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Strategy:
        """The strategy that `to_json` wrote. Raises: UserError: none of this version."""
        fields = versioned_fields(data, "sharding", (FORMAT, VERSION), "search again")
        try:
            fields["parameters"] = {t: Form.parse(form) for t, form in fields["parameters"].items()}
            fields["stages"] = tuple(_stage_from_json(stage) for stage in fields["stages"])
            fields["shapes"] = {t: tuple(shape) for t, shape in fields["shapes"].items()}
            return cls(**fields)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(
                "sharding JSON", got=repr(error), expected="every field of its version", do="search again"
            ) from error

    def save(self, path: str | Path) -> None:
        """Write the strategy as JSON, atomically. Raises: UserError if that cannot be."""
        with file_errors(path):
            write_json_atomically(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path, program: Program | None = None) -> Strategy:
        """Read a strategy; with `program`, refuse one for another. Raises: UserError."""
        strategy = cls.from_json(read_json(path, "sharding", "a saved strategy", "search again"))
        if program is not None:
            strategy.check(program)
        return strategy

    def check(self, program: Program) -> None:
        """Raise UserError unless the strategy is for this program."""
        what = f"sharding of {self.program}"
        check_fingerprint(program, self.program_fingerprint, what, "searched", "search again")

    def explain(self) -> str:
        """Which tensor in which form, the stages, and what overlaps what, as text."""
        exposed = self.predicted_ms - self.computation_ms
        lines = [
            f"Sharding `{self.name}` of {self.program} on {self.ranks} ranks",
            f"  predicted {self.predicted_ms:.2f} ms for two microbatches, forward and backward: computation "
            f"{self.computation_ms:.2f} ms, and {exposed:.2f} ms in which it waits for communication",
            f"  communication {self.communication_ms:.2f} ms; {self.overlapped:.0%} of the shorter of both "
            f"is overlapped; without any overlap {self.serial_ms:.2f} ms",
            f"  no strategy is faster than {self.lower_bound_ms:.2f} ms (this one: {self.gap:.1%} more); "
            f"{self.strategies_looked_at} looked at over {self.cuts} cuts of the graph",
            f"  memory {self.memory_bytes / 1e9:.3g} GB a device: weights, gradients, Adam's moments, "
            "and what the backward reads",
            f"  costs: {self.costs}",
            f"Parameters at rest: {_counted(self.parameters)}",
            *_by_form(self.parameters, self.shapes),
            f"Stages: {len(self.stages)}. While one microbatch communicates for a stage, the other computes.",
        ]
        for n, stage in enumerate(self.stages):
            lines += [f"Stage {n}", *_overlaps(self.stages, n)]
            lines += [f"    {_message(c)}" for c in stage.communication]
            lines.append(
                f"  computes {len(stage.computation)} instructions (forms of inputs and outputs), "
                f"{stage.comp_ms:.3f} ms, backward {stage.comp_backward_ms:.3f} ms"
            )
            operands = [f"{name} ({', '.join(map(str, forms))})" for name, forms in stage.computation.items()]
            lines += wrap(
                "; ".join(operands),
                WIDTH,
                initial_indent=" " * 4,
                subsequent_indent=" " * 4,
                break_long_words=False,
            )
        return "\n".join(lines)


def _stage_from_json(data: Mapping[str, Any]) -> Stage:
    communication = tuple(
        Communication(**{**c, "source": Form.parse(c["source"]), "target": Form.parse(c["target"])})
        for c in data["communication"]
    )
    computation = {i: tuple(map(Form.parse, forms)) for i, forms in data["computation"].items()}
    return Stage(**{**data, "communication": communication, "computation": computation})


def _counted(forms: Mapping[str, Form]) -> str:
    """Example: `31 whole on every rank, 8 in slices`."""
    sliced = sum(form.is_cut for form in forms.values())
    return f"{len(forms) - sliced} whole on every rank, {sliced} in slices"


def _by_form(forms: Mapping[str, Form], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Names and shapes by form, on lines of readable width."""
    names: dict[str, list[str]] = {}
    for t, form in forms.items():
        names.setdefault(str(form), []).append(f"{t} [{'x'.join(map(str, shapes.get(t, ())))}]")
    return [
        line
        for form, of in names.items()
        for line in wrap(
            f"{form}: {', '.join(of)}",
            WIDTH,
            initial_indent="  ",
            subsequent_indent=" " * 4,
            break_long_words=False,
        )
    ]


def _message(c: Communication) -> str:
    """Example: `all_to_all of x: cut 0 -> cut 1, 0.310 ms, backward all_to_all 0.310 ms`."""
    if c.source == c.target:
        return f"all_reduce of the gradient of {c.tensor}, backward {c.backward_ms:.3f} ms"
    backward = f", backward {ADJOINT[c.collective]} {c.backward_ms:.3f} ms" if c.backward_ms else ""
    return f"{c.collective} of {c.tensor}: {c.source} -> {c.target}, {c.ms:.3f} ms{backward}"


def _overlaps(stages: Sequence[Stage], n: int) -> list[str]:
    """What runs beside a stage's messages, and how much of them stays exposed, of both microbatches."""
    stage = stages[n]
    if not stage.communication:
        return ["  communicates nothing"]
    lines = []
    for direction, comm, before, own in (
        ("forward", stage.comm_ms, stages[n - 1].comp_ms if n else 0.0, stage.comp_ms),
        (
            "backward",
            stage.comm_backward_ms,
            stages[n - 1].comp_backward_ms if n else 0.0,
            stage.comp_backward_ms,
        ),
    ):
        exposed = max(0.0, comm - before) + max(0.0, comm - own)
        beside = f"computation of stage {n - 1} ({before:.3f} ms)" if n else "nothing"
        lines.append(
            f"  {direction}: {comm:.3f} ms of messages, once beside {beside}, once beside computation of "
            f"stage {n} ({own:.3f} ms): {exposed:.3f} ms exposed"
        )
    return lines


def search_sharding(
    program: Program,
    ranks: int,
    cost: Cost,
    *,
    memory_gb: float | None = None,
    restriction: Restriction | None = None,
    name: str = "hidup",
    most_labels: int | None = None,
    overlaps_backward: bool = True,
) -> Strategy:
    """The fastest strategy for the forward Program of a microbatch (section 4.2).

    Args:
        program: the forward of a model for one device, on one microbatch of the batch of all ranks together.
        ranks: how many ranks share every tensor. cost: prices instructions and collectives.
        memory_gb: of a device; strategies that need more are dropped. It is looked at only where the
            fastest strategy of all needs more.
        most_labels: strategies kept behind each cut; None for all of a small graph, `MOST_LABELS` of others.
        overlaps_backward: see `Search`.
    Raises: UserError: a Program with collectives or a backward; no strategy within the memory.
    """

    is_small = len(program) <= SMALL

    def searched(memory_bytes: float | None = None, price: float = 0.0) -> Searched:
        return Search(
            program,
            ranks,
            cost,
            restriction=restriction,
            memory_bytes=memory_bytes,
            most_labels=most_labels or (None if is_small else MOST_LABELS),
            tolerance=0.0 if is_small else TOLERANCE,
            least_sliced_bytes=0 if is_small else LEAST_SLICED_BYTES,
            overlaps_backward=overlaps_backward,
            price=price,
        ).run()

    result = searched()
    limit = None if memory_gb is None else memory_gb * 1e9
    if limit is not None and result.best.bytes > limit:
        # Those that fit at some price of memory, beside the search that keeps to the limit on its way.
        candidates = [searched(limit)]
        if not is_small:
            prices = (share * result.best.psi / limit for share in PRICES)
            candidates += [searched(price=price) for price in prices]
        fitting = [candidate for candidate in candidates if candidate.best.bytes <= limit]
        result = min(fitting, key=lambda candidate: candidate.best.psi)
    return _strategy(result, program, ranks, cost, name)


def _strategy(result: Searched, program: Program, ranks: int, cost: Cost, name: str) -> Strategy:
    stages: list[list] = []
    parameters: dict[str, Form] = {}
    for step in result.steps:
        if step.new_stage or not stages:
            stages.append([])
        stages[-1].append(step)
    made: list[Stage] = []
    for steps in stages:
        communication: list[Communication] = []
        computation: dict[str, tuple[Form, ...]] = {}
        for step in steps:
            block = result.blocks[step.block]
            communication += [
                Communication(c.tensor, c.source, c.target, _collective(c), c.ms, c.backward_ms)
                for c in step.conversions
            ]
            parameters.update(step.rests)
            computation |= dict(zip(block.instructions, step.signature.ways, strict=True))
        made.append(
            Stage(
                tuple(communication),
                computation,
                sum(c.ms for c in communication),
                sum(c.backward_ms for c in communication),
                sum(step.signature.ms for step in steps),
            )
        )
    best = result.best
    return Strategy(
        name,
        program.name,
        fingerprint(program),
        ranks,
        tuple(made),
        parameters,
        best.psi,
        result.bound_ms,
        best.bytes,
        source_of(cost),
        result.labels,
        result.cuts,
        {t: tuple(program.tensors[t].shape) for t in parameters},
    )


def _collective(conversion: Conversion) -> str:
    return collective(conversion.source, conversion.target) or "all_reduce"


def repriced(strategy: Strategy, program: Program, cost: Cost) -> Strategy:
    """The same strategy at other costs: what one found with estimates takes in truth (section 6.11). Its
    bound is not known there: it is zero."""
    costs = CollectiveCosts(cost, strategy.ranks)

    def message(c: Communication) -> Communication:
        # What concerns a parameter is done once for both microbatches: half of it counts for each.
        share = COPIES if c.tensor in strategy.parameters else 1
        spec = program.tensors[c.tensor]
        sums_gradients = c.source == c.target
        ms = 0.0 if sums_gradients else costs.milliseconds(c.collective, spec) / share
        adjoint = c.collective if sums_gradients else ADJOINT[c.collective]
        has_gradient = c.backward_ms > 0
        backward = costs.milliseconds(adjoint, spec) / share if has_gradient else 0.0
        return replace(c, ms=ms, backward_ms=backward)

    stages = []
    for stage in strategy.stages:
        communication = tuple(map(message, stage.communication))
        computation = sum(
            signature_ms(program.instructions[program.index[name]], program, way, strategy.ranks, cost)
            for name, way in stage.computation.items()
        )
        comm, comm_b = (sum(c.ms for c in communication), sum(c.backward_ms for c in communication))
        stages.append(Stage(communication, stage.computation, comm, comm_b, computation))
    psi = psi_of([(s.comm_ms, s.comp_ms) for s in stages])
    psi += psi_of([(s.comm_backward_ms, s.comp_backward_ms) for s in stages])
    return replace(
        strategy, stages=tuple(stages), predicted_ms=psi, lower_bound_ms=0.0, costs=source_of(cost)
    )


def duplexed(strategy: Strategy) -> Program:
    """Both microbatches in the order of section 4.1, stage by stage, as a Program that can be simulated: the
    communication step of one beside the computation step of the other, forward and then backward."""
    tensors = {"batch": TensorSpec("batch", (1,), "int8", 0)}
    instructions: list[Instruction] = []
    last: dict[int, str] = {1: "batch", 2: "batch"}

    def add(copy: int, stage: int, comm: bool, phase: Phase) -> None:
        of = strategy.stages[stage]
        times = (of.comm_ms, of.comp_ms), (of.comm_backward_ms, of.comp_backward_ms)
        ms = times[phase is Phase.BACKWARD][not comm]
        step = "communication" if comm else "computation"
        name = f"{phase.value} {step} {stage} of microbatch {copy}"
        tensors[name] = TensorSpec(name, (1,), "int8", 0)
        instructions.append(
            Instruction(
                name,
                f"sharding.{step}",
                (last[copy],),
                (name,),
                Kind.OTHER_COMMUNICATION if comm else Kind.COMPUTE,
                phase,
                milliseconds=ms,
            )
        )
        last[copy] = name

    n = len(strategy.stages)
    for stage in range(n):
        add(1, stage, True, Phase.FORWARD)
        if stage:
            add(2, stage - 1, False, Phase.FORWARD)
        add(2, stage, True, Phase.FORWARD)
        add(1, stage, False, Phase.FORWARD)
    add(2, n - 1, False, Phase.FORWARD)
    add(1, n - 1, False, Phase.BACKWARD)
    for stage in reversed(range(n)):
        add(1, stage, True, Phase.BACKWARD)
        add(2, stage, False, Phase.BACKWARD)
        add(2, stage, True, Phase.BACKWARD)
        if stage:
            add(1, stage - 1, False, Phase.BACKWARD)
    return Program(f"{strategy.program}, duplexed", tuple(instructions), tensors, ("batch",))
