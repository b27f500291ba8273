"""One simulated setting of the HiDup paper: its model, its strategies, and the time of an iteration.

A setting is a model on a number of GPUs of a cluster. Its forward is captured for one device, on one of two
microbatches of the batch of all GPUs together; costs come from the cluster file and `links`.

Models are those of table 1: 8 layers of BERT-Base's size, every other feed-forward an MoE layer. The MoE
layer is GShard's in dense form: routing is a tensor [B, S, E, C], and dispatch and combine are products with
it. Experts are a dimension like any other, so all of it can be sharded. Capacity is per sequence, so
sequences do not depend on each other.

B  sequences      S  sequence length      M  model width      V  vocabulary
E  experts        C  most tokens of a sequence for one expert      H  width of an expert
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lancet_kernels.errors import check_name
from lancet_kernels.graph.capture.capture import capture
from lancet_kernels.graph.costs.clusters import POINT_BYTES, Cluster, CommunicationModel, load_cluster
from lancet_kernels.graph.costs.costs import CostModel
from lancet_kernels.graph.program import Program
from lancet_kernels.parallelization.one_device_model import forward_of
from lancet_kernels.predict.own_step import without_contents
from lancet_kernels.schedules.shard.sharding_baselines import baseline
from lancet_kernels.schedules.shard.sharding_search import search_sharding
from lancet_kernels.schedules.shard.sharding_strategy import COPIES, ShardingStrategy


@dataclass(frozen=True)
class HiDupConfig:
    """One model. `is_image`: patches in, one of `vocab` classes out; otherwise tokens in and out."""

    name: str
    top_k: int
    experts_per_gpu: int
    is_image: bool
    sequence: int
    vocab: int
    layers: int = 8
    width: int = 768
    heads: int = 12
    hidden: int = 3072
    experts: int = 1
    capacity_factor: float = 1.25
    patch: int = 4 * 4 * 3

    @property
    def capacity(self) -> int:
        return max(1, math.ceil(self.capacity_factor * self.top_k * self.sequence / self.experts))


HIDUP_MODELS = {
    config.name: config
    for config in (
        # 33278 words, in and out, and 8 layers of which 4 have experts: 89 M + 19 M per GPU (table 1).
        HiDupConfig("bert-sgmoe", 2, 1, False, 128, 33278),
        HiDupConfig("bert-switch", 1, 1, False, 128, 33278),
        # Cifar-10 in patches of 4 x 4.
        HiDupConfig("vit-sgmoe", 2, 2, True, 64, 10),
        HiDupConfig("vit-switch", 1, 2, True, 64, 10),
    )
}


def hidup_config(name: str, gpus: int = 1, layers: int | None = None) -> HiDupConfig:
    """The configuration for a number of GPUs: experts grow with them. Raises: UserError: unknown name."""
    check_name("model", name, HIDUP_MODELS)
    config = HIDUP_MODELS[name]
    return replace(config, experts=config.experts_per_gpu * gpus, layers=layers or config.layers)


class DenseMoE(nn.Module):
    """x[B, S, M] -> y[B, S, M]. Top-k gating with a softmax; tokens beyond a capacity are dropped."""

    def __init__(self, config: HiDupConfig) -> None:
        super().__init__()
        E, M, H = config.experts, config.width, config.hidden
        self.top_k, self.experts, self.capacity = config.top_k, E, config.capacity
        self.gate = nn.Parameter(torch.randn(M, E) * 0.02)
        self.up_EMH = nn.Parameter(torch.randn(E, M, H) * 0.02)
        self.down_EHM = nn.Parameter(torch.randn(E, H, M) * 0.02)

    def forward(self, x_BSM: Tensor) -> Tensor:
        combine_BSEC = self.route(torch.einsum("bsm,me->bse", x_BSM, self.gate))
        dispatch_BSEC = (combine_BSEC > 0).to(x_BSM.dtype)
        rows_EBCM = torch.einsum("bsec,bsm->ebcm", dispatch_BSEC, x_BSM)
        hidden_EBCH = functional.gelu(torch.einsum("ebcm,emh->ebch", rows_EBCM, self.up_EMH))
        rows_EBCM = torch.einsum("ebch,ehm->ebcm", hidden_EBCH, self.down_EHM)
        return torch.einsum("bsec,ebcm->bsm", combine_BSEC, rows_EBCM)

    def route(self, logits_BSE: Tensor) -> Tensor:
        """-> combine[B, S, E, C]: the gate's weight where a token has a slot, else zero."""
        score_BSE = logits_BSE.float().softmax(-1)
        expert_E = torch.arange(self.experts, device=score_BSE.device)
        slot_C = torch.arange(self.capacity, device=score_BSE.device)
        used_B1E: Tensor | float = 0.0
        left_BSE, combine_BSEC = score_BSE, None
        for _ in range(self.top_k):
            chosen_BSE = (left_BSE.argmax(-1, keepdim=True) == expert_E).to(score_BSE.dtype)
            slot_BSE = chosen_BSE.cumsum(1) - 1 + used_B1E
            used_B1E = used_B1E + chosen_BSE.sum(1, keepdim=True)
            weight_BSE = score_BSE * chosen_BSE
            placed_BSEC = weight_BSE.unsqueeze(-1) * (slot_BSE.unsqueeze(-1) == slot_C)
            combine_BSEC = placed_BSEC if combine_BSEC is None else combine_BSEC + placed_BSEC
            left_BSE = left_BSE * (1 - chosen_BSE)
        assert combine_BSEC is not None
        return combine_BSEC.to(logits_BSE.dtype)


class Layer(nn.Module):
    """Attention and a feed-forward (or MoE), each behind a norm and with a residual."""

    def __init__(self, config: HiDupConfig, has_experts: bool) -> None:
        super().__init__()
        M = config.width
        self.heads = config.heads
        self.norm_attention, self.norm_forward = nn.LayerNorm(M), nn.LayerNorm(M)
        self.query, self.key, self.value, self.output = (nn.Linear(M, M) for _ in range(4))
        self.feed_forward = (
            DenseMoE(config)
            if has_experts
            else nn.Sequential(nn.Linear(M, config.hidden), nn.GELU(), nn.Linear(config.hidden, M))
        )

    def forward(self, x_BSM: Tensor) -> Tensor:
        x_BSM = x_BSM + self.attention(self.norm_attention(x_BSM))
        return x_BSM + self.feed_forward(self.norm_forward(x_BSM))

    def attention(self, x_BSM: Tensor) -> Tensor:
        query, key, value = (
            project(x_BSM).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.output(mixed.transpose(1, 2).flatten(2))


class HiDupModel(nn.Module):
    """(tokens[B, S] or patches[B, S, P], targets) -> the mean loss; targets [B, S], of images [B]."""

    def __init__(self, config: HiDupConfig) -> None:
        super().__init__()
        M = config.width
        self.is_image = config.is_image
        self.embed = nn.Linear(config.patch, M) if config.is_image else nn.Embedding(config.vocab, M)
        self.position_SM = nn.Parameter(torch.randn(config.sequence, M) * 0.02)
        self.layers = nn.ModuleList(Layer(config, n % 2 == 1) for n in range(config.layers))
        self.norm = nn.LayerNorm(M)
        self.head = nn.Linear(M, config.vocab, bias=False)

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        x_BSM = self.embed(inputs) + self.position_SM
        for layer in self.layers:
            x_BSM = layer(x_BSM)
        x_BSM = self.norm(x_BSM)
        logits = self.head(x_BSM.mean(1) if self.is_image else x_BSM)
        return functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def example_batch(config: HiDupConfig, sequences: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of zeros, of the right shapes."""
    if config.is_image:
        inputs = torch.zeros(sequences, config.sequence, config.patch)
        return inputs, torch.zeros(sequences, dtype=torch.int64)
    tokens = torch.zeros(sequences, config.sequence, dtype=torch.int64)
    return tokens, tokens


SEQUENCES = 32
"""A GPU's batch, as in the code that the paper's authors published."""
INSIDE_GB_PER_S = {
    2: {"all_gather": 22.9, "all_reduce": 17.5, "reduce_scatter": 23.1, "all_to_all": 44.7},
    4: {"all_gather": 43.0, "all_reduce": 38.9, "reduce_scatter": 50.6, "all_to_all": 111.0},
    8: {"all_gather": 48.2, "all_reduce": 50.5, "reduce_scatter": 58.3, "all_to_all": 134.8},
}
"""10^9 bytes of the whole tensor a second among so many V100 with NVLink, measured by the paper's authors."""
REACHED_AT_100_GBIT = 0.70
"""Share of a 100 Gbit/s link that the authors' collectives reached (0.65 to 0.74); of slower links, all."""


@dataclass(frozen=True)
class HiDupSetting:
    """A model on GPUs that are spread evenly over machines. gbit_per_s: between machines (None: 9.71, the
    public cloud of section 6.1)."""

    model: str
    gpus: int
    machines: int = 1
    gbit_per_s: float | None = None
    layers: int | None = None

    @property
    def cluster(self) -> Cluster:
        cluster = load_cluster("hidup-v100")
        in_machine = self.gpus // self.machines
        if self.gbit_per_s is None:
            return replace(cluster, gpus_per_node=in_machine)
        return with_bandwidth(cluster, self.gbit_per_s, in_machine)

    @property
    def cost(self) -> CostModel:
        return CostModel(self.cluster, links(self.cluster, self.gpus))

    @property
    def program(self) -> Program:
        """The forward of one of two microbatches."""
        return captured(self.model, self.gpus, SEQUENCES * self.gpus // COPIES, self.layers)

    @property
    def whole_batch(self) -> Program:
        """The forward of the whole batch, as baselines run it."""
        return captured(self.model, self.gpus, SEQUENCES * self.gpus, self.layers)

    @cached_property
    def hidup(self) -> ShardingStrategy:
        return self._searched()

    @cached_property
    def published(self) -> ShardingStrategy:
        """The strategy if search and prediction count the backward without overlap."""
        return self._searched(name="hidup, searched as published", overlaps_backward=False)

    def _searched(self, **options: Any) -> ShardingStrategy:
        memory_gb = self.cluster.memory_gb
        return search_sharding(self.program, self.gpus, self.cost, memory_gb=memory_gb, **options)

    @cached_property
    def expert_parallel(self) -> ShardingStrategy:
        """GShard's, on the whole batch: experts on their ranks, all-to-alls around; else data parallel."""
        return baseline("expert parallel", self.whole_batch, self.gpus, self.cost)

    @cached_property
    def data_parallel(self) -> ShardingStrategy:
        """Every parameter whole on every rank, no collective but all-reduces of gradients; whole batch."""
        return baseline("data parallel", self.whole_batch, self.gpus, self.cost)

    @property
    def baselines(self) -> dict[str, WholeBatch]:
        """Iterations of baselines; data parallel only within one machine, as in the paper, and where it fits
        into memory."""
        times = {"expert parallel": WholeBatch.of(self.expert_parallel, overlaps_gradients=False)}
        fits = self.data_parallel.memory_bytes <= self.cluster.memory_gb * 1e9
        if fits and self.machines == 1:
            times["data parallel"] = WholeBatch.of(self.data_parallel, overlaps_gradients=True)
        return times

    def row(self) -> dict[str, object]:
        """A row of tables and charts, as JSON values."""
        baselines = {name: times.wall_ms for name, times in self.baselines.items()}
        parameters = self.hidup.parameters.values()
        return {
            "model": self.model,
            "gpus": self.gpus,
            "machines": self.machines,
            "gbit_per_s": self.gbit_per_s,
            "hidup_ms": self.hidup.predicted_ms,
            "baselines_ms": baselines,
            "speedup": min(baselines.values()) / self.hidup.predicted_ms,
            "overlapped": self.hidup.overlapped,
            "stages": len(self.hidup.stages),
            "sharded": sum(form.is_cut for form in parameters),
            "replicated": sum(not form.is_cut for form in parameters),
            "memory_gb": self.hidup.memory_bytes / 1e9,
        }


@dataclass(frozen=True)
class WholeBatch:
    """An iteration without a second microbatch, in milliseconds. hidden_ms: of the communication."""

    computation_ms: float
    communication_ms: float
    hidden_ms: float

    @classmethod
    def of(cls, strategy: ShardingStrategy, *, overlaps_gradients: bool) -> WholeBatch:
        """Computation and all-to-alls one after the other; all-reduces of gradients beside the backward, or
        after it. Baseline strategies gather no parameters."""
        messages = [c for stage in strategy.stages for c in stage.communication]
        # A stage counts half of a gradient's all-reduce, for one microbatch of two.
        gradients = COPIES * sum(c.backward_ms for c in messages if c.tensor in strategy.parameters)
        activations = sum(c.ms + c.backward_ms for c in messages if c.tensor not in strategy.parameters)
        computation = sum(stage.comp_ms + stage.comp_backward_ms for stage in strategy.stages)
        backward = sum(stage.comp_backward_ms for stage in strategy.stages)
        hidden = min(gradients, backward) if overlaps_gradients else 0.0
        return cls(computation, activations + gradients, hidden)

    @property
    def wall_ms(self) -> float:
        return self.computation_ms + self.communication_ms - self.hidden_ms


def links(cluster: Cluster, gpus: int) -> CommunicationModel:
    """Times of NCCL's collectives among `gpus` GPUs that fill the machines of a cluster one after another:
    formulas between machines, inside one the rates that the paper's authors measured and published.

    Sizes are those of the whole tensor. Between machines (NCCL 2.10, PyTorch 1.10):
      all-gather, reduce-scatter  one ring through all GPUs: (n-1)/n of the tensor leaves every machine
      all-reduce                  a ring, twice that; between two machines a tree: the tensor leaves once
      all-to-all                  the parts of all GPUs for other machines, through one card per machine
    So an all-reduce is faster than a reduce-scatter and an all-gather, as the paper says in section 6.10.
    """
    calculated = CommunicationModel.from_cluster(cluster, gpus)
    inside = INSIDE_GB_PER_S.get(min(gpus, cluster.gpus_per_node), {})
    machines = max(1, gpus // cluster.gpus_per_node)

    def milliseconds(name: str, size: float) -> float:
        if machines == 1:
            # The size of an all-to-all is that of a rank's slice.
            whole = gpus if name == "all_to_all" else 1
            return calculated.milliseconds(name, 0.0) + size / (inside[name] * 1e9 / whole) * 1e3
        leaving = size * (gpus - 1) / gpus
        if name == "all_reduce":
            leaving = min(2 * leaving, size) if machines == 2 else 2 * leaving
        outside_s = leaving / (cluster.inter_node_gb_per_s * cluster.link_efficiency * 1e9)
        # Inside the machines the same happens at once: the slower of the two counts.
        inside_s = size / (inside[name] * 1e9) if name in inside else 0.0
        latency = cluster.inter_node_latency_us * (2 if name == "all_reduce" else 1)
        return latency * 1e-3 + max(outside_s, inside_s) * 1e3

    names = ("all_gather", "reduce_scatter", "all_reduce") if machines > 1 else tuple(inside)
    points = {
        (name, "world"): tuple((float(b), milliseconds(name, float(b))) for b in POINT_BYTES)
        for name in names
    }
    return CommunicationModel({**calculated.points, **points})


def with_bandwidth(cluster: Cluster, gbit_per_s: float, gpus_per_machine: int) -> Cluster:
    """The cluster with another bandwidth between its machines."""
    reached = REACHED_AT_100_GBIT if gbit_per_s >= 100 else 1.0
    return replace(cluster, gpus_per_node=gpus_per_machine, inter_node_gb_per_s=gbit_per_s / 8 * reached)


@lru_cache(maxsize=16)
def captured(model: str, gpus: int, sequences: int, layers: int | None = None) -> Program:
    """The forward on `sequences` sequences of all GPUs together."""
    config = hidup_config(model, gpus, layers)
    with without_contents():
        module = HiDupModel(config)
        batch = example_batch(config, sequences)
    return forward_of(capture(module, batch), f"{model}, {gpus} GPUs, {sequences} sequences")
