"""A small training step on the ranks of a job, run as it stands and with plans: what both give.

    step = SmallStep(case)          on every rank
    step.plain()                    the module itself, replicated gradients summed over the ranks
    step.planned(plan)              forward and backward graph of the plan, run by hand
    step.by_hand(...), step.planner(...)      plans to try

One capture serves any number of plans. Experts of the case stay empty and tokens are dropped (`skew`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import networkx
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from lancet_kernels import expert_parameters, moe_losses, set_routing_step
from lancet_kernels.graph.capture.captured_graph import copy_of, is_tangent
from lancet_kernels.graph.costs.costs import Cost
from lancet_kernels.graph.program import Instruction, Kind, Phase, Program, fingerprint
from lancet_kernels.layer.gpt2_moe import GPT2MoE, ModelConfig, TrainingStep
from lancet_kernels.optimization.step import ModelStep, capture_step
from lancet_kernels.schedules.cut.partition_range import PartitionOptions
from lancet_kernels.schedules.cut.ranges import AxisInference, PartitionRange
from lancet_kernels.schedules.plan import Plan
from lancet_kernels.schedules.rewrite.cut import GraphCutter
from lancet_kernels.schedules.rewrite.walk import PLANNED, RUNNING, Step, walk
from lancet_kernels.schedules.strategies import Planner, PlanningOptions

VOCABULARY = 13
ADDED_BY_CUTTING = {
    "aten.cat",
    *(f"lancet.{op}" for op in ("merge_parts", "merge_rows", "part_rows", "window_rows", "window_counts")),
}
"""Ops that hand out parts and put them together again."""


@dataclass(frozen=True)
class StepCase:
    """A GPT-2 with experts in every other block, and its batch."""

    gate: str = "switch"
    top_k: int = 1
    capacity_factor: float | None = 0.75
    activation: str = "gelu"
    layers: int = 4
    width: int = 8
    experts: int = 4
    batch: int = 8
    sequence: int = 6
    dtype: torch.dtype = torch.float64
    dropout: float = 0.0


class StepWithLogits(TrainingStep):
    """TrainingStep that also shows the logits of every token: a token that is routed otherwise has others."""

    def forward(self, token_BS: Tensor, target_BS: Tensor) -> tuple[Tensor, ...]:
        logits_BSV, sums = self.model(token_BS)
        cross_entropy = nn.functional.cross_entropy(logits_BSV.flatten(0, 1), target_BS.flatten())
        moe = moe_losses(sums)
        objective = cross_entropy + self.balance_weight * moe.balance.mean() + self.z_weight * moe.z.mean()
        return objective / self.ranks, moe.dropped.mean(), moe.assigned, logits_BSV.detach()


def build_step(case: StepCase) -> tuple[StepWithLogits, tuple[Tensor, Tensor]]:
    """The step and this rank's batch: parameters large enough that gradients are of order one."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    same = "layers width sequence top_k gate capacity_factor activation dropout".split()
    config = ModelConfig(
        "small",
        heads=2,
        vocab=VOCABULARY,
        num_experts=case.experts,
        **{name: getattr(case, name) for name in same},
    )
    torch.manual_seed(0)
    model = GPT2MoE(config).to(case.dtype)
    replicated, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2 + rank)
    experts = {id(parameter) for parameter in expert_parameters(model)}
    with torch.no_grad():
        for parameter in model.parameters():
            noise = own if id(parameter) in experts else replicated
            values = torch.randn(parameter.shape, generator=noise, dtype=torch.float64)
            parameter.add_(0.3 * values.to(case.dtype))
        for block in model.blocks:
            if block.moe:
                _skew(block)
    set_routing_step(model, 3)
    step = StepWithLogits(model, ranks, balance_weight=0.1, z_weight=0.01)
    generator = torch.Generator().manual_seed(10 + rank)
    # Few token ids, so that the hash gate leaves experts empty, too.
    tokens = torch.randint(0, 3, (case.batch, case.sequence), generator=generator)
    targets = torch.randint(0, VOCABULARY, (case.batch, case.sequence), generator=generator)
    return step, (tokens, targets)


def _skew(block: nn.Module) -> None:
    """What all tokens have in common draws them to expert 0 and keeps them from the last one."""
    layer = block.feed_forward
    if layer.router is None:
        return
    common = block.norm2.bias
    common.add_(common.sign())
    pull = common / common.norm()
    layer.router[0] += 0.3 * pull
    layer.router[-1] -= 9 * pull


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """What `.grad` holds, by name."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def outcome(module: nn.Module, outputs: Tensor | Sequence[Tensor], reduced: bool) -> Outcome:
    """What a module gave, and its gradients: summed over the ranks unless the module has done that."""
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs
    module.zero_grad(set_to_none=True)
    outputs[0].backward()
    found = gradients(module)
    module.zero_grad(set_to_none=True)
    return Outcome([o.detach().clone() for o in outputs], found if reduced else sum_over_ranks(module, found))


def sum_over_ranks(model: nn.Module, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of replicated parameters added up over the ranks that have one, those of experts as they
    are."""
    result = dict(found)
    if not dist.is_initialized():
        return result
    experts = {id(parameter) for parameter in expert_parameters(model)}
    replicated = {name: p for name, p in model.named_parameters() if id(p) not in experts}
    ranks_with = torch.tensor([name in found for name in replicated], dtype=torch.int32)
    dist.all_reduce(ranks_with)
    for (name, parameter), ranks in zip(replicated.items(), ranks_with.tolist(), strict=True):
        if ranks:
            result[name] = result[name] if name in result else torch.zeros_like(parameter)
            dist.all_reduce(result[name])
    return result


@dataclass
class Outcome:
    """What a step gave: the outputs of the forward, and the gradients by parameter."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]

    def distance(self, other: Outcome) -> float:
        """The largest difference of any number, relative to the largest of its tensor if that is over 1."""
        assert self.gradients.keys() == other.gradients.keys()
        assert len(self.outputs) == len(other.outputs)
        pairs = [*zip(self.outputs, other.outputs, strict=True)]
        pairs += [(self.gradients[name], other.gradients[name]) for name in self.gradients]
        worst = 0.0
        for mine, theirs in pairs:
            assert mine.shape == theirs.shape
            assert mine.dtype == theirs.dtype
            if mine.numel():
                difference = (mine.double() - theirs.double()).abs().max()
                assert difference.isfinite()
                worst = max(worst, float(difference / theirs.double().abs().max().clamp(min=1.0)))
        return worst


def dear_communication(instruction: Instruction, _tensors: Mapping) -> float:
    """Costs under which cutting pays: 6 ms an all-to-all, 0.2 ms an op, hardly any overhead."""
    parts = instruction.attributes.get("parts", 1)
    if instruction.kind is Kind.ALL_TO_ALL:
        return 6.0 / parts + 0.01
    if instruction.kind is Kind.ALL_REDUCE:
        return 1.0
    if instruction.op in ADDED_BY_CUTTING or not (instruction.bytes or instruction.flops):
        return 0.0
    return 0.2 / parts + 0.002


class SmallStep:
    """One captured step on this rank."""

    def __init__(self, case: StepCase) -> None:
        self.module, self.inputs = build_step(case)
        self.step = capture_step(self.module, (self.inputs, {}), "sum")
        self.joint, self.forward_outputs = self.step.module, self.step.forward_outputs
        self.parameters = self.step.captured.parameter_of_gradient()
        self.values, self.program = self.step.inputs, self.step.program
        self.inference = AxisInference(self.program)
        self.names = [i.name for i in self.program.instructions]

    def costed(self, cost: Cost = dear_communication) -> ModelStep:
        """The step, with what its instructions cost."""
        return replace(self.step, timed=self.program, cost=cost)

    def plain(self) -> Outcome:
        """The module as it stands, without any graph."""
        return outcome(self.module, self.module(*self.inputs), reduced=False)

    def planned(self, plan: Plan) -> Outcome:
        """The step as the plan wants it."""
        forward, backward = self.halves(plan)
        return self.run(forward, backward)

    def halves(self, plan: Plan) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward graph of a plan."""
        step = Step(copy_of(self.joint), self.program, forward_outputs=self.forward_outputs)
        forward, backward = walk(step, plan, (*PLANNED, *RUNNING)).halves
        return forward, backward

    @torch.no_grad()
    def run(self, forward: fx.GraphModule, backward: fx.GraphModule) -> Outcome:
        """Both graphs with this rank's values; the objective's gradient is one."""
        joint, first, second = (m.graph.find_nodes(op="placeholder") for m in (self.joint, forward, backward))
        by_name = {node.name: value for node, value in zip(joint, self.values, strict=True)}
        results = forward(*(by_name[node.name] for node in first))
        outputs, kept = results[: self.forward_outputs], results[self.forward_outputs :]
        saved = forward.graph.output_node().args[0][self.forward_outputs :]
        known = {node.name: value for node, value in zip(saved, kept, strict=True)}
        (tangent,) = filter(is_tangent, second)
        known[tangent.name] = torch.ones_like(outputs[0])
        found = backward(*(known[node.name] for node in second))
        by_parameter = {name: found[i - self.forward_outputs] for i, name in self.parameters.items()}
        grads = {name: gradient.clone() for name, gradient in by_parameter.items() if gradient is not None}
        return Outcome([output.clone() for output in outputs], grads)

    # Plans

    @property
    def cutter(self) -> GraphCutter:
        """Gives the Program of the step with ranges cut."""
        return GraphCutter(self.joint, self.program, dear_communication)

    def planner(self, most_parts: int) -> Planner:
        """What the library would choose, were communication dear."""
        options = PlanningOptions(partition=PartitionOptions(most_parts=most_parts))
        return Planner(self.program, dear_communication, options, self.cutter)

    def by_hand(self, ranges: list[PartitionRange], seed: int | None = None) -> Plan:
        """A plan that cuts these ranges; with a seed, in a random valid order."""
        cut = self.cutter(ranges)
        order = [i.name for i in cut.instructions] if seed is None else random_order(cut, seed)
        return Plan(
            program=self.program.name,
            program_fingerprint=fingerprint(self.program),
            strategy="by hand",
            order=tuple(order),
            ranges=tuple(ranges),
        )

    def cut(self, first: str, last: str, parts: int) -> PartitionRange | None:
        """The range of these instructions in that many parts, None if it has no forms."""
        forms = self.inference.forms(self.program.index[first], self.program.index[last])
        return PartitionRange(first, last, parts, dict(forms)) if forms else None

    def named(self, op: str, phase: Phase = Phase.FORWARD) -> list[str]:
        """Instructions with that op, in order."""
        return [i.name for i in self.program.instructions if i.op == op and i.phase is phase]

    def candidates(self) -> dict[str, tuple[str, str]]:
        """Ranges worth trying, by what they hold: (first, last)."""
        gates, combines = self.named("lancet.gate"), self.named("lancet.combine")
        sends = self.named("lancet.all_to_all")
        back = self.named("lancet.all_to_all", Phase.BACKWARD)
        behind = self.names[self.program.index[gates[0]] + 1]
        attentions = [
            i.name for i in self.program.instructions if "attention" in i.op and i.phase is Phase.FORWARD
        ]
        found = {
            "experts": (sends[0], sends[1]),
            "behind the gate": (behind, combines[0]),
            "layer": (gates[0], combines[0]),
            "experts of the backward": (back[0], back[1]),
        }
        if len(gates) > 1:
            found["into the next block"] = (gates[0], attentions[2])
            found["from attention"] = (attentions[1], combines[0])
            found["two layers"] = (gates[0], combines[1])
        return found


def random_order(program: Program, seed: int) -> list[str]:
    """A random valid order, the forward before the backward; the same on every rank."""
    chosen, instructions = random.Random(seed), program.instructions
    graph = networkx.DiGraph([(j, i) for i in range(len(program)) for j in program.dependencies[i]])
    graph.add_nodes_from(range(len(program)))

    def place(i: int) -> tuple[bool, float]:
        return instructions[i].phase is not Phase.FORWARD, chosen.random()

    return [instructions[i].name for i in networkx.lexicographical_topological_sort(graph, place)]
