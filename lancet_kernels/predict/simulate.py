"""Simulates a training step with each strategy on a cluster.

A setting is a model, a cluster, a number of GPUs, a gate and a batch. Its step is captured on rank 0 of a
fake job with fake tensors; costs come from the cluster file, times from simulating the plans.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import fx

from lancet_kernels.errors import UserError, check_name
from lancet_kernels.graph.capture.capture import Captured
from lancet_kernels.graph.capture.captured_graph import garbage_collection, state_name
from lancet_kernels.graph.costs.clusters import Cluster, load_cluster
from lancet_kernels.graph.costs.costs import Cost, CostModel
from lancet_kernels.graph.from_fx import program_from_fx, tensor_names
from lancet_kernels.graph.program import Instruction, Phase, Program, TensorSpec
from lancet_kernels.layer.gpt2_moe import GPT2MoE, ModelConfig, TrainingStep, model_config
from lancet_kernels.layer.moe_layer import MoELayer
from lancet_kernels.ops.moe.gates import parse_gate
from lancet_kernels.optimization.guards import example_arguments
from lancet_kernels.optimization.step import capture_step
from lancet_kernels.predict.own_step import OwnStep, fake_ranks, without_contents
from lancet_kernels.schedules.cut.partition_range import PartitionOptions
from lancet_kernels.schedules.order.ordering import weight_gradients
from lancet_kernels.schedules.plan import Plan
from lancet_kernels.schedules.rewrite.cut import GraphCutter
from lancet_kernels.schedules.rewrite.walk import Step
from lancet_kernels.schedules.strategies import AUTO, STRATEGY_NAMES, Planner, PlanningOptions
from lancet_kernels.schedules.time.simulate import Timeline

PAPER_BATCH = {
    ("p4de", "gpt2-s-moe"): 24,
    ("p4de", "gpt2-l-moe"): 48,
    ("p3dn", "gpt2-s-moe"): 16,
    ("p3dn", "gpt2-l-moe"): 8,
}
"""Sequences per GPU in the paper's experiments, by cluster and model."""

LIKE = {"dgx-h100": "p4de"}
"""Cluster outside of the paper -> the paper's cluster with the same memory per GPU."""

ASSUMPTIONS = (
    "times come from the cluster file: a roofline of peak numbers times an efficiency factor, plus a fixed "
    "cost per kernel; links as bandwidth, latency and a cost per peer; element-wise ops are not fused",
    "tokens are spread evenly over the experts; a part of k of an irregular all-to-all takes the time of C/k",
    "one compute stream and one link per GPU that do not slow each other down; all ranks alike; all-reduces "
    "give way to all-to-alls",
    "none: computation waits for every all-to-all (RAF; also DeepSpeed, apart from its kernels)",
    "tutel: all-to-alls and experts cut along the capacity, forward and backward, best degree of 1, 2, 4, 8",
    "duplex: the whole step as two copies on halves of the batch, in turns stage by stage (HiDup)",
    "attention is one fused kernel that stores no S x S matrix (where the module calls torch's)",
)


@dataclass(frozen=True)
class Setting:
    """A model on a cluster, to simulate.

    cluster: a name, or the path of a TOML file. batch: sequences per GPU; None: the paper's for this cluster
    and model.
    """

    model: str
    cluster: str
    gpus: int
    gate: str = "switch"
    batch: int | None = None
    experts_per_gpu: int = 2
    top_k: int | None = None
    capacity_factor: float | None = 1.25
    dtype: str = "float32"
    padded: bool = False
    """Whether all-to-alls and experts process the full capacity (the paper's cost model), or real rows."""
    layers: int | None = None
    """Number of layers; None: the model's own."""

    assumptions = ("no dropout; SGD with momentum",)

    @cached_property
    def hardware(self) -> Cluster:
        return load_cluster(self.cluster)

    @property
    def sequences(self) -> int:
        """The batch per GPU."""
        if self.batch is not None:
            return self.batch
        key = LIKE.get(self.hardware.name, self.hardware.name), self.model
        return PAPER_BATCH.get(key, 8)

    @property
    def config(self) -> ModelConfig:
        """The model's configuration. Raises: UserError for an unknown model or gate."""
        config = model_config(
            self.model,
            num_experts=self.experts_per_gpu * self.gpus,
            top_k=self.top_k or (2 if parse_gate(self.gate).name == "gshard" else 1),
            gate=self.gate,
            capacity_factor=self.capacity_factor,
        )
        return config if self.layers is None else replace(config, layers=self.layers)

    @cached_property
    def priced(self) -> Step:
        """The training step of a rank, with SGD with momentum, and its costs. Raises: UserError."""
        # First, for a clear error if the GPUs do not fill nodes.
        cost = CostModel.for_cluster(self.hardware, self.gpus)
        check_name("dtype", self.dtype, self.hardware.peak_tflops, do="use a dtype of the cluster file")
        dtype = getattr(torch, self.dtype)
        captured = captured_program(self.config, self.gpus, self.sequences, dtype=dtype, padded=self.padded)
        return Step(*captured, cost)

    def facts(self) -> dict[str, object]:
        return {
            "model": self.model,
            "cluster": self.hardware.name,
            "gpus": self.gpus,
            "gate": self.gate,
            "batch": self.sequences,
            "dtype": self.dtype,
        }

    def describe(self) -> str:
        """One line for headings."""
        return (
            f"{self.model}, gate {self.gate}, {self.gpus} GPUs of {self.hardware.name} "
            f"({self.hardware.description}), {self.sequences} sequences per GPU, {self.dtype}"
        )


@lru_cache(maxsize=8)  # a capture takes seconds, and several clusters may share a step
def captured_program(
    config: ModelConfig, gpus: int, batch: int, *, dtype: torch.dtype = torch.float32, padded: bool = False
) -> tuple[fx.GraphModule, Program]:
    """The training step of a rank with `batch` sequences: forward, backward, all-reduces, SGD with momentum.

    SGD is only in the Program, not in the graph.

    Args: padded: all-to-alls and experts process the full capacity (the paper's cost model).
    Raises: UserError for an invalid gate or invalid sizes.
    """
    with fake_ranks(gpus):
        with without_contents():
            model = GPT2MoE(config, layer=_PaddedLayer if padded else MoELayer).to(dtype)
            token_BS = torch.zeros(batch, config.sequence, dtype=torch.int64)
        step = TrainingStep(model, gpus)
        arguments = example_arguments(step, (token_BS, token_BS))
        captured = capture_step(step, arguments, "mean").captured
        program = program_from_fx(captured.joint, name=f"{config.name}, {gpus} GPUs, batch {batch}")
        return captured.joint, _with_sgd(program, captured)


def _with_sgd(program: Program, captured: Captured) -> Program:
    """The program of a captured step, extended by SGD with momentum: one instruction per parameter with a
    gradient, which reads three tensors and writes two."""
    graph = captured.joint.graph
    tensor_of = {state_name(n): n.name for n in graph.nodes if n.op == "placeholder" and state_name(n)}
    results = graph.output_node().args[0]
    tensors = dict(program.tensors)
    steps, momenta = [], []
    for i, name in captured.parameter_of_gradient().items():
        if results[i] is None:
            continue
        # After the all-reduce, if the step has one.
        gradient, weight = tensor_names(results[i])[0], tensor_of[name]
        spec = tensors[weight]
        momentum = TensorSpec(f"{weight}.momentum", spec.shape)
        updated = replace(spec, name=f"{weight}.updated", bytes=0, alias_of=weight)
        tensors |= {momentum.name: momentum, updated.name: updated}
        momenta.append(momentum.name)
        steps.append(
            Instruction(
                f"{weight}.sgd",
                "lancet.sgd",
                (gradient, weight, momentum.name),
                (updated.name,),
                phase=Phase.OPTIMIZER,
                bytes=float(3 * spec.content_bytes + 2 * momentum.content_bytes),
                mutates=(weight, momentum.name),
            )
        )
    return replace(
        program,
        instructions=(*program.instructions, *steps),
        tensors=tensors,
        inputs=(*program.inputs, *momenta),
        outputs=(*program.outputs, *(step.outputs[0] for step in steps)),
    )


class _PaddedLayer(MoELayer):
    """A layer that sends and computes rows up to the capacity, as the paper's cost model assumes."""

    def _most_rows(self, num_choices: int, capacity: int) -> int:
        return self.num_experts * capacity


@dataclass(frozen=True)
class Simulated:
    """A setting with its plans."""

    setting: Setting | OwnStep
    program: Program
    cost: Cost
    plans: Mapping[str, Plan]
    capture_seconds: float
    timelines: Mapping[str, Timeline]
    """The simulated iteration of each plan."""
    seconds: Mapping[str, float]
    """Wall time of planning each strategy, with the strategies that it needs (`lancet` is planned first)."""
    cpu_seconds: Mapping[str, float]
    impossible: Mapping[str, UserError]

    @property
    def weight_gradients(self) -> list[str]:
        return [self.program.instructions[i].name for i in weight_gradients(self.program)]


def simulate_setting(
    setting: Setting | OwnStep,
    memory_limit_gb: float | None = None,
    partition: PartitionOptions | None = None,
    strategies: Sequence[str] = STRATEGY_NAMES,
) -> Simulated:
    """Simulate a setting with all possible strategies.

    Args:
        memory_limit_gb: limit for plans, unless the original order exceeds it (None: the GPU's memory).
        partition: hyper-parameters (None: from environment variables).
    Raises: UserError for an invalid setting.
    """
    start = time.perf_counter()
    step = setting.priced
    capture_seconds = time.perf_counter() - start
    limit = setting.hardware.memory_gb if memory_limit_gb is None else memory_limit_gb
    options = PlanningOptions(partition or PartitionOptions.from_environment(), limit)
    planner = _TimedPlanner(step.program, step.cost, options, step.cutter)
    wall, cpu = time.perf_counter(), time.process_time()
    with garbage_collection(on=False):
        # Planned first, so that its time includes the strategies that it needs.
        planner.plan("lancet")
        plans = planner.plans(strategies)
    # `auto` needs all other strategies.
    planner.seconds[AUTO], planner.cpu_seconds[AUTO] = time.perf_counter() - wall, time.process_time() - cpu
    timelines = {name: planner.timeline(plan) for name, plan in plans.items()}
    plans = {name: plan.reported(**step.figures(timelines[name])) for name, plan in plans.items()}
    return Simulated(
        setting,
        step.program,
        step.cost,
        plans,
        capture_seconds,
        timelines,
        planner.seconds,
        planner.cpu_seconds,
        planner.impossible,
    )


class _TimedPlanner(Planner):
    """A planner that records the time of each plan, including the plans that it needs."""

    def __init__(self, program: Program, cost: Cost, options: PlanningOptions, cut: GraphCutter) -> None:
        super().__init__(program, cost, options, cut)
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}

    def plan(self, strategy: str) -> Plan:
        wall, cpu = time.perf_counter(), time.process_time()
        plan = super().plan(strategy)
        self.seconds.setdefault(strategy, time.perf_counter() - wall)
        self.cpu_seconds.setdefault(strategy, time.process_time() - cpu)
        return plan
