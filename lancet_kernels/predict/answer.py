"""The answer to a question: step time, memory and exposed communication of each strategy.

Chains of two and of three microbatches are simulated at full depth; every further microbatch takes as long as
the third. Beside communication, computation has fewer multiprocessors: it is stretched by what the dispatcher
takes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from lancet_kernels.errors import UserError, check_name
from lancet_kernels.graph.costs.costs import collective_of, durations
from lancet_kernels.graph.costs.kernel_costs import KernelCosts
from lancet_kernels.graph.program.program import Kind, Phase, Program, original_name
from lancet_kernels.predict.orders import PAIRED, PLANNED, Order, Orders
from lancet_kernels.predict.parts import (
    ModelParts,
    check_experts,
    load_config,
    model_parts,
    number_of_experts,
    on_other_ranks,
)
from lancet_kernels.predict.question import Question, gib
from lancet_kernels.predict.step import GRADIENTS, OPTIMIZER, PARAMETERS, ModelStep, chained, prepared
from lancet_kernels.schedules import STRATEGY_NAMES
from lancet_kernels.schedules.strategies import AUTO
from lancet_kernels.schedules.time.peak_memory import Storages, alive_bytes
from lancet_kernels.schedules.time.simulate import (
    Event,
    Host,
    Timeline,
    Times,
    exposed_intervals,
    lower_bound_ms,
    run,
)

STRATEGIES = (*PLANNED, *PAIRED)
CUTTING = tuple(name for name in STRATEGY_NAMES if name not in (*PLANNED, AUTO))
"""Strategies that cut ranges of a graph, which a chain of parts does not have."""
SIMULATED = 3
"""Microbatches in the longest chain that is simulated."""
MEMORY_KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, "activations", "communication")

ASSUMED = (
    "tokens are spread evenly over the experts, and all ranks are alike",
    "times are calculated from the cluster file, which has the source of each number: matrix products from "
    "their FLOPs and tiles, element-wise ops as fused passes over memory, messages from bandwidths that were "
    "measured for the dispatcher",
    "the host launches op by op, one kernel after the other, and waits in each forward for the sizes of what "
    "its rank receives; host_ms is the time in which the GPU has nothing to do because of that",
    "messages take longer beside computation, and computation beside messages has fewer multiprocessors",
    "FLOPs are those of matrix products and causal attention (half of the square), forward and backward, "
    "without recomputation",
    "bfloat16 weights, float32 sums of gradients, Adam with a float32 copy and two moments",
    "routing weights are applied inside the experts, so that the rows that come back are not kept",
    "none: nothing overlaps an all-to-all; gathers and sums of parameters do overlap",
    "lancet-dw: weight gradients and other ready work behind messages, one microbatch after the other",
    "microbatches: the backward of a microbatch and the forward of the next, in the best order",
    "megatron: such pairs in Megatron's fixed order, each message waiting for its own inputs only; "
    "megatron-dw: with delayed weight gradients",
    "the CUDA context, NCCL's buffers and fragmentation are not part of the memory",
)


@dataclass(frozen=True)
class Simulated:
    """A strategy on chains of microbatches; `step`, `order`, `times` and `ms` are of the longest."""

    step: ModelStep
    order: Order
    ms: Sequence[float]
    times: Times
    step_ms: float
    compute_ms: float
    exposed_ms: Mapping[str, float]
    lower_bound_ms: float
    memory: Mapping[str, float]
    """GiB by kind, at the peak."""

    @property
    def peak_memory_gib(self) -> float:
        return sum(self.memory.values())

    @property
    def host_ms(self) -> float:
        """The time in which the GPU waits for the host, and no message travels."""
        return self.step_ms - self.compute_ms - sum(self.exposed_ms.values())

    @property
    def events(self) -> list[Event]:
        """One event per instruction of the longest chain that was simulated."""
        return Timeline(self.step.program, self.times).events


@dataclass(frozen=True)
class Answer:
    """The strategies' predictions for a question."""

    question: Question
    strategies: Mapping[str, Simulated]
    impossible: Mapping[str, str]
    flops: float
    """The FLOPs of a step on one GPU."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time of capturing and of planning."""

    @property
    def memory_limit_gib(self) -> float:
        return gib(self.question.hardware.memory_gb * 1e9)

    def fits(self, strategy: str) -> bool:
        """Is its peak within the memory of the GPU?"""
        return self.strategies[strategy].peak_memory_gib <= self.memory_limit_gib

    @cached_property
    def best(self) -> str:
        """The fastest strategy that fits; if none does, the one that needs least."""
        fitting = [name for name in self.strategies if self.fits(name)]
        if fitting:
            return min(fitting, key=lambda name: self.strategies[name].step_ms)
        return min(self.strategies, key=lambda name: self.strategies[name].peak_memory_gib)

    def figures(self, strategy: str) -> dict[str, object]:
        """One strategy as JSON values."""
        one = self.strategies[strategy]
        seconds = one.step_ms * 1e-3
        return {
            "step_ms": one.step_ms,
            "tokens_per_s_per_gpu": self.question.tokens / seconds,
            "tflops_per_gpu": self.flops / seconds * 1e-12,
            "peak_memory_gib": one.peak_memory_gib,
            "memory_gib": dict(one.memory),
            "fits": self.fits(strategy),
            "compute_ms": one.compute_ms,
            "exposed_ms": dict(one.exposed_ms),
            "host_ms": one.host_ms,
            "lower_bound_ms": one.lower_bound_ms,
        }

    def to_json(self) -> dict[str, object]:
        """The whole answer as JSON values."""
        named = {name: self.figures(name) for name in self.strategies}
        named[AUTO] = {**self.figures(self.best), "chosen": self.best}
        return {
            "simulated": True,
            **self.question.facts(),
            "memory_limit_gib": self.memory_limit_gib,
            "strategies": named,
            "impossible": dict(self.impossible),
            "assumed": list(ASSUMED),
            "seconds": dict(self.seconds),
        }


@lru_cache(maxsize=16)
def _captured(hf: str, batch: int, sequence: int) -> tuple[ModelParts, int]:
    """The parts with experts over the smallest number of ranks that shares them, and that number."""
    config = load_config(hf)  # one of its own: capturing shortens it
    experts = number_of_experts(config)
    ranks = next((n for n in range(2, experts + 1) if experts % n == 0), 1)
    return model_parts(config, ranks, batch, sequence), ranks


@lru_cache(maxsize=256)
def _prepared(hf: str, expert_ranks: int, batch: int, sequence: int, policy: str) -> ModelParts:
    parts, ranks = _captured(hf, batch, sequence)
    check_experts(parts.experts, expert_ranks)
    return prepared(on_other_ranks(parts, ranks, expert_ranks), policy)


def parts_of(question: Question) -> ModelParts:
    """The captured parts of a question's model, with recomputation; the last few are kept."""
    return _prepared(
        str(question.hf), question.expert_ranks, question.microbatch, question.sequence, question.policy
    )


def answer(question: Question, strategies: Sequence[str] = STRATEGIES) -> Answer:
    """Predict a question.

    Raises: UserError for unknown names, GPUs that are not whole nodes, experts that do not divide.
    """
    for name in strategies:
        check_name("strategy", name, STRATEGIES)
    start = time.perf_counter()
    cost = question.cost
    parts = parts_of(question)
    captured = time.perf_counter()
    lengths = sorted({min(question.accumulate, n) for n in (SIMULATED - 1, SIMULATED)})
    steps = {n: chained(parts, question, n) for n in lengths}
    ms = {n: durations(step.program, cost) for n, step in steps.items()}
    orders, result = Orders(parts, question), {}
    impossible = dict.fromkeys(CUTTING, "cutting needs the graph of a whole step; plan it with --module")
    for name in strategies:
        if name in PAIRED and question.accumulate == 1:
            impossible[name] = "one microbatch has nothing to run beside"
            continue
        order = {n: orders.of(name, step, ms[n]) for n, step in steps.items()}
        chains = {n: _simulated(step, ms[n], order[n], question) for n, step in steps.items()}
        result[name] = _extended(chains, question.accumulate)
    flops = sum(i.flops for i in steps[lengths[0]].program.instructions if original_name(i.name) is None)
    planned = time.perf_counter()
    return Answer(
        question, result, impossible, flops / lengths[0] * question.accumulate,
        {"capture": captured - start, "plan": planned - captured},
    )  # fmt: skip


def _simulated(step: ModelStep, ms: Sequence[float], order: Order, question: Question) -> Simulated:
    cost, host = question.cost, host_of(step.program, question.cost)
    taken = cost.carrier.sms / max(1, cost.kernels.multiprocessors - cost.carrier.sms)
    slowed, times = list(ms), run(step.program, ms, order.positions, blocking=order.blocking, host=host)
    if not order.blocking:
        for _ in range(2):
            slowed = _slowed(ms, times, taken, cost.kernels.message_beside - 1)
            times = run(step.program, slowed, order.positions, host=host)
    exposed: dict[str, float] = {}
    for i, idle in exposed_intervals(times).items():
        kind = collective_of(step.program.instructions[i])
        exposed[kind] = exposed.get(kind, 0.0) + idle
    return Simulated(
        step, order, slowed, times, times.iteration_ms, sum(slowed[i] for i in times.compute), exposed,
        lower_bound_ms(step.program, ms), _memory(step, order.positions),
    )  # fmt: skip


def host_of(program: Program, cost: KernelCosts) -> Host:
    """The host that launches each kernel on its own, those of fused groups, too, and waits in the forward for
    the sizes of what its rank receives."""
    each = cost.kernels.host_us * 1e-3
    launches = [
        each * len(i.attributes.get("ops", "1")) if i.flops or i.bytes else 0.0 for i in program.instructions
    ]
    waits = frozenset(
        n
        for n, i in enumerate(program.instructions)
        if i.kind is Kind.ALL_TO_ALL and i.phase is Phase.FORWARD and i.attributes.get("to_experts")
    )
    return Host(launches, waits)


def _slowed(ms: Sequence[float], times: Times, computation: float, message: float) -> list[float]:
    """Durations with computation, and messages, longer by these fractions of the time that they run beside
    one another."""
    slowed = list(ms)
    for own, others, more in (
        (times.compute, times.messages, computation),
        (times.messages, times.compute, message),
    ):
        busy = sorted((times.start[i], times.end[i]) for i in others)
        first = 0
        for i in sorted(own, key=times.start.__getitem__):
            start, end = times.start[i], times.end[i]
            while first < len(busy) and busy[first][1] <= start:
                first += 1
            beside, n = 0.0, first
            while n < len(busy) and busy[n][0] < end:
                beside += min(end, busy[n][1]) - max(start, busy[n][0])
                n += 1
            if end > start:
                slowed[i] = ms[i] * (1 + more * min(1.0, beside / (end - start)))
    return slowed


def _extended(chains: Mapping[int, Simulated], microbatches: int) -> Simulated:
    """The longest chain with the times of a step of so many microbatches."""
    longest = chains[max(chains)]
    if microbatches <= max(chains):
        return longest
    before, more = chains[max(chains) - 1], microbatches - max(chains)

    def grown(a: float, b: float) -> float:
        return b + more * (b - a)

    kinds = longest.exposed_ms
    return replace(
        longest,
        step_ms=grown(before.step_ms, longest.step_ms),
        compute_ms=grown(before.compute_ms, longest.compute_ms),
        exposed_ms={k: max(0.0, grown(before.exposed_ms.get(k, 0.0), kinds[k])) for k in kinds},
        lower_bound_ms=grown(before.lower_bound_ms, longest.lower_bound_ms),
    )


def _memory(step: ModelStep, order: Sequence[int]) -> dict[str, float]:
    """GiB by kind at the peak. Communication: what only messages read or write, and gathered parameters."""
    program, storages = step.program, Storages(step.program)
    profile = alive_bytes(storages, order)
    peak = max(range(len(profile)), key=profile.__getitem__)
    touches = storages.touches(order)
    last = {s: k for k, i in enumerate(order) for s in touches[i]}
    kinds = dict.fromkeys(MEMORY_KINDS, 0.0)
    for t in program.inputs:
        kinds[t.split(" ")[0]] += program.tensors[t].bytes
    for i in order[: peak + 1]:
        for s in storages.born[i]:
            if last.get(s, -1) >= peak:
                is_buffer = _is_buffer(program, storages.owners[s])
                kinds["communication" if is_buffer else "activations"] += storages.bytes[s]
    return {kind: gib(size) for kind, size in kinds.items()}


def _is_buffer(program: Program, tensor: str) -> bool:
    producer = program.instructions[program.producer[tensor]]
    if producer.kind is Kind.OTHER_COMMUNICATION:
        return True
    readers = [program.instructions[i] for i in program.consumers[tensor]]
    return bool(readers) and all(reader.kind.is_communication for reader in readers)


def check_fits(answer: Answer) -> None:
    """Raise UserError if no strategy fits into the memory of the GPU."""
    best = answer.best
    if not answer.fits(best):
        need = answer.strategies[best].peak_memory_gib
        raise UserError(
            "memory", got=f"{need:.1f} GiB per GPU with {best}",
            expected=f"at most {answer.memory_limit_gib:.1f} GiB of {answer.question.hardware.device}",
            do="shard more, recompute, or take more GPUs (--search tries)",
        )  # fmt: skip
