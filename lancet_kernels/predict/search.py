"""The best layouts of a step on a number of GPUs: experts over how many, what is sharded, microbatch,
recomputation and strategy, at the same number of tokens per step.

Layouts are visited in the order of a lower bound, the time of computation or of the link, whichever is
longer, summed over all microbatches. Once this bound exceeds the tenth best step that fits, no later layout
can be among the ten best. What does not fit for its states and what the forward keeps is not simulated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lancet_kernels.errors import UserError
from lancet_kernels.graph.program.program import Kind, Program
from lancet_kernels.predict.answer import Answer, answer, parts_of
from lancet_kernels.predict.question import SHARDING, Question, gib
from lancet_kernels.predict.saved import POLICIES
from lancet_kernels.predict.step import chained, kept_tensors, shares
from lancet_kernels.schedules.time.peak_memory import Storages, peak_memory

BEST = 10
MOST_SIMULATED = 24
"""Layouts that are simulated at most, a few seconds each, unless none of them fits."""
MICROBATCHES = (1, 2, 4)


@dataclass(frozen=True)
class Layout:
    """A layout with what became of it. strategy: None if not simulated, as infinite time and memory say.
    bound_ms: 0 if its states alone do not fit. why: "" for the best, otherwise why it is not among them."""

    question: Question
    bound_ms: float = 0.0
    strategy: str | None = None
    step_ms: float = math.inf
    peak_memory_gib: float = math.inf
    why: str = ""

    def to_json(self) -> dict[str, object]:
        """The layout as JSON values."""
        names = ("experts_over", "sharding", "microbatch", "accumulate", "recompute")
        facts = self.question.facts()
        return {
            **{name: facts[name] for name in names},
            "strategy": self.strategy,
            "step_ms": self.step_ms if self.strategy else None,
            "peak_memory_gib": self.peak_memory_gib if self.strategy else None,
            "bound_ms": self.bound_ms,
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
    for one in layouts(question):
        # Half of the time, so that something is simulated.
        if time.perf_counter() - start > seconds / 2:
            others.append(Layout(one, why=not_tried))
            continue
        # The states first: they need no capture of this microbatch and recomputation.
        need = states_gib(one)
        need += kept_gib(one) if need <= limit else 0.0
        least = min(least, need)
        if need <= limit:
            possible.append(_bounded(one))
        else:
            others.append(Layout(one, why=f"needs at least {need:.0f} GiB"))
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
    sequences = question.microbatch * question.accumulate
    for expert_ranks in question.possible_expert_ranks:
        for sharding in SHARDING:
            for microbatch in MICROBATCHES:
                if sequences % microbatch:
                    continue
                for recompute in POLICIES if question.experts else ("none", "attention", "full"):
                    yield replace(
                        question, expert_ranks=expert_ranks, sharding=sharding, microbatch=microbatch,
                        accumulate=sequences // microbatch, recompute=recompute,
                    )  # fmt: skip


def states_gib(question: Question) -> float:
    """Parameters, gradients and optimizer states of a rank."""
    parts = parts_of(replace(question, microbatch=1, recompute="none"))
    owned = [share for part in parts.chain for share in shares(part, question)]
    return gib(sum(size for share in owned for size in share.resident_bytes.values()))


def kept_gib(question: Question) -> float:
    """The least that activations take: what the forward keeps of all layers, while the backward of the last
    one or of the head runs."""
    parts = parts_of(question)
    kept = [sum(k.program.tensors[t].bytes for t in kept_tensors(k.program)) for k in parts.kinds]
    before = sum(kept[kind] for kind in parts.layers)
    last = parts.layers[-1]
    return gib(
        max(before + _peak(parts.head.program), before - kept[last] + _peak(parts.kinds[last].program))
    )


def _peak(program: Program) -> float:
    """Peak of a part without its inputs."""
    return peak_memory(program) - Storages(program).resident_bytes


def _bounded(question: Question) -> Layout:
    """A layout with the lower bound of its step: each kind of part once, times how often the model has it."""
    parts, cost = parts_of(question), question.cost
    once = replace(parts, layers=tuple(range(len(parts.kinds))))
    count = {0: 1, len(parts.kinds) + 1: 1}
    count |= {kind + 1: parts.layers.count(kind) for kind in range(len(parts.kinds))}
    step = chained(once, question, 1)
    busy = {True: 0.0, False: 0.0}
    for i in step.program.instructions:
        first, part = i.name.split(".")[:2]
        is_every_microbatch = first == "m0" and (
            question.sharding == "full" or i.kind in (Kind.COMPUTE, Kind.ALL_TO_ALL)
        )
        if is_every_microbatch:
            busy[i.kind is Kind.COMPUTE] += cost(i, step.program.tensors) * count[int(part[1:])]
    return Layout(question, max(busy.values()) * question.accumulate)


def _simulated(layout: Layout, result: Answer) -> Layout:
    name = result.best
    one = result.strategies[name]
    why = "" if result.fits(name) else f"needs {one.peak_memory_gib:.0f} GiB"
    return replace(layout, strategy=name, step_ms=one.step_ms, peak_memory_gib=one.peak_memory_gib, why=why)
