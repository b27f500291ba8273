"""The time of an instruction: measured if there is a measurement, otherwise estimated.

`CostModel` uses the first of these that applies: the instruction's own `milliseconds`, a part's share of the
measured whole, the communication model (for collectives), and the roofline (`roofline_ms`). `MeasuredCosts`
is for a step that was measured on this machine; it needs no description of a cluster.

`KernelCosts` has times of the kernels of a transformer on a cluster whose file has a table `[kernels]`. A
matrix product takes its FLOPs over the peak times an efficiency that depends on its shape; a fused group of
element-wise ops one pass over what it reads and writes. Messages are priced by the dispatcher that carries
them, or as hierarchical collectives: within a node, then between nodes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from lancet_kernels.errors import UserError, check_name
from lancet_kernels.graph.costs.clusters import Cluster, CommunicationModel, Dispatcher, Kernels
from lancet_kernels.graph.costs.part_instruction import DeviceCosts
from lancet_kernels.graph.ops import facts
from lancet_kernels.graph.program import Instruction, Kind, Program, TensorSpec

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

    What a plan adds (parts and their reassembly) has the costs of `device`. `source` does not have the times:
    these vary a little between runs, which does not invalidate a plan.
    """

    device: DeviceCosts
    communication: CommunicationModel
    where: str
    """Device, ranks, torch, link."""
    slowdown: float = 1.0
    """Time of computation in the step over its time op by op: colder caches, cores that communication takes,
    stragglers."""

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


INSIDE_NODES = "inside nodes"
"""The link of messages that stay within nodes where others leave them."""


def on_links(program: Program, model: CommunicationModel) -> Program:
    """The Program in which messages inside nodes travel beside those between nodes: NVLink and network cards
    work at the same time, and each group of ranks has a stream of its own."""

    def is_inside(i: Instruction) -> bool:
        return (collective_of(i), i.attributes.get("group", "world")) in model.inside

    messages = {i.name: is_inside(i) for i in program.instructions if i.kind.is_communication}
    if all(messages.values()) or not any(messages.values()):
        return program
    instructions = (
        replace(i, attributes={**i.attributes, "link": INSIDE_NODES}) if messages.get(i.name) else i
        for i in program.instructions
    )
    return replace(program, instructions=tuple(instructions))


def collective_of(instruction: Instruction) -> str:
    """The collective's name in a communication model: its kind, or its attribute `collective`."""
    if instruction.kind is Kind.OTHER_COMMUNICATION:
        return instruction.attributes.get("collective", "all_to_all")
    return instruction.kind.value


SORTS = "sorts_operand"
"""Attribute of a product: the position of the operand that a dispatcher sorts by expert before it, or back
behind it."""
_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.linear")
ATTENTION_OPS = ("lancet_prediction.attention", "lancet_prediction.attention_backward")
RECURRENCE_OPS = ("lancet_prediction.recurrence", "lancet_prediction.recurrence_backward")
LAUNCHES = "is_in_a_fused_kernel"
"""Attribute of an instruction inside another one's fused kernel; op by op, it is a launch."""


@dataclass(frozen=True)
class KernelCosts:
    """Times on `gpus` GPUs of a cluster; call it as a `Cost`.

    expert_ranks: how many ranks share one set of experts. dispatcher: a name in the cluster file. top_k:
    experts per token. top_groups, groups: routing chooses experts in so many of so many groups of experts; 0:
    no groups. tensor_ranks, context_ranks: as of `CommunicationModel.from_cluster`. attention: the kernel, a
    name in the cluster file; "": the file's one number for all. busiest: rows of the busiest rank, relative
    to an even share: it sets the time of exchanges and experts.
    """

    cluster: Cluster
    gpus: int
    expert_ranks: int = 1
    dispatcher: str = "all-to-all"
    top_k: int = 1
    groups: int = 0
    top_groups: int = 0
    tensor_ranks: int = 1
    context_ranks: int = 1
    attention: str = ""
    busiest: float = 1.0

    def __post_init__(self) -> None:
        if self.cluster.kernels is None:
            raise UserError(
                f"cluster {self.cluster.name}", got="no table [kernels]", expected="efficiencies of kernels",
                do="use dgx-h100, or add the table",
            )  # fmt: skip
        has = f"{self.cluster.name} has these"
        check_name("dispatch", self.dispatcher, self.cluster.dispatchers, do=has)
        if self.attention:
            check_name("attention", self.attention, self.cluster.attention, do=has)

    def __call__(self, instruction: Instruction, tensors: Tensors) -> float:
        if instruction.milliseconds is not None:
            return instruction.milliseconds
        if instruction.kind is Kind.ALL_TO_ALL:
            return self.all_to_all_ms(instruction.bytes * self.busiest)
        if instruction.kind.is_communication:
            return communication_ms(self.communication, instruction)
        if not instruction.flops and not instruction.bytes:
            return 0.0
        return self._compute_ms(instruction, tensors) + self.kernels.kernel_us * 1e-3

    @property
    def source(self) -> str:
        """Where the costs come from."""
        return f"calculated for cluster {self.cluster.name} ({self.cluster.device}), {self.dispatcher}"

    @cached_property
    def carrier(self) -> Dispatcher:
        """The dispatcher."""
        return self.cluster.dispatchers[self.dispatcher]

    @cached_property
    def kernels(self) -> Kernels:
        """The efficiencies of the cluster."""
        assert self.cluster.kernels is not None
        return self.cluster.kernels

    @cached_property
    def communication(self) -> CommunicationModel:
        """Times of collectives."""
        return CommunicationModel.from_cluster(
            self.cluster,
            self.gpus,
            self.expert_ranks,
            tensor_ranks=self.tensor_ranks,
            context_ranks=self.context_ranks,
        )

    def _compute_ms(self, instruction: Instruction, tensors: Tensors) -> float:
        rows = self.busiest if works_on_received_rows(instruction) else 1.0
        k, gflop = self.kernels, rows * instruction.flops * 1e-9
        bandwidth = self.cluster.memory_gb_per_s * 1e6  # bytes per millisecond
        memory = rows * instruction.bytes / (bandwidth * self.cluster.memory_efficiency)
        if not instruction.flops:
            if facts(instruction.op).moves_rows:
                return self.carrier.send_passes * instruction.bytes / (bandwidth * k.permute)
            return memory
        # Half precision, whichever of the two is fast; TFLOP/s are GFLOP per millisecond.
        peak = max(self.cluster.peak_tflops.values())
        if instruction.op in ATTENTION_OPS:
            efficiency = self._attention_efficiency(instruction, tensors)
        elif instruction.op in RECURRENCE_OPS:
            efficiency = k.recurrence
        elif facts(instruction.op).grouped_gemm or instruction.op in _PRODUCTS:
            efficiency = self._gemm_efficiency(instruction, tensors)
        else:
            efficiency = k.dense
        sorting = 0.0
        if SORTS in instruction.attributes:
            operands = (*instruction.inputs, *instruction.outputs)
            sorted_bytes = rows * tensors[operands[instruction.attributes[SORTS]]].content_bytes
            sorting = self.carrier.receive_passes * 2 * sorted_bytes / (bandwidth * k.permute)
        return max(gflop / (peak * efficiency), memory) + sorting

    def _attention_efficiency(self, instruction: Instruction, tensors: Tensors) -> float:
        is_backward = instruction.op == ATTENTION_OPS[1]
        if not self.attention:
            return self.kernels.attention_backward if is_backward else self.kernels.attention_forward
        # The backward's gradient comes first. Queries may be a part of the sequence, keys are all of it.
        query, key = (tensors[t].shape for t in instruction.inputs[is_backward : is_backward + 2])
        window = instruction.attributes["window"]
        return self.cluster.attention[self.attention].efficiency(query[-1], key[-2], window, is_backward)

    def _gemm_efficiency(self, instruction: Instruction, tensors: Tensors) -> float:
        """Example: 4,096 x 512 outputs are 64 tiles of 128 x 256: 64 of 132 multiprocessors work."""
        k = self.kernels
        groups, m, n, contraction = _gemm(instruction, tensors)
        result = facts(instruction.op).grouped_gemm
        m *= self.busiest if result == "rows" else 1.0
        contraction *= self.busiest if result == "weight" else 1.0
        tiles = groups * math.ceil(m / k.tile_rows) * math.ceil(n / k.tile_columns)
        waves = math.ceil(tiles / k.multiprocessors)
        busy = groups * m * n / (k.tile_rows * k.tile_columns * waves * k.multiprocessors)
        most = busy * contraction / (contraction + k.k_overhead)
        if not result:
            return most * k.dense
        if result == "weight":
            rows = max(contraction, k.tile_rows)
            return most * k.grouped_wgrad * rows / (rows + k.grouped_wgrad_half_rows)
        # Rows of a tile that is not full take as long as a full one's, which `most` has counted.
        rows = math.ceil(m / k.tile_rows) * k.tile_rows
        return most * k.grouped * rows / (rows + k.grouped_half_rows)

    def all_to_all_ms(self, size: float) -> float:
        """A message of `size` bytes of rows on each rank, one row per chosen expert, spread evenly."""
        ranks, node = self.expert_ranks, self.cluster.gpus_per_node
        if ranks == 1:
            return 0.0
        carrier, local = self.carrier, min(ranks, node)
        overhead = carrier.overhead_us * 1e-3
        if carrier.sends == "rows":
            inside = size * (local - 1) / ranks / (carrier.inside_gb_per_s * 1e6)
            network = self.cluster.inter_node_gb_per_s * self.cluster.link_efficiency * 1e6
            outside = local * size * (ranks - local) / ranks / network
            peers = self.cluster.per_peer_us * (ranks - 1) * 1e-3
            return overhead + peers + max(inside, outside)
        token_bytes = size / self.top_k
        if ranks <= node:
            return overhead + token_bytes * self._visited(ranks) / (carrier.inside_gb_per_s * 1e6)
        return overhead + token_bytes * self._visited(ranks // node) / (carrier.between(ranks) * 1e6)

    def _visited(self, places: int) -> float:
        """How many of `places` (ranks, nodes) a token goes to, on average.

        Example: 8 choices over 2 nodes: 2 * (1 - 1/2**8) = 1.99.
        """
        choices = self.top_k
        if self.groups >= places > 1 and self.top_groups:
            # The experts of a place are whole groups: a token goes to those of its groups, all of them used.
            choices = self.top_groups
            if self.groups == places:
                return choices
        return places * (1 - (1 - 1 / places) ** choices)


def works_on_received_rows(instruction: Instruction) -> bool:
    """Is it a part of the experts, whose work grows with the rows that a rank receives?"""
    return bool(facts(instruction.op).grouped_gemm) or instruction.op.startswith("lancet.expert_activation")


def _gemm(instruction: Instruction, tensors: Tensors) -> tuple[float, float, float, float]:
    """(groups, m, n, k) of a product [groups, m, k] x [groups, k, n]; rows per group are a mean."""
    *batch, m, n = tensors[instruction.outputs[0]].shape
    groups, rows = math.prod(batch), float(m)
    if facts(instruction.op).grouped_gemm == "rows":
        groups = tensors[instruction.inputs[2]].shape[0]
        rows = m / groups
    return groups, rows, n, instruction.flops / (2.0 * groups * rows * n)
