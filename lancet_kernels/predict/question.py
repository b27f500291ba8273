"""A question to the planner: model, cluster, layout and routing of a training step.

Routing is balanced, skewed, or counted in a run. All ranks of an expert group wait for each other in every
exchange, so the straggler, the rank with most rows in a layer, determines the time of its exchanges and
experts; the rank with most rows in all layers together determines memory. A capacity bounds the rows of an
expert, and so both.

Example: two ranks with two experts each, layers with 3 1 2 2 and 1 1 3 3 choices: ranks get 4 4 and 2 6 rows,
the busiest 1 and 1.5 times the mean. Times are those of 1.25 times the rows, memory that of 10 / 8 = 1.25.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lancet_kernels.errors import UserError, check_name
from lancet_kernels.graph.costs.clusters import Cluster, load_cluster
from lancet_kernels.graph.costs.costs import KernelCosts
from lancet_kernels.predict.config import check_experts, layers_and_experts, load_config

BALANCED = "balanced"
_EXPECTED = (
    "balanced, zipf:1.2 or the path of counts.json, with ,capacity:1.25 behind it for a capacity factor"
)


@dataclass(frozen=True)
class Load:
    """Rows of the busiest rank, relative to the mean of all ranks.

    time: of the busiest rank of each layer, the mean over layers. memory: of the busiest rank in all layers
    together. dropped: share of the choices that a capacity drops.
    """

    time: float = 1.0
    memory: float = 1.0
    dropped: float = 0.0


@dataclass(frozen=True)
class Routing:
    """counts: choices by layer and expert. capacity: the most rows of an expert, relative to an even share;
    None: dropless."""

    counts: tuple[tuple[float, ...], ...]
    capacity: float | None = None

    @classmethod
    def of(cls, spec: str, experts: int, layers: int) -> Routing:
        """From `balanced`, `zipf:S` (shares 1 / r**S of experts r in an order that is random in each layer)
        or the path of a file of `RoutingCounts`.

        Raises: UserError for another text, and for counts of another number of experts.
        """
        kind, _, capacity = spec.partition(",capacity:")
        if kind == BALANCED:
            counts: Sequence[Sequence[float]] = [[1.0] * experts]
        elif kind.startswith("zipf:"):
            counts = [_zipf(_number(kind[5:], spec), experts, layer) for layer in range(layers)]
        elif kind.endswith(".json"):
            counts = _read(kind, experts)
        else:
            raise _unreadable(spec)
        limit = _number(capacity, spec) if capacity else None
        if limit == 0:
            raise _unreadable(spec)
        return cls(tuple(map(tuple, counts)), limit)

    def load(self, ranks: int) -> Load:
        """The load of `ranks` ranks, each with an equal number of consecutive experts."""
        by_layer, chosen, kept = [], 0.0, 0.0
        for layer in self.counts:
            share = sum(layer) / len(layer)
            rows = layer if self.capacity is None else [min(n, self.capacity * share) for n in layer]
            each = len(layer) // ranks
            # Relative to a rank's even share, so that all layers have the same weight.
            by_layer.append([sum(rows[r * each : (r + 1) * each]) / (share * each) for r in range(ranks)])
            chosen, kept = chosen + len(layer), kept + sum(rows) / share
        together = map(sum, zip(*by_layer, strict=True))
        layers = len(by_layer)
        return Load(sum(map(max, by_layer)) / layers, max(together) / layers, 1 - kept / chosen)


def _zipf(exponent: float, experts: int, layer: int) -> list[float]:
    counts = [(1 + n) ** -exponent for n in range(experts)]
    random.Random(layer).shuffle(counts)
    return counts


def _read(path: str, experts: int) -> list[list[float]]:
    try:
        counts = json.loads(Path(path).read_text(encoding="utf-8"))["assigned"]
        layers = [[float(n) for n in layer] for layer in counts]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            "--routing",
            got=f"{path} ({error})",
            expected="a file that RoutingCounts wrote",
            do="write it anew",
        ) from error
    if not layers or any(len(layer) != experts for layer in layers):
        raise UserError(
            "--routing", got=f"{path} with {sorted({len(layer) for layer in layers})} experts in its layers",
            expected=f"counts of {experts} experts in each", do="count with this model",
        )  # fmt: skip
    if not all(min(layer) >= 0 and 0 < sum(layer) < math.inf for layer in layers):
        expected = "none below 0, and some above, in each layer"
        raise UserError("--routing", got=f"counts of {path}", expected=expected, do="write it anew")
    return layers


def _number(text: str, spec: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise _unreadable(spec) from None
    if not 0 <= number < float("inf"):
        raise _unreadable(spec)
    return number


def _unreadable(spec: str) -> UserError:
    return UserError("--routing", got=repr(spec), expected=_EXPECTED, do="correct it")


RECOMPUTE = ("none", "full", "selective", "attention", "experts", "alternate")
SHARDING = ("none", "optimizer", "full")
CP_COMM_TYPES = ("all_gather", "a2a")
"""Communication of context parallelism (`attention`), by Megatron's names."""
STATE_BYTES = {"float32": (4, 12), "bfloat16": (2, 8)}
"""By dtype of gradients and of Adam's two moments: bytes of a gradient, and of Adam's states with a float32
copy of the weight."""


@dataclass(frozen=True)
class Question:
    """A training step of a model on a cluster.

    hf: path of a `config.json`. expert_ranks: ranks that share one set of experts; consecutive ranks.
    sharding: "none" replicates parameters that all ranks have, "optimizer" shards the optimizer's states over
    the ranks that hold the same parameters, "full" parameters and gradients, too (FSDP). sequence: tokens;
    microbatch: sequences per GPU; accumulate: microbatches per step. recompute: "selective" is attention.
    tensor_ranks: consecutive ranks that share the sequences of a microbatch, and slice all parameters but
    experts. context_ranks: how many such groups share sequences, each with a part of their tokens;
    cp_comm_type: one of `CP_COMM_TYPES`. states: dtype of gradients and of Adam's moments, one of
    `STATE_BYTES`. attention: a kernel of the cluster file. routing: as of `Routing.of`. eager: element-wise
    ops run one by one, as without torch.compile.
    """

    hf: str
    cluster: str
    gpus: int
    expert_ranks: int = 1
    sharding: str = "optimizer"
    sequence: int = 4096
    microbatch: int = 1
    accumulate: int = 1
    recompute: str = "none"
    dispatch: str = "all-to-all"
    tensor_ranks: int = 1
    states: str = "float32"
    attention: str = ""
    routing: str = BALANCED
    eager: bool = False
    context_ranks: int = 1
    cp_comm_type: str = "all_gather"

    def __post_init__(self) -> None:
        check_name("--cp-comm-type", self.cp_comm_type, CP_COMM_TYPES)
        check_name("--recompute", self.recompute, RECOMPUTE)
        check_name("sharding", self.sharding, SHARDING)
        check_name("--states", self.states, STATE_BYTES)
        for option, ranks in (
            ("--experts-over", self.expert_ranks),
            ("--tensor", self.tensor_ranks),
            ("--tensor times --context", self.token_ranks),
        ):
            if self.gpus % ranks:
                raise UserError(
                    option, got=f"{ranks} of {self.gpus} GPUs",
                    expected="a divisor of the number of GPUs", do="choose another number of ranks",
                )  # fmt: skip
        if self.sequence % self.token_ranks:
            raise UserError(
                "--tensor times --context", got=f"{self.token_ranks} ranks for {self.sequence} tokens",
                expected="a divisor of the tokens of a sequence", do="choose another number of ranks",
            )  # fmt: skip

    @property
    def token_ranks(self) -> int:
        """Ranks that share the tokens of a sequence."""
        return self.tensor_ranks * self.context_ranks

    @cached_property
    def config(self) -> Any:
        """The model's configuration; captures change copies of it."""
        return load_config(self.hf)

    @cached_property
    def hardware(self) -> Cluster:
        return load_cluster(self.cluster)

    @property
    def cost(self) -> KernelCosts:
        """Times on the cluster. Raises: UserError for GPUs that are not whole nodes, or experts that do not
        fill nodes."""
        node = self.hardware.gpus_per_node
        if self.expert_ranks > node and self.expert_ranks % node:
            raise UserError(
                "--experts-over", got=self.expert_ranks, expected=f"up to {node}, or a multiple of it",
                do="use whole nodes",
            )  # fmt: skip
        config = self.config
        parts = config, getattr(config, "ffn_config", None)  # DBRX
        names = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts")
        per_token = next((k for part in parts for name in names if (k := getattr(part, name, None))), 1)
        costs = KernelCosts(
            self.hardware,
            self.gpus,
            self.expert_ranks,
            self.dispatch,
            top_k=max(per_token) if isinstance(per_token, list) else int(per_token),  # Hunyuan: by layer
            groups=int(getattr(config, "n_group", 0) or 0),
            top_groups=int(getattr(config, "topk_group", 0) or 0),
            tensor_ranks=self.tensor_ranks,
            context_ranks=self.context_ranks,
            attention=self.attention,
            busiest=self.load.time,
        )
        _ = costs.communication  # raises for GPUs that are neither a part of a node nor whole nodes
        return costs

    @cached_property
    def load(self) -> Load:
        """The load of the busiest rank. Raises: UserError for a routing that cannot be read."""
        if not self.experts:
            return Load()
        check_experts(self.experts, self.expert_ranks)
        layers = self.config.num_hidden_layers
        return Routing.of(self.routing, self.experts, layers).load(self.expert_ranks)

    @property
    def policy(self) -> str:
        """One of `recomputation.POLICIES`."""
        return "attention" if self.recompute == "selective" else self.recompute

    @property
    def tokens(self) -> int:
        """Tokens per GPU and step."""
        return self.sequence * self.microbatch * self.accumulate // self.token_ranks

    @property
    def experts(self) -> int:
        """Experts in all; 0: a dense model. Raises: UserError as `layers_and_experts`."""
        return layers_and_experts(self.hf)[1]

    @property
    def possible_expert_ranks(self) -> list[int]:
        """Numbers of ranks that can share the experts, ascending: divisors of both that fill nodes."""
        node = self.hardware.gpus_per_node
        divisors = [w for w in range(1, self.gpus + 1) if not self.gpus % w and not (self.experts or 1) % w]
        return [w for w in divisors if w <= node or w % node == 0]

    def replicas(self, is_expert: bool) -> int:
        """The number of ranks that hold the same parameters."""
        return self.gpus // (self.expert_ranks if is_expert else self.tensor_ranks)

    def describe(self) -> str:
        """One line for headings."""
        layout = {"none": "replicated", "optimizer": "optimizer sharded", "full": "FSDP"}[self.sharding]
        experts = f", experts over {self.expert_ranks}, {self.dispatch}" if self.experts else ""
        experts += f", routing {self.routing}" if self.routing != BALANCED else ""
        experts += f", tensors over {self.tensor_ranks}" if self.tensor_ranks > 1 else ""
        if self.context_ranks > 1:
            experts += f", contexts over {self.context_ranks} ({self.cp_comm_type})"
        experts += ", eager" if self.eager else ""
        return (
            f"{self.config.model_type}, {self.gpus} GPUs of {self.hardware.name}{experts}, {layout}, "
            f"{self.microbatch} x {self.sequence} tokens x {self.accumulate}, recompute {self.recompute}"
        )

    def facts(self) -> dict[str, object]:
        return {
            "model": self.config.model_type,
            "cluster": self.hardware.name,
            "gpus": self.gpus,
            "experts_over": self.expert_ranks,
            "tensor_parallel": self.tensor_ranks,
            "context_parallel": self.context_ranks,
            "cp_comm_type": self.cp_comm_type,
            "sharding": self.sharding,
            "states": self.states,
            "sequence": self.sequence,
            "microbatch": self.microbatch,
            "accumulate": self.accumulate,
            "global_batch": self.microbatch * self.accumulate * self.gpus // self.token_ranks,
            "recompute": self.recompute,
            "dispatch": self.dispatch,
            "routing": self.routing,
            "busiest_rank": self.load.time,
            "dropped": self.load.dropped,
            "attention": self.attention or "any",
            "eager": self.eager,
        }


def gib(size: float) -> float:
    """Bytes in GiB."""
    return size / math.pow(2, 30)
