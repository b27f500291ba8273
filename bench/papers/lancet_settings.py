"""One setting of the Lancet paper, simulated: a few numbers, which can be sent between processes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from lancet_kernels.graph.program.program import Instruction, Kind, TensorSpec
from lancet_kernels.predict.simulate import Setting, Simulated, simulate_setting
from lancet_kernels.schedules.time.simulate import Timeline, simulate

Factor = Callable[[Instruction], float]

BASELINES = ("none", "tutel")
COMPARED = (*BASELINES, "lancet-dw", "lancet-partition", "lancet")
"""The strategies that the paper compares."""


def _noise(instruction: Instruction) -> float:
    """A log-normal factor of 10 %, the same for an instruction in every run."""
    return math.exp(random.Random(instruction.name).gauss(0.0, 0.1))


WHAT_IF: dict[str, Factor] = {
    "links 20 % slower": lambda i: 1.25 if i.kind.is_communication else 1.0,
    "links 20 % faster": lambda i: 1 / 1.2 if i.kind.is_communication else 1.0,
    "computation 20 % slower": lambda i: 1.0 if i.kind.is_communication else 1.25,
    "computation 20 % faster": lambda i: 1.0 if i.kind.is_communication else 1 / 1.2,
    "every time off by 10 %": _noise,
}
"""Factors on the times that plans assume, to simulate a cluster that differs from its file."""


@dataclass(frozen=True)
class Decomposition:
    """The parts of an iteration, in milliseconds (figure 13)."""

    iteration_ms: float
    computation_ms: float
    """Not overlapped."""
    overlapped_ms: float
    communication_ms: float
    """Not overlapped: computation idles."""
    peak_memory_gb: float

    @classmethod
    def of(cls, timeline: Timeline) -> Decomposition:
        busy = sum(timeline.times.end[i] - timeline.times.start[i] for i in timeline.times.messages)
        computing = sum(timeline.times.end[i] - timeline.times.start[i] for i in timeline.times.compute)
        overlapped = busy - timeline.exposed_ms
        return cls(
            timeline.iteration_ms,
            computing - overlapped,
            overlapped,
            timeline.exposed_ms,
            timeline.peak_memory_bytes / 1e9,
        )


@dataclass(frozen=True)
class Measured:
    """The simulated results of one setting, by strategy."""

    setting: Setting
    batch: int
    memory_gb: float
    instructions: int
    strategies: Mapping[str, Decomposition]
    unpadded: Decomposition
    """The plan `lancet` with all-to-alls that send only real rows, as Lancet's irregular ones do."""
    planning_seconds: float
    """CPU time of planning `lancet`."""
    what_if: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Iteration time of the unchanged plans under each of `WHAT_IF`."""

    def iteration(self, strategy: str) -> float:
        return self.strategies[strategy].iteration_ms

    def fits(self, strategy: str) -> bool:
        return self.strategies[strategy].peak_memory_gb <= self.memory_gb

    @property
    def speedup(self) -> float:
        """The speedup of `lancet` over the better baseline."""
        return min(map(self.iteration, BASELINES)) / self.iteration("lancet")


def measure(setting: Setting, what_if: bool = False) -> Measured:
    """Plan and simulate one setting. Args: what_if: also simulate the plans with the costs of WHAT_IF."""
    simulated = simulate_setting(setting, strategies=COMPARED)
    return Measured(
        replace(setting),  # without the cached graph, which should not be sent
        setting.sequences,
        setting.hardware.memory_gb,
        len(simulated.program),
        {name: Decomposition.of(timeline) for name, timeline in simulated.timelines.items()},
        Decomposition.of(_simulate_with(simulated, "lancet", _only_real_rows(setting))),
        simulated.cpu_seconds["lancet"],
        {
            what: {s: _simulate_with(simulated, s, factor).iteration_ms for s in (*BASELINES, "lancet")}
            for what, factor in WHAT_IF.items()
            if what_if
        },
    )


def _only_real_rows(setting: Setting) -> Factor:
    """Unpadded all-to-alls send only the real rows, which are 1 / capacity factor of the padded ones."""
    share = 1.0 / max(1.0, setting.capacity_factor or 1.0) if setting.padded else 1.0
    return lambda i: share if i.kind is Kind.ALL_TO_ALL else 1.0


def _simulate_with(simulated: Simulated, strategy: str, factor: Factor) -> Timeline:
    """The same plan with other costs."""

    def cost(instruction: Instruction, tensors: Mapping[str, TensorSpec]) -> float:
        return simulated.cost(instruction, tensors) * factor(instruction)

    plan, program = simulated.plans[strategy], simulated.timelines[strategy].program
    return simulate(program.reordered(plan.order), cost, blocking=plan.blocking)
