"""Times of the kernels of a transformer on a cluster whose file has a table for them (`[kernels]`).

A matrix product takes its FLOPs over the peak times an efficiency that depends on its shape; a fused group of
element-wise ops one pass over what it reads and writes. Messages are priced by the dispatcher that carries
them, or as hierarchical collectives: within a node, then between nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from lancet_kernels.errors import UserError, check_name
from lancet_kernels.graph.costs.clusters import Cluster, Dispatcher, Kernels
from lancet_kernels.graph.costs.communication import CommunicationModel
from lancet_kernels.graph.costs.costs import communication_ms
from lancet_kernels.graph.ops import facts
from lancet_kernels.graph.program.program import Instruction, Kind, TensorSpec

SORTS = "sorts_operand"
"""Attribute of a product: the position of the operand that a dispatcher sorts by expert before it, or back
behind it."""
_PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.linear")
_ATTENTION = ("lancet_prediction.attention", "lancet_prediction.attention_backward")
LAUNCHES = "is_in_a_fused_kernel"
"""Attribute of an instruction that another one's fused kernel computes; op by op, it is a launch."""


@dataclass(frozen=True)
class KernelCosts:
    """Times on `gpus` GPUs of a cluster; call it as a `Cost`.

    expert_ranks: how many ranks share one set of experts. dispatcher: a name in the cluster file. top_k:
    experts per token. top_groups, groups: routing chooses experts in so many of so many groups of experts;
    0: no groups. tensor_ranks: how many share the tokens of a microbatch. attention: the kernel, a name in
    the cluster file; "": the file's one number for all. busiest: rows that the rank with most gets, relative
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

    def __call__(self, instruction: Instruction, tensors: Mapping[str, TensorSpec]) -> float:
        if instruction.milliseconds is not None:
            return instruction.milliseconds
        if instruction.kind is Kind.ALL_TO_ALL:
            return self.all_to_all_ms(instruction.bytes * self.busiest)
        if instruction.kind.is_communication:
            return communication_ms(self._communication, instruction)
        if not instruction.flops and not instruction.bytes:
            return 0.0
        return self._compute_ms(instruction, tensors) + self.kernels.kernel_us * 1e-3

    def check(self) -> None:
        """Raises: UserError for a number of GPUs that is not a part of a node or whole nodes."""
        assert self._communication

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
    def _communication(self) -> CommunicationModel:
        return CommunicationModel.from_cluster(
            self.cluster, self.gpus, self.expert_ranks, tensor_ranks=self.tensor_ranks
        )

    def _compute_ms(self, instruction: Instruction, tensors: Mapping[str, TensorSpec]) -> float:
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
        if instruction.op in _ATTENTION:
            efficiency = self._attention_efficiency(instruction, tensors)
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

    def _attention_efficiency(self, instruction: Instruction, tensors: Mapping[str, TensorSpec]) -> float:
        is_backward = instruction.op == _ATTENTION[1]
        if not self.attention:
            return self.kernels.attention_backward if is_backward else self.kernels.attention_forward
        query = tensors[instruction.inputs[1 if is_backward else 0]]  # the backward's gradient comes first
        *_, sequence, width = query.shape
        window = instruction.attributes["window"]
        return self.cluster.attention[self.attention].efficiency(width, sequence, window, is_backward)

    def _gemm_efficiency(self, instruction: Instruction, tensors: Mapping[str, TensorSpec]) -> float:
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
            return most * k.grouped_wgrad * contraction / (contraction + k.grouped_wgrad_half_rows)
        return most * k.grouped * m / (m + k.grouped_half_rows)

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
        """How many of so many equal places (ranks, nodes) a token goes to, on average.

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
    """Is it a part of the experts, whose work is that of the rows which a rank has received?"""
    return bool(facts(instruction.op).grouped_gemm) or instruction.op.startswith("lancet.expert_activation")


def _gemm(instruction: Instruction, tensors: Mapping[str, TensorSpec]) -> tuple[float, float, float, float]:
    """(groups, m, n, k) of a product [groups, m, k] x [groups, k, n]; rows per group are a mean."""
    *batch, m, n = tensors[instruction.outputs[0]].shape
    groups, rows = math.prod(batch), float(m)
    if facts(instruction.op).grouped_gemm == "rows":
        groups = tensors[instruction.inputs[2]].shape[0]
        rows = m / groups
    return groups, rows, n, instruction.flops / (2.0 * groups * rows * n)
