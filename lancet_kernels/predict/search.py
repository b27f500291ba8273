"""The best layouts of a step on a number of GPUs: experts and tensors over how many, what is sharded,
microbatch, recomputation and strategy, at the same number of tokens per step.

What time there is goes to layouts whose messages take least by a formula (`_messages_ms`), which captures
nothing. Captured ones are visited in the order of a lower bound, the time of computation or of the
all-to-alls, whichever is longer, summed over all microbatches, with the products and messages that are
computed again. Once this bound exceeds the tenth best step that fits, no later layout can be among the ten
best. What does not fit for its states is not even captured; what does not for what a forward without
recomputation keeps is not simulated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from lancet_kernels.errors import UserError
from lancet_kernels.graph.program.program import Instruction, Kind, Phase
from lancet_kernels.predict.answer import Answer, answer, depths_of, microbatches
from lancet_kernels.predict.config import load_config, meta_model, shortened
from lancet_kernels.predict.microbatch import Microbatch, Share
from lancet_kernels.predict.question import SHARDING, Question, gib
from lancet_kernels.predict.recomputation import RECOMPUTED_OPS, layer_of
from lancet_kernels.schedules.time.peak_memory import Storages
from lancet_kernels.transformers.convert import experts_of

BEST = 10
MOST_SIMULATED = 24
"""Layouts that are simulated at most, a few seconds each, unless none of them fits."""
MICROBATCHES = (1, 2, 4)
TENSOR_RANKS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Layout:
    """A layout with what became of it. strategy: None if not simulated, as infinite time and memory say.
    bound_ms: 0 if its states alone do not fit. binds: the largest term of its time. why: "" for the best,
    otherwise why it is not among them."""

    question: Question
    bound_ms: float = 0.0
    strategy: str | None = None
    step_ms: float = math.inf
    peak_memory_gib: float = math.inf
    binds: str = ""
    why: str = ""

    def to_json(self) -> dict[str, object]:
        """The layout as JSON values."""
        names = ("experts_over", "tensor_parallel", "sharding", "microbatch", "accumulate", "recompute")
        facts = self.question.facts()
        return {
            **{name: facts[name] for name in names},
            "strategy": self.strategy,
            "step_ms": self.step_ms if self.strategy else None,
            "peak_memory_gib": self.peak_memory_gib if self.strategy else None,
            "bound_ms": self.bound_ms,
            "binds": self.binds,
            "why_not": self.why,
        }


@dataclass(frozen=True)
class Found:
    """best: the layouts that fit, fastest first, at most ten. others: all others, with the reasons."""

    best: tuple[Layout, ...]
    others: tuple[Layout, ...]

    def to_json(self) -> dict[str, object]:
        """The search as JSON values."""
        return {
            "best": [one.to_json() for one in self.best],
            "others": [one.to_json() for one in self.others],
        }


def search(question: Question, seconds: float = math.inf) -> Found:
    """The best layouts for the question's model, GPUs and tokens.

    Args: seconds: when to stop; layouts that were not tried until then are among the others.
    Raises: UserError if no layout fits.
    """
    start = time.perf_counter()
    not_tried = f"not tried within {seconds:.0f} s"
    limit = gib(question.hardware.memory_gb * 1e9)
    possible: list[Layout] = []
    others: list[Layout] = []
    least = math.inf
    for one in sorted(layouts(question), key=_messages_ms):
        # Half of the time, so that something is simulated.
        if time.perf_counter() - start > seconds / 2:
            others.append(Layout(one, why=not_tried))
            continue
        # The states first: they need no capture.
        need = states_gib(one)
        try:
            need += kept_gib(one) if need <= limit else 0.0
            layout = _bounded(one) if need <= limit else Layout(one, why=f"needs at least {need:.0f} GiB")
        except UserError as error:  # a model that cannot be sliced
            if one.tensor_ranks == 1:
                raise
            layout = Layout(one, why=str(error))
        least = min(least, need)
        (others if layout.why else possible).append(layout)
    fitting: list[Layout] = []
    simulated = 0
    for layout in sorted(possible, key=lambda one: one.bound_ms):
        at_least = f"takes at least {layout.bound_ms:.0f} ms"
        if len(fitting) >= BEST and layout.bound_ms > fitting[BEST - 1].step_ms:
            others.append(replace(layout, why=at_least))
        elif time.perf_counter() - start > seconds:
            others.append(replace(layout, why=not_tried))
        elif simulated >= MOST_SIMULATED and fitting:
            others.append(replace(layout, why=f"not simulated; {at_least}"))
        else:
            simulated += 1
            result = _simulated(layout, answer(layout.question))
            (others if result.why else fitting).append(result)
            fitting.sort(key=lambda one: one.step_ms)
    if not fitting and any(one.why == not_tried for one in others):
        raise UserError(
            "--search-seconds", got=f"{seconds:g} without a layout that fits",
            expected=f"more time; the states and activations alone need {least:.0f} of {limit:.1f} GiB",
            do="give more seconds or more GPUs",
        )  # fmt: skip
    if not fitting:
        raise UserError(
            "layouts", got=f"more than {least:.0f} GiB per GPU in each", expected=f"at most {limit:.1f} GiB",
            do="take more GPUs, or shorter sequences",
        )  # fmt: skip
    slower = [replace(one, why=f"slower: {one.step_ms:.0f} ms") for one in fitting[BEST:]]
    return Found(tuple(fitting[:BEST]), (*slower, *others))


def layouts(question: Question) -> Iterator[Question]:
    """All layouts with the question's tokens per step."""
    policies = ("none", "attention", "experts", "full") if question.experts else ("none", "attention", "full")
    config = question.config
    heads, pairs = (getattr(config, f"num_{what}_heads", None) or 0 for what in ("attention", "key_value"))
    most = min(math.gcd(heads, pairs) or 1, question.hardware.gpus_per_node, question.gpus)
    for tensor_ranks in (n for n in TENSOR_RANKS if n <= most and not most % n):
        sequences = question.microbatch * question.accumulate * tensor_ranks // question.tensor_ranks
        chosen = product(question.possible_expert_ranks, SHARDING, MICROBATCHES, policies)
        for expert_ranks, sharding, microbatch, recompute in chosen:
            if not sequences % microbatch:
                yield replace(
                    question, expert_ranks=expert_ranks, sharding=sharding, microbatch=microbatch,
                    accumulate=sequences // microbatch, recompute=recompute, tensor_ranks=tensor_ranks,
                )  # fmt: skip


def _messages_ms(question: Question) -> float:
    """About how long the messages of a step take, and what full recomputation computes again."""
    config, cost = question.config, question.cost
    layers, rows = config.num_hidden_layers, question.microbatch * question.sequence // question.tensor_ranks
    token = 2 * config.hidden_size
    again = question.recompute == "full"
    ms = (4 + again) * cost.all_to_all_ms(rows * cost.top_k * token) * layers
    if question.tensor_ranks > 1:
        size = rows * question.tensor_ranks * token
        ms += (8 + again) * cost.communication.milliseconds("all_gather", size, "tensor") * layers
    of_experts, of_others = _numbers(question.hf)
    shares = ((of_experts / question.expert_ranks, "replica"), (of_others / question.tensor_ranks, "world"))
    for numbers, group in shares:
        if question.replicas(group == "replica") > 1:
            group = group if ("all_gather", group) in cost.communication.points else "world"
            once = cost.communication.milliseconds("all_gather", 2 * numbers / layers, group) * layers
            ms += once * (3 if question.sharding == "full" else 2 / question.accumulate)
    products = 2 * (of_experts * cost.top_k / max(1, question.experts) + of_others) * rows
    return (ms + again * products / (max(question.hardware.peak_tflops.values()) * 1e9)) * question.accumulate


def states_gib(question: Question) -> float:
    """Parameters, gradients and optimizer states of a rank."""
    of_experts, of_others = _numbers(question.hf)
    owned = (
        Share.of(question, of_experts / question.expert_ranks, True),
        Share.of(question, of_others / question.tensor_ranks, False),
    )
    return gib(sum(size for share in owned for size in share.resident_bytes.values()))


@lru_cache(maxsize=16)
def _numbers(hf: str) -> tuple[float, float]:
    """How many a model has in parameters of experts, and in all others."""
    chosen = depths_of(hf)
    found = []
    for layers in (chosen.fewer, chosen.more):
        model = meta_model(shortened(load_config(hf), layers))
        experts = {p for _, m in experts_of(model) for p in m.parameters()}
        inside = sum(p.numel() for p in experts)
        found.append((inside, sum(p.numel() for p in model.parameters()) - inside))
    of_experts, of_others = (chosen.at_full_depth(*both) for both in zip(*found, strict=True))
    return of_experts, of_others


def kept_gib(question: Question) -> float:
    """The least that activations take; 0 with recomputation, which decides it."""
    if question.policy != "none":
        return 0.0
    kept = (one.peak_bytes - Storages(one.program).resident_bytes for one in _plain(question))
    return gib(depths_of(question.hf).at_full_depth(*kept))


def _plain(question: Question) -> tuple[Microbatch, Microbatch]:
    """A microbatch of the same size without recomputation and sharding, which many layouts share."""
    return microbatches(replace(question, sharding="none", recompute="none", accumulate=1))


def _bounded(question: Question) -> Layout:
    """A layout with the lower bound of its step."""

    def busy(one: Microbatch, kind: Kind) -> float:
        instructions = [i for i in one.program.instructions if i.phase is not Phase.OPTIMIZER]
        instructions += computed_again(one, question.policy)
        return sum(one.step.cost(i, one.program.tensors) for i in instructions if i.kind is kind)

    bounds = (
        depths_of(question.hf).at_full_depth(*(busy(one, kind) for one in _plain(question)))
        for kind in (Kind.COMPUTE, Kind.ALL_TO_ALL)
    )
    return Layout(question, max(bounds) * question.accumulate)


def computed_again(one: Microbatch, policy: str) -> list[Instruction]:
    """Products, attention and messages to experts of a microbatch that a policy computes again, at least. Of
    whole layers those that other products of the same layer read, directly or not.

    Args: one: without recomputation.
    """
    ops = RECOMPUTED_OPS.get(policy, ())
    layers = {node.name: layer_of(node) for node in one.step.module.graph.nodes}
    read: dict[str, set[str]] = {}
    again = []
    for i in reversed(one.program.instructions):
        layer = layers.get(i.name, "")
        if i.phase is not Phase.FORWARD or not layer:
            continue
        of_layer = read.setdefault(layer, set())
        is_read = not of_layer.isdisjoint(i.outputs)
        works = bool(i.flops) or i.kind is Kind.ALL_TO_ALL
        if works and (i.op in ops or (policy == "full" and is_read)):
            again.append(i)
        if i.flops or is_read:
            of_layer.update(i.inputs)
    return again


def _simulated(layout: Layout, result: Answer) -> Layout:
    name = result.best
    one = result.strategies[name]
    why = "" if result.fits(name) else f"needs {one.peak_memory_gib:.0f} GiB"
    return replace(
        layout,
        strategy=name,
        step_ms=one.step_ms,
        peak_memory_gib=one.peak_memory_gib,
        binds=one.binds,
        why=why,
    )
