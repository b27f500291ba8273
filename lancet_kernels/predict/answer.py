"""The answer to a question: step time, memory and exposed communication of each strategy.

The step is the one that `optimize` would plan on these ranks, with costs of the cluster. A model with
repeated layers is captured at two depths that differ by one period; their difference is the time and memory
of every further period. All microbatches take equally long, but for the last one, which sums gradients.
Computation beside exchanges is slowed down, because the dispatcher takes some of the multiprocessors.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TypeVar

from lancet_kernels.errors import UserError, check_name
from lancet_kernels.graph.costs.costs import (
    ATTENTION_OPS,
    LAUNCHES,
    RECURRENCE_OPS,
    KernelCosts,
    collective_of,
    durations,
)
from lancet_kernels.graph.program import Instruction, Kind, Phase, Program
from lancet_kernels.predict.config import Depths, depths, layers_and_experts
from lancet_kernels.predict.microbatch import (
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    Microbatch,
    waits_for_sizes,
    with_sums_waited_for,
)
from lancet_kernels.predict.model_step import model_step
from lancet_kernels.predict.question import BALANCED, Question, gib
from lancet_kernels.schedules import MICROBATCHES, STRATEGY_NAMES
from lancet_kernels.schedules.order.best_order import OrderSearch
from lancet_kernels.schedules.order.graph_trainer import order_by_layers
from lancet_kernels.schedules.order.megatron import paired_order, with_delayed_weight_gradients
from lancet_kernels.schedules.order.ordering import issue_early
from lancet_kernels.schedules.plan import Plan
from lancet_kernels.schedules.strategies import AUTO, DUPLEX, Planner
from lancet_kernels.schedules.time.peak_memory import Storages, alive_bytes
from lancet_kernels.schedules.time.simulate import (
    Event,
    Host,
    Timeline,
    Times,
    lower_bound_ms,
    run,
)

PLANNED = tuple(name for name in STRATEGY_NAMES if name != AUTO)
"""Strategies of one microbatch, by `schedules.Planner`."""
NEVER_SLOWER = ("lancet-dw", "lancet-partition", "lancet")
"""Strategies that fall back to the order of `none`."""
MEGATRON, MEGATRON_DELAYED = "megatron", "megatron-dw"
PAIRED = (MICROBATCHES, MEGATRON, MEGATRON_DELAYED)
"""Strategies of pairs of microbatches: the best order (`order.best_order`); Megatron's fixed one
(`order.megatron`), without and with delayed weight gradients."""
GRAPH_TRAINER = "graph-trainer"
"""torchtitan's order of two halves of each microbatch (`order.graph_trainer`)."""
BASELINES = (MEGATRON, MEGATRON_DELAYED, GRAPH_TRAINER)
"""Orders of other systems, which `optimize` does not run."""
STRATEGIES = (*PLANNED, *PAIRED, GRAPH_TRAINER)
PRODUCTS, ATTENTION, ELEMENTWISE, HOST = "products", "attention", "element-wise", "host"
"""Terms of a step, beside the optimizer and exposed collectives. Recurrent layers count as attention."""
MEMORY_KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, "activations", "communication")

ASSUMED = (
    "tokens are spread evenly over the experts, and all ranks are alike",
    "times are calculated from the cluster file, which has the source of each number: matrix products from "
    "their FLOPs and tiles, element-wise ops as fused passes over memory, messages from bandwidths that were "
    "measured for the dispatcher",
    "the host launches op by op, one kernel after the other, and waits in each forward for the sizes of what "
    "its rank receives; host_ms is the time in which the GPU has nothing to do because of that",
    "exchanges take longer beside computation, and computation beside exchanges has fewer multiprocessors",
    "FLOPs are those of matrix products, causal attention (half of the square) and recurrent layers, forward "
    "and backward, without recomputation",
    "bfloat16 weights, float32 sums of gradients, Adam with a float32 copy and two moments",
    "routing weights are applied inside the experts, so that the rows that come back are not kept",
    "strategies are planned by the planner of optimize(), on the graph that it would run; each microbatch "
    "takes as long, and the last one sums gradients; of many layers alike, few are captured, at two depths",
    "none: nothing overlaps an all-to-all; gathers and sums of parameters do overlap",
    "microbatches: the backward of a microbatch and the forward of the next, in the best order",
    "megatron: such pairs in Megatron's fixed order, each message waiting for its own inputs only; "
    "megatron-dw: with delayed weight gradients",
    "graph-trainer: two halves of each microbatch, layer by layer in torchtitan's order",
    "the CUDA context, NCCL's buffers and fragmentation are not part of the memory",
)


@dataclass(frozen=True)
class Simulated:
    """A strategy's step. The figures are those of all layers and microbatches; program, times and ms are of
    one microbatch, or of a pair, with the captured layers only."""

    program: Program
    ms: Sequence[float]
    times: Times
    step_ms: float
    busy_ms: Mapping[str, float]
    """Computation by kind: products, attention, element-wise, optimizer."""
    exposed_ms: Mapping[str, float]
    lower_bound_ms: float
    memory: Mapping[str, float]
    """GiB by kind, at the peak."""
    step_ms_with: Callable[[Mapping[str, float]], float] = field(repr=False)
    """The time of the step in the same order, with terms scaled by these factors."""

    @property
    def peak_memory_gib(self) -> float:
        return sum(self.memory.values())

    @property
    def compute_ms(self) -> float:
        return sum(self.busy_ms.values())

    @property
    def terms_ms(self) -> dict[str, float]:
        """The parts of the step's time; exposed communication by collective."""
        return {**self.busy_ms, **self.exposed_ms, HOST: self.host_ms}

    @property
    def binds(self) -> str:
        """The largest term."""
        return max(self.terms_ms, key=self.terms_ms.__getitem__)

    @property
    def host_ms(self) -> float:
        """The time in which the GPU waits for the host, with no message in flight."""
        return max(0.0, self.step_ms - self.compute_ms - sum(self.exposed_ms.values()))

    @property
    def events(self) -> list[Event]:
        """One event per instruction of the captured microbatch."""
        return Timeline(self.program, self.times).events

    def combined(self, other: Simulated, of: Callable[[float, float], float], shown: Simulated) -> Simulated:
        """Each figure of time computed by `of` from those of both; the memory of the one that needs more.

        Args: shown: whose program and times the result has, for its timeline.
        """

        def each(own: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
            kinds = sorted(own.keys() | others.keys())
            return {kind: max(0.0, of(own.get(kind, 0.0), others.get(kind, 0.0))) for kind in kinds}

        return replace(
            shown,
            step_ms=of(self.step_ms, other.step_ms),
            busy_ms=each(self.busy_ms, other.busy_ms),
            exposed_ms=each(self.exposed_ms, other.exposed_ms),
            lower_bound_ms=of(self.lower_bound_ms, other.lower_bound_ms),
            memory=max(self, other, key=lambda one: one.peak_memory_gib).memory,
            step_ms_with=lambda factors: of(self.step_ms_with(factors), other.step_ms_with(factors)),
        )


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
    def assumed(self) -> tuple[str, ...]:
        """The assumptions of the figures, a line each."""
        config = self.question.config
        if not config.part_of:
            return ASSUMED
        return f"of {config.part_of} only its text model, {config.model_type}, is planned, on text", *ASSUMED

    @property
    def memory_limit_gib(self) -> float:
        return gib(self.question.hardware.memory_gb * 1e9)

    def fits(self, strategy: str) -> bool:
        """Whether its peak is within the memory of the GPU."""
        return self.strategies[strategy].peak_memory_gib <= self.memory_limit_gib

    @cached_property
    def best(self) -> str:
        """The fastest strategy that fits; if none does, the one that needs least. Orders of other systems
        count only if at most one strategy of `optimize` was asked for."""
        own = [name for name in self.strategies if name not in BASELINES]
        names = own if len(own) > 1 else [*self.strategies]
        fitting = [name for name in names if self.fits(name)]
        if fitting:
            return min(fitting, key=lambda name: self.strategies[name].step_ms)
        return min(names, key=lambda name: self.strategies[name].peak_memory_gib)

    def figures(self, strategy: str) -> dict[str, object]:
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
            "busy_ms": dict(one.busy_ms),
            "exposed_ms": dict(one.exposed_ms),
            "host_ms": one.host_ms,
            "binds": one.binds,
            "lower_bound_ms": one.lower_bound_ms,
        }

    def with_strategies(self, other: Answer) -> Answer:
        """Merged with the strategies of another answer to the same question."""
        return replace(
            self,
            strategies={**self.strategies, **other.strategies},
            impossible={**self.impossible, **other.impossible},
            seconds={what: s + other.seconds[what] for what, s in self.seconds.items()},
        )

    def to_json(self) -> dict[str, object]:
        named = {name: self.figures(name) for name in self.strategies}
        named[AUTO] = {**self.figures(self.best), "chosen": self.best}
        return {
            "simulated": True,
            **self.question.facts(),
            "memory_limit_gib": self.memory_limit_gib,
            "strategies": named,
            "impossible": dict(self.impossible),
            "assumed": list(self.assumed),
            "seconds": dict(self.seconds),
        }


def depths_of(hf: str) -> Depths:
    return depths(layers_and_experts(hf)[0])


_step = lru_cache(maxsize=8)(model_step)


def answer(question: Question, strategies: Sequence[str] = STRATEGIES) -> Answer:
    """Predict a question.

    Raises: UserError for unknown names, GPUs that are not whole nodes, experts that do not divide.
    """
    for name in strategies:
        check_name("strategy", name, STRATEGIES)
    start = time.perf_counter()
    _ = question.cost  # which may raise, before seconds of capturing
    captured = Captured.of(question)
    capture_s = time.perf_counter() - start
    result: dict[str, Simulated] = {}
    impossible: dict[str, str] = {}
    for name in strategies:
        if name in PAIRED and question.accumulate == 1:
            impossible[name] = "one microbatch has nothing to run beside"
        elif name in (*DUPLEX, GRAPH_TRAINER) and (error := captured.planners[0].impossible.get("duplex")):
            impossible[name] = str(error)
        else:
            result[name] = captured.simulated(name)
    flops = captured.depths.at_full_depth(*(one.flops for one in captured.microbatches)) * question.accumulate
    plan_s = time.perf_counter() - start - capture_s
    return Answer(question, result, impossible, flops, {"capture": capture_s, "plan": plan_s})


Result = TypeVar("Result")


@dataclass(frozen=True)
class Captured:
    """A question's step at two depths, which are equal if all layers are captured.

    planners: for each, within the memory that the other layers leave.
    """

    depths: Depths
    microbatches: tuple[Microbatch, Microbatch]
    planners: tuple[Planner, Planner]

    @classmethod
    @lru_cache(maxsize=16)  # the search answers its ten best twice
    def of(cls, question: Question) -> Captured:
        """Raises: as `model_step`."""
        chosen = depths_of(question.hf)
        # A capture has no costs, and is shared by questions that differ only in these fields.
        unpriced = replace(
            question, cluster="", accumulate=1, dispatch="", states="float32", attention="", routing=BALANCED
        )
        fewer = more = Microbatch.of(question, _step(unpriced, chosen.fewer))
        if chosen.more > chosen.fewer:
            more = Microbatch.of(question, _step(unpriced, chosen.more))
        period_gb = (more.kept_bytes - fewer.kept_bytes) * 1e-9
        limit = question.hardware.memory_gb - chosen.extra * period_gb
        planner = more.planner(limit)
        shallow = planner if fewer is more else fewer.planner(limit - period_gb)
        return cls(chosen, (fewer, more), (shallow, planner))

    def simulated(self, strategy: str) -> Simulated:
        """A strategy with the figures of all layers."""
        fewer, more = self.at_depths(strategy)
        # Memory of a further layer: what it keeps at the end of the forward, in any order of the step.
        kept = [_memory(one.program, range(len(one.program)), one.last_forward) for one in self.microbatches]
        memory = {
            kind: size + self.depths.extra * (kept[1][kind] - kept[0][kind])
            for kind, size in more.memory.items()
        }
        return replace(fewer.combined(more, self.depths.at_full_depth, more), memory=memory)

    def at_depths(self, strategy: str) -> tuple[Simulated, Simulated]:
        if strategy in PAIRED:
            return self._at_both(lambda one, planner: _of_pairs(one, planner, strategy))
        if strategy == GRAPH_TRAINER:
            return self._at_both(
                lambda one, planner: _of_microbatches(one, _by_layers(one, planner.plan("duplex")))
            )
        # The planner's prediction lacks the slowdown beside messages, so all candidates are simulated.
        plans, deep_plans = self._at_both(
            lambda _, planner: {
                frozenset(cut.parts for cut in plan.ranges): plan
                for plan in reversed(planner.candidates(strategy))
            }
        )
        # The same cuts at both depths.
        pairs = [(plans[cuts], plan) for cuts, plan in deep_plans.items() if cuts in plans]
        pairs = pairs or [(next(iter(plans.values())), next(iter(deep_plans.values())))]
        if strategy in NEVER_SLOWER:
            # At full depth a small loss per layer may exceed the gain.
            pairs.append(self._at_both(lambda _, planner: planner.plan("none")))
        limit = self.planners[1].limit_gb

        def rank(pair: tuple[Simulated, Simulated]) -> tuple[bool, float]:
            fewer, more = pair
            exceeds = more.peak_memory_gib * 2**30 > limit * 1e9
            return exceeds, self.depths.at_full_depth(fewer.step_ms, more.step_ms)

        def simulated(shallow: Plan, deep: Plan) -> tuple[Simulated, Simulated]:
            fewer, more = self.microbatches
            result = _of_microbatches(more, deep)
            return result if deep is shallow else _of_microbatches(fewer, shallow), result

        return min((simulated(*pair) for pair in pairs), key=rank)

    def _at_both(self, of: Callable[[Microbatch, Planner], Result]) -> tuple[Result, Result]:
        """The results of `of` for both depths; it is called once if they are equal."""
        (fewer, more), (shallow, deep) = self.microbatches, self.planners
        result = of(more, deep)
        return result if fewer is more else of(fewer, shallow), result


def _by_layers(one: Microbatch, plan: Plan) -> Plan:
    """The duplexed step in torchtitan's order."""
    program = one.cut(plan.ranges)
    order = issue_early(program, order_by_layers(program, one.layers))
    return replace(plan, order=tuple(program.instructions[i].name for i in order))


def _of_pairs(one: Microbatch, planner: Planner, strategy: str) -> Simulated:
    """All microbatches of a step at one depth, in pairs but for the first forward and the last backward; the
    latter sums gradients."""
    others = one.question.accumulate - 1
    last = _of_plan(one, planner.plan("none" if strategy == MEGATRON else "lancet-dw"), blocks=False)
    pair = _of_pair(one, strategy, planner.limit_gb)
    return last.combined(pair, lambda alone, p: alone + others * p, pair)


def _of_microbatches(one: Microbatch, plan: Plan) -> Simulated:
    """All microbatches of a step at one depth: the last one sums gradients, those before it do not."""
    others = one.question.accumulate - 1
    last = _of_plan(one, plan)
    if not others:
        return last
    before = _of_plan(one, plan, is_last=False)
    return last.combined(before, lambda a, b: a + others * b, last)


def _of_plan(one: Microbatch, plan: Plan, is_last: bool = True, blocks: bool = True) -> Simulated:
    """One microbatch in the order of a plan. Args: is_last: it sums gradients. blocks: the plan's blocking
    messages block computation."""
    program = one.cut(plan.ranges)
    ms = [
        t * (i.microbatches if is_last or i.microbatches == 1 else 0)
        for i, t in zip(program.instructions, durations(program, one.step.cost), strict=True)
    ]
    order = [program.index[name] for name in plan.order]
    return _run(one, program, ms, order, frozenset(plan.blocking if blocks else ()))


def _of_pair(one: Microbatch, strategy: str, limit_gb: float) -> Simulated:
    """The backward of one microbatch and the forward of the next."""
    pair = one.pair
    ms = durations(pair.program, one.step.cost)
    if strategy == MICROBATCHES:
        limit = limit_gb * 1e9
        order = OrderSearch(pair.program, one.step.cost).best(limit, search=True).order
    else:
        order = [0, *paired_order(pair.program, *pair.blocks)]
        if strategy == MEGATRON_DELAYED:
            order = with_delayed_weight_gradients(pair.program, ms, order, pair.weight_gradients)
    return _run(one, pair.program, ms, order)


def _run(
    one: Microbatch, program: Program, ms: Sequence[float], order: Sequence[int],
    blocking: frozenset[str] = frozenset(),
) -> Simulated:  # fmt: skip
    # `ms` has the share of each microbatch already.
    program = replace(program, instructions=tuple(replace(i, microbatches=1) for i in program.instructions))

    def step_ms_with(factors: Mapping[str, float]) -> float:
        changed = [t * factors.get(_term(i), 1) for i, t in zip(program.instructions, ms, strict=True)]
        return _timed(one, program, changed, order, blocking, factors.get(HOST, 1))[1].iteration_ms

    slowed, times = _timed(one, program, ms, order, blocking)
    exposed: dict[str, float] = {}
    for i, idle in times.exposed.items():
        kind = _term(program.instructions[i])
        exposed[kind] = exposed.get(kind, 0.0) + idle
    busy: dict[str, float] = {}
    for n in times.compute:
        what = _term(program.instructions[n])
        busy[what] = busy.get(what, 0.0) + slowed[n]
    memory = _memory(with_sums_waited_for(one.kernels.with_copies(program)), order)
    return Simulated(
        program, slowed, times, times.iteration_ms, busy, exposed, lower_bound_ms(program, ms), memory,
        step_ms_with,
    )  # fmt: skip


def _timed(
    one: Microbatch, program: Program, ms: Sequence[float], order: Sequence[int], blocking: frozenset[str],
    host_factor: float = 1.0,
) -> tuple[Sequence[float], Times]:  # fmt: skip
    """The simulated order, with exchanges and computation slowed down beside each other."""
    cost = one.question.cost
    host = host_of(program, cost, host_factor)
    sms = cost.carrier.sms / max(1, cost.kernels.multiprocessors - cost.carrier.sms)
    slowed, times = ms, run(program, ms, order, blocking=blocking, host=host)
    exchanges = program.positions(Kind.ALL_TO_ALL)
    if any(program.instructions[i].name not in blocking for i in exchanges):
        for _ in range(2):
            slowed = _slowed(ms, times, exchanges, sms, cost.kernels.message_beside - 1)
            times = run(program, slowed, order, blocking=blocking, host=host)
    return slowed, times


def _term(instruction: Instruction) -> str:
    """The term that an instruction's time belongs to."""
    if instruction.kind.is_communication:
        return collective_of(instruction)
    if instruction.phase is Phase.OPTIMIZER:
        return OPTIMIZER
    if instruction.op in (*ATTENTION_OPS, *RECURRENCE_OPS):
        return ATTENTION
    return PRODUCTS if instruction.flops else ELEMENTWISE


def host_of(program: Program, cost: KernelCosts, factor: float = 1.0) -> Host:
    """The host that launches kernel by kernel, also within fused groups, and waits in the forward for the
    sizes of received rows. Args: factor: of the time of a launch."""
    each = factor * cost.kernels.host_us * 1e-3
    launches = [
        each if i.flops or i.bytes or i.milliseconds or i.attributes.get(LAUNCHES) else 0.0
        for i in program.instructions
    ]
    waits = frozenset(n for n, i in enumerate(program.instructions) if waits_for_sizes(i))
    return Host(launches, waits)


def _slowed(
    ms: Sequence[float], times: Times, exchanges: Sequence[int], computation: float, message: float
) -> list[float]:
    """Durations with computation and exchanges longer by these fractions of their overlap with each other.
    The dispatcher's kernels cause both; gathers and sums cause none."""
    slowed = list(ms)
    for own, others, more in (
        (times.compute, exchanges, computation),
        (exchanges, times.compute, message),
    ):
        # Those on one stream or link do not overlap: both lists are in the same order.
        starts, ends = (sorted(at[i] for i in others) for at in (times.start, times.end))
        for i in own:
            start, end = times.start[i], times.end[i]
            both = range(bisect_right(ends, start), bisect_left(starts, end))
            beside = sum(min(end, ends[n]) - max(start, starts[n]) for n in both)
            if end > start:
                slowed[i] = ms[i] * (1 + more * min(1.0, beside / (end - start)))
    return slowed


def _memory(program: Program, order: Sequence[int], at: int | None = None) -> dict[str, float]:
    """GiB by kind at the peak, or at a position of the order. Communication: tensors that only messages read,
    and gathered parameters."""
    storages = Storages(program)
    profile = alive_bytes(storages, order)
    peak = max(range(len(profile)), key=profile.__getitem__) if at is None else at
    touches = storages.touches(order)
    last = {s: k for k, i in enumerate(order) for s in touches[i]}
    kinds = dict.fromkeys(MEMORY_KINDS, 0.0)
    for t in program.inputs:
        kinds[PARAMETERS if t in program.parameter_set else t if t in kinds else "activations"] += (
            program.tensors[t].bytes
        )
    for i in order[: peak + 1]:
        for s in storages.born[i]:
            if last.get(s, -1) >= peak or s in storages.permanent:
                is_buffer = _is_buffer(program, storages.owners[s])
                kinds["communication" if is_buffer else "activations"] += storages.bytes[s]
    return {kind: gib(size) for kind, size in kinds.items()}


def _is_buffer(program: Program, tensor: str) -> bool:
    producer = program.instructions[program.producer[tensor]]
    if producer.kind is Kind.OTHER_COMMUNICATION and collective_of(producer) != "all_to_all":
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
