"""How long does a `Strategy` take, at costs other than those of its search, and as a simulated Program?"""

from __future__ import annotations

from dataclasses import replace

from lancet_kernels.graph.costs import Cost, source_of
from lancet_kernels.graph.program import Instruction, Kind, Phase, Program, TensorSpec
from lancet_kernels.schedules.conversions import ADJOINT, CollectiveCosts
from lancet_kernels.schedules.sharding_costs import COPIES, psi_of
from lancet_kernels.schedules.sharding_strategy import Communication, Stage, Strategy
from lancet_kernels.schedules.signatures import signature_ms


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
