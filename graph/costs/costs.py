"""The time of an instruction: measured if there is a measurement, otherwise estimated.

`CostModel` uses the first of these that applies: the instruction's own `milliseconds`, a part's share of the
measured whole, the communication model (for collectives), and the roofline, which is the slower of arithmetic
and memory traffic plus the fixed cost of a kernel. `MeasuredCosts` is for a step that was measured on this
machine; it needs no description of a cluster.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

from lancet_kernels.graph.costs.clusters import Cluster, CommunicationModel
from lancet_kernels.graph.costs.device_costs import DeviceCosts
from lancet_kernels.graph.program.program import Instruction, Kind, Program, TensorSpec

Tensors = Mapping[str, TensorSpec]
Cost = Callable[[Instruction, Tensors], float]
"""Milliseconds of one instruction, from the specs of its tensors."""


def roofline_ms(cluster: Cluster, dtype: str, flops: float, bytes: float) -> float:
    """max(arithmetic, memory) + launch. No work at all (a view) costs nothing.

    Example: 1 TFLOP of float16 on p4de (312 TFLOP/s at 0.5): 6.41 ms + 0.008 ms.
    """
    if flops <= 0 and bytes <= 0:
        return 0.0
    arithmetic = flops / (cluster.tflops(dtype) * 1e12)
    memory = bytes / (cluster.memory_gb_per_s * cluster.memory_efficiency * 1e9)
    return max(arithmetic, memory) * 1e3 + cluster.launch_us * 1e-3


@dataclass(frozen=True)
class CostModel:
    """Times on one cluster; call it as a `Cost`. A collective's group is its attribute `group` ("world")."""

    cluster: Cluster
    communication: CommunicationModel

    @classmethod
    def for_cluster(
        cls,
        cluster: Cluster,
        gpus: int,
        expert_ranks: int | None = None,
        shard_ranks: int | None = None,
    ) -> CostModel:
        """Roofline and calculated links for `gpus` ranks of a cluster.

        Args: expert_ranks: how many of them share one set of experts (default: all). shard_ranks: over how
            many parameters are sharded, if not over all.
        """
        communication = CommunicationModel.from_cluster(cluster, gpus, expert_ranks, shard_ranks)
        return cls(cluster, communication)

    def __call__(self, instruction: Instruction, tensors: Tensors) -> float:
        if instruction.milliseconds is not None:
            return instruction.milliseconds
        if "whole_milliseconds" in instruction.attributes:
            # The cost of an empty part: the latency of a message, or the launch of a kernel.
            fixed_ms = self.cluster.launch_us * 1e-3
            if instruction.kind.is_communication:
                fixed_ms = communication_ms(self.communication, replace(instruction, bytes=0.0))
            return part_of_measured(instruction, fixed_ms)
        if instruction.kind.is_communication:
            return communication_ms(self.communication, instruction)
        operands = [tensors[t].dtype for t in (*instruction.outputs, *instruction.inputs) if t in tensors]
        dtype = next((d for d in operands if "float" in d), "float32")
        return roofline_ms(self.cluster, dtype, instruction.flops, instruction.bytes)

    @property
    def source(self) -> str:
        """Where the costs come from, with a digest of all numbers that they are calculated from."""
        numbers = asdict(self.cluster), self.communication.to_json()
        digest = hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:12]
        return f"calculated for cluster {self.cluster.name} ({self.cluster.device}), digest {digest}"


@dataclass(frozen=True)
class MeasuredCosts:
    """Times of a step whose instructions were measured on the ranks that run it (`graph.costs.profiler`).

    What a plan adds, which is parts and their reassembly, has the costs of `device`. `source` says where the
    times were measured, without the times: these vary a little between runs, which does not invalidate a
    plan.
    """

    device: DeviceCosts
    communication: CommunicationModel
    where: str
    """Device, ranks, torch, link."""
    slowdown: float = 1.0
    """How many times as long computation takes in the step as it runs as op by op: colder caches, cores that
    communication takes, ranks that come late."""

    def __call__(self, instruction: Instruction, tensors: Tensors) -> float:
        if instruction.milliseconds is not None:
            return instruction.milliseconds
        if instruction.kind.is_communication:
            return communication_ms(self.communication, instruction)
        whole_ms = instruction.attributes.get("whole_milliseconds")
        if whole_ms is None:
            return self.slowdown * self.device.added_ms(instruction.op, instruction.bytes)
        part_ms = self.device.part_ms(instruction, tensors, whole_ms)
        return part_of_measured(instruction, self.device.launch_ms) if part_ms is None else part_ms

    def as_it_runs(self, program: Program) -> Program:
        """The Program whose ops were measured one by one, with the times they take in the step."""
        return replace(
            program,
            instructions=tuple(
                replace(i, milliseconds=self.slowdown * i.milliseconds)
                if i.kind is Kind.COMPUTE and i.milliseconds is not None
                else i
                for i in program.instructions
            ),
        )

    @property
    def source(self) -> str:
        """Where the costs come from."""
        return f"step measured on {self.where}; parts and joining them {self.device}"


def part_of_measured(instruction: Instruction, fixed_ms: float) -> float:
    """Time of one of k parts of a measured op: its fixed cost, and 1/k of the rest."""
    whole, parts = instruction.attributes["whole_milliseconds"], instruction.attributes["parts"]
    fixed = min(fixed_ms, whole)
    return fixed + (whole - fixed) / parts


def source_of(cost: Cost) -> str:
    """Where costs come from, as text. A saved plan is only reused with costs from the same source."""
    return getattr(cost, "source", "given by the caller")


def durations(program: Program, cost: Cost) -> list[float]:
    """Milliseconds of every instruction of a program, in its order."""
    return [cost(instruction, program.tensors) for instruction in program.instructions]


def communication_ms(model: CommunicationModel, instruction: Instruction) -> float:
    """The time of a communication by the points of its collective and group."""
    group = instruction.attributes.get("group", "world")
    return model.milliseconds(collective_of(instruction), instruction.bytes, group)


def collective_of(instruction: Instruction) -> str:
    """The collective's name in a communication model: its kind, or its attribute `collective`."""
    if instruction.kind is Kind.OTHER_COMMUNICATION:
        return instruction.attributes.get("collective", "all_to_all")
    return instruction.kind.value
