"""The mathematics of the module stays, whatever the plan: in every way to cut, up to the order of sums."""

from dataclasses import dataclass, replace

import pytest
import torch

from lancet_kernels.graph.program import fingerprint
from lancet_kernels.ops.comm.link import link
from lancet_kernels.ops.moe.gates import GATES, parse_gate
from lancet_kernels.schedules.plan import Plan
from lancet_kernels.schedules.strategies import AUTO, STRATEGY_NAMES
from tests.optimized import BOUND
from tests.planned_steps import SmallStep, StepCase

GATE_CASES = {
    "switch": StepCase(),
    "topk": StepCase("topk", 2),
    "topk-renormalized": StepCase("topk(softmax='after',renormalize=True)", 3),
    "gshard": StepCase("gshard", 2),
    "batch-prioritized": StepCase("batch-prioritized", 2),
    "expert-choice": StepCase("expert-choice"),
    "hash": StepCase("hash", 2),
    "random": StepCase("random", 2),
    "sigmoid": StepCase("sigmoid(groups=2,top_groups=1)", 2, activation="swiglu"),
}
DROPLESS = {
    f"{name}-dropless": replace(GATE_CASES[name], capacity_factor=None) for name in ("topk", "gshard", "hash")
}
UNEVEN = {
    "topk-uneven": StepCase("topk", 2, batch=5, layers=2, activation="swiglu"),
    "gshard-uneven": StepCase("gshard", 2, batch=7, layers=2),
}


@dataclass(frozen=True)
class Tried:
    """One plan on one rank: how far from the module it came, and what it cut."""

    plan: str
    distance: float
    parts: tuple[int, ...]
    gate_is_cut: bool
    bytes_sent: int


def try_plans(case: StepCase, parts: tuple[int, ...], orders: int) -> tuple[list[Tried], list[float], str]:
    """Every strategy with at most so many parts (auto takes one of them), and each candidate range in
    exactly so many.

    orders: random orders to try of each plan by hand. -> what came out, dropped share and assignments of the
    module itself.
    """
    step = SmallStep(case)
    plain = step.plain()
    tried: list[Tried] = []

    def attempt(name: str, plan: Plan) -> None:
        forward, backward = step.halves(plan)
        link.read()
        distance = step.run(forward, backward).distance(plain)
        sent = link.read().bytes_sent
        gates = forward.graph.find_nodes(op="call_function", target=torch.ops.lancet.gate.default)
        cut = len(list(gates)) > len(step.named("lancet.gate"))
        tried.append(Tried(name, distance, tuple(r.parts for r in plan.ranges), cut, sent))

    for most in parts:
        planner = step.planner(most)
        for strategy in (s for s in STRATEGY_NAMES if s not in (AUTO, *planner.impossible)):
            if most == parts[0] or strategy in ("lancet-partition", "lancet"):
                attempt(f"{strategy} with {most}", planner.plan(strategy))
        # What Tutel does, in any number of parts.
        pairs = planner._cut(planner.expert_ranges, most)
        attempt(f"experts in {most}", step.by_hand(list(pairs)))
        for name, (first, last) in step.candidates().items():
            found = step.cut(first, last, most)
            if most == 1 or found is None or most > case.batch:
                continue
            attempt(f"{name} in {most}", step.by_hand([found]))
            for seed in range(orders):
                attempt(f"{name} in {most}, order {seed}", step.by_hand([found], seed))
    outputs = [float(plain.outputs[1]), *plain.outputs[2].flatten().tolist()]
    return tried, outputs, fingerprint(step.program)


def check_case(pool, case: StepCase, parts: tuple[int, ...], orders: int = 0) -> list[Tried]:
    """All plans of a case on two ranks; fails also where nothing was cut."""
    by_rank = pool.run(try_plans, case, parts, orders, ranks=2, timeout_s=600)
    assert by_rank[0][2] == by_rank[1][2], "ranks have different programs"
    for tried, (dropped, *assigned), _ in by_rank:
        for one in tried:
            assert one.distance < BOUND, (case, one)
            assert one.bytes_sent == tried[0].bytes_sent > 0, f"{one}: other rows travel than without a plan"
        assert (dropped > 0) == (case.capacity_factor is not None and "expert-choice" not in case.gate)
        if (
            parse_gate(case.gate).uses_logits
            and "expert-choice" not in case.gate
            and "sigmoid" not in case.gate
        ):
            assert 0 in assigned, "the case was meant to leave experts empty"
    tried = by_rank[0][0]
    assert [one.plan for one in tried] == [one.plan for one in by_rank[1][0]]
    cut = {k for one in tried for k in one.parts}
    assert not tried[0].parts, "the first one is the strategy `none`"
    assert cut >= {k for k in parts if 1 < k <= case.batch}, "some number of parts was never tried"
    partitionable = parse_gate(case.gate).partitionable
    assert any(one.plan.startswith("duplex ") for one in tried) == partitionable
    assert any(one.gate_is_cut for one in tried) == partitionable, "gates are cut exactly if they may be"
    for strategy in ("lancet-partition", "lancet"):
        assert any(one.parts for one in tried if one.plan.startswith(f"{strategy} ")), (
            f"{strategy} cut nothing"
        )
    return tried


ALL_CASES = {**GATE_CASES, **DROPLESS, **UNEVEN}


@pytest.mark.long
@pytest.mark.parametrize("gate", ALL_CASES)
def test_all_plans_keep_the_mathematics(pool, gate):
    case, number = ALL_CASES[gate], list(ALL_CASES).index(gate)
    if gate not in ("switch", "topk", "gshard"):
        case = replace(case, layers=2)
    # Each number up to 8 with several gates.
    check_case(pool, case, (1, 2 + number % 7, 2 + (number + 3) % 7), orders=1)


def test_grid_has_every_gate():
    assert {parse_gate(case.gate).name for case in GATE_CASES.values()} == set(GATES)
