"""The best layouts of a step on a number of GPUs: ranks that share experts and tensors, sharding, microbatch,
recomputation and strategy, at the same number of tokens per step.

Formulas of the config give, without a capture, the least memory of a layout, a lower bound of its step, and
an estimate, the time of products and messages one after the other, by which layouts are ordered. A capture
takes seconds (Qwen3-235B: 10 s of one core, 2026-11-27), some strategies as long again. So in 0.7 of the time
layouts are compared by quick strategies; in the rest, the others are tried, best layout first. A layout whose
bound exceeds the tenth best step that fits is skipped.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from lancet_kernels.errors import UserError
from lancet_kernels.predict.answer import MEGATRON, MEGATRON_DELAYED, PLANNED, Answer, answer, depths_of
from lancet_kernels.predict.config import load_config, meta_model, shortened
from lancet_kernels.predict.microbatch import WEIGHT_BYTES, Share
from lancet_kernels.predict.question import SHARDING, Question, gib
from lancet_kernels.schedules import MICROBATCHES
from lancet_kernels.transformers.convert import experts_of

BEST = 10
SEQUENCES = (1, 2, 4)
TENSOR_RANKS = (1, 2, 4, 8)
QUICK_SHARE = 0.7
"""The share of the time in which layouts are compared."""
QUICK = ("none", MEGATRON, MEGATRON_DELAYED)
"""Strategies by which layouts are compared: fixed orders, a second or two for both depths."""
_NOT_TRIED = "not tried in the time given"
REST = (MICROBATCHES, *(name for name in PLANNED if name not in QUICK))


@dataclass(frozen=True)
class Layout:
    """A layout and its result. strategy: None if not simulated; time and memory are infinite then. bound_ms,
    least_gib: lower bounds. estimate_ms: its products and messages one after the other. binds: the largest
    term of its time. why: the reason why it is not among the best; "": it is."""

    question: Question
    bound_ms: float = 0.0
    least_gib: float = 0.0
    estimate_ms: float = 0.0
    strategy: str | None = None
    step_ms: float = math.inf
    peak_memory_gib: float = math.inf
    binds: str = ""
    why: str = ""

    def to_json(self) -> dict[str, object]:
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
class SearchResult:
    """best: the layouts that fit, fastest first, at most ten. others: all others, with reasons. answer: of
    the best one."""

    best: tuple[Layout, ...]
    others: tuple[Layout, ...]
    answer: Answer

    @property
    def memory_excludes(self) -> list[Layout]:
        """Layouts that do not fit and would be faster than the best by the estimate, the nearest first."""
        fit = {layout.question for layout in self.best}
        faster = (
            one
            for one in self.others
            if one.least_gib > self.answer.memory_limit_gib
            and one.estimate_ms < self.best[0].estimate_ms
            and one.question not in fit
        )
        return sorted(faster, key=lambda one: one.least_gib)

    def to_json(self) -> dict[str, object]:
        excluded = self.memory_excludes
        return {
            "best": [one.to_json() for one in self.best],
            "others": [one.to_json() for one in self.others],
            "faster_without_memory_limit": len(excluded),
            "misses_by_gib": excluded[0].least_gib - self.answer.memory_limit_gib if excluded else None,
        }


class _Clock:
    """`allows` another answer if time is left for one that takes as long as the longest so far."""

    def __init__(self, seconds: float) -> None:
        self.start, self.seconds, self.longest = time.perf_counter(), seconds, 0.0

    def allows(self, share: float = 1.0) -> bool:
        return time.perf_counter() - self.start + self.longest < self.seconds * share

    def timed(self, question: Question, strategies: tuple[str, ...]) -> Answer:
        begin = time.perf_counter()
        result = answer(question, strategies)
        self.longest = max(self.longest, time.perf_counter() - begin)
        return result


def search(question: Question, seconds: float = math.inf) -> SearchResult:
    """The best layouts for the question's model, GPUs and tokens.

    Args: seconds: when to stop; layouts that were not tried until then are among the others.
    Raises: UserError if no layout fits, with the missing memory.
    """
    clock, limit = _Clock(seconds), gib(question.hardware.memory_gb * 1e9)
    fitting: list[tuple[Layout, Answer]] = []
    others: list[Layout] = []
    for layout in sorted(map(_by_formula, layouts(question)), key=lambda one: one.estimate_ms):
        if layout.least_gib > limit:
            others.append(replace(layout, why=f"needs at least {layout.least_gib:.0f} GiB"))
        elif len(fitting) >= BEST and layout.bound_ms > fitting[BEST - 1][0].step_ms:
            others.append(replace(layout, why=f"takes at least {layout.bound_ms:.0f} ms"))
        elif not clock.allows(QUICK_SHARE if len(fitting) > 1 else 1.0):
            others.append(replace(layout, why=_NOT_TRIED))
        else:
            try:
                result = clock.timed(layout.question, QUICK)
            except UserError as error:  # a model that cannot be sliced, or sharded
                if layout.question.tensor_ranks == 1 and error.what == "--hf":
                    raise
                others.append(replace(layout, why=str(error)))
                continue
            layout = _simulated(layout, result)
            if layout.why:
                others.append(layout)
            else:
                fitting.append((layout, result))
                fitting.sort(key=lambda one: one[0].step_ms)
    if not fitting:
        raise _refusal(others, limit, seconds)
    for n, (layout, result) in enumerate(fitting[:BEST]):
        for name in REST:
            if clock.allows():
                result = result.with_strategies(clock.timed(layout.question, (name,)))
        fitting[n] = _simulated(layout, result), result
    fitting.sort(key=lambda one: one[0].step_ms)
    slower = [replace(one, why=f"slower: {one.step_ms:.0f} ms") for one, _ in fitting[BEST:]]
    return SearchResult(tuple(one for one, _ in fitting[:BEST]), (*slower, *others), fitting[0][1])


def _refusal(others: list[Layout], limit: float, seconds: float) -> UserError:
    """The error of a search without a layout that fits."""
    untried = [one for one in others if one.why == _NOT_TRIED]
    if untried:
        least = min(one.least_gib for one in untried)
        return UserError(
            "--search-seconds", got=f"{seconds:g} without a layout that fits",
            expected=f"more time: {len(untried)} layouts may fit ({least:.0f} of {limit:.1f} GiB)",
            do="give more seconds or more GPUs",
        )  # fmt: skip
    too_large = [one for one in others if one.why.startswith("needs")]
    if not too_large:
        why = others[0].why if others else "choose another --tensor"
        return UserError("layouts", got="none that is possible", expected="one", do=why)
    least = min(one.peak_memory_gib if one.strategy else one.least_gib for one in too_large)
    return UserError(
        "layouts", got=f"at least {least:.1f} GiB per GPU in each", expected=f"at most {limit:.1f} GiB",
        do=f"free {least - limit:.1f} GiB: take more GPUs, shorter sequences, or --states bfloat16",
    )  # fmt: skip


def layouts(question: Question) -> Iterator[Question]:
    """All layouts with the question's tokens per step."""
    policies = ("none", "attention", "experts", "full") if question.experts else ("none", "attention", "full")
    config = question.config
    heads, pairs = (getattr(config, f"num_{what}_heads", None) or 0 for what in ("attention", "key_value"))
    most = min(math.gcd(heads, pairs) or 1, question.hardware.gpus_per_node, question.gpus)
    among = math.gcd(question.gpus, question.sequence) // question.context_ranks
    for tensor_ranks in (n for n in TENSOR_RANKS if n <= most and not most % n and not among % n):
        sequences, rest = divmod(
            question.microbatch * question.accumulate * tensor_ranks, question.tensor_ranks
        )
        chosen = product(question.possible_expert_ranks, SHARDING, SEQUENCES, policies)
        for expert_ranks, sharding, microbatch, recompute in chosen:
            if not rest and not sequences % microbatch:
                yield replace(
                    question, expert_ranks=expert_ranks, sharding=sharding, microbatch=microbatch,
                    accumulate=sequences // microbatch, recompute=recompute, tensor_ranks=tensor_ranks,
                )  # fmt: skip


def _by_formula(question: Question) -> Layout:
    """A layout with its bounds and its estimate."""
    config, cost, size = question.config, question.cost, _size_of(question.hf)
    layers, full = config.num_hidden_layers, question.recompute == "full"
    rows = question.microbatch * question.sequence // question.token_ranks
    token = WEIGHT_BYTES * config.hidden_size
    share = cost.top_k / max(1, question.experts)
    # About half of the products are recomputed.
    passes = 3 + full / 2
    flops = passes * 2 * (size.experts * share + size.others - size.embedding) * rows
    products = flops / (max(question.hardware.peak_tflops.values()) * 1e9)
    exchanges = (4 + full) * cost.all_to_all_ms(rows * cost.top_k * token) * size.moe_layers
    others = 0.0
    if question.tensor_ranks > 1:
        gathered = rows * question.tensor_ranks * token
        others += (8 + full) * cost.communication.milliseconds("all_gather", gathered, "tensor") * layers
    shares = (
        (size.experts / question.expert_ranks, "replica"),
        (size.others / question.tensor_ranks, "world"),
    )
    for numbers, group in shares:
        if question.replicas(group == "replica") > 1:
            group = group if ("all_gather", group) in cost.communication.points else "world"
            once = (
                cost.communication.milliseconds("all_gather", WEIGHT_BYTES * numbers / layers, group) * layers
            )
            others += once * (3 if question.sharding == "full" else 2 / question.accumulate)
    return Layout(
        question,
        bound_ms=max(products, exchanges) * question.accumulate,
        least_gib=states_gib(question) + gib(_activation_bytes(question, rows, token)),
        estimate_ms=(products / cost.kernels.dense + exchanges + others) * question.accumulate,
    )


def _activation_bytes(question: Question, rows: float, token: float) -> float:
    """A lower bound of a microbatch's memory beside the states: inputs of layers and kept activations; the
    gradient of the logits, with FSDP also the head and its gradient, or the same for a layer's experts."""
    size, layers = _size_of(question.hf), question.config.num_hidden_layers
    kept = token * layers
    if question.recompute != "full":
        received = question.cost.top_k * token
        # The hidden width of an expert.
        hidden = size.experts / max(1, question.experts * size.moe_layers) / question.config.hidden_size / 3
        inside = question.cost.top_k * hidden * WEIGHT_BYTES * (question.recompute != "experts")
        kept += (received + inside) * size.moe_layers
    whole = 2 * WEIGHT_BYTES if question.sharding == "full" else 0
    head = WEIGHT_BYTES * rows * question.config.vocab_size + whole * size.embedding / question.tensor_ranks
    experts = whole * size.experts / max(1, size.moe_layers) / question.expert_ranks
    return rows * kept + max(head, experts)


def states_gib(question: Question) -> float:
    """Parameters, gradients and optimizer states of a rank."""
    size = _size_of(question.hf)
    owned = (
        Share.of(question, size.experts / question.expert_ranks, True),
        Share.of(question, size.others / question.tensor_ranks, False),
    )
    return gib(sum(bytes for share in owned for bytes in share.resident_bytes.values()))


@dataclass(frozen=True)
class _Size:
    """Numbers of elements in a model's experts, in all other parameters, and in its embedding; its MoE
    layers."""

    experts: float
    others: float
    embedding: float
    moe_layers: float


@lru_cache(maxsize=16)
def _size_of(hf: str) -> _Size:
    chosen = depths_of(hf)
    sizes = []
    for layers in (chosen.fewer, chosen.more):
        model = meta_model(shortened(load_config(hf), layers))
        blocks = [block for _, block in experts_of(model)]
        inside = sum(p.numel() for p in {p for block in blocks for p in block.parameters()})
        embedding = model.get_input_embeddings().weight.numel()
        sizes.append((inside, sum(p.numel() for p in model.parameters()) - inside, embedding, len(blocks)))
    return _Size(*(chosen.at_full_depth(*both) for both in zip(*sizes, strict=True)))


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
