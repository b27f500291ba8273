"""Copies of the step with fused MoE layers, in the interpreter, against the module itself: loss, gradients,
routing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor, fx

from lancet_kernels import OptimizedModule, ops, optimize
from lancet_kernels.graph.costs.clusters import load_cluster
from lancet_kernels.ops.moe import fused_experts, fused_graph
from lancet_kernels.optimization import optimized_module
from lancet_kernels.schedules.plan import Plan
from lancet_kernels.schedules.strategies import PlanningOptions
from tests.planned_steps import StepCase, build_step, gradients, sum_over_ranks

pytestmark = pytest.mark.long  # by default: copies of other layers, fused layers of a step without copies
TOLERANCE = 2e-4
SLOW = replace(load_cluster("p3dn"), name="slow links", intra_node_latency_us=200.0)


def plain_step(step: torch.nn.Module, inputs: tuple) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
    """Outputs and gradients of the module itself; expert [T, K] and kept [T, K] of each layer."""
    routing, gate = [], ops.gate

    def recorded(*arguments):
        result = gate(*arguments)
        routing.append((result[0], result[1] < arguments[6]))
        return result

    with mock.patch.object(ops, "gate", recorded):
        outputs = step(*inputs)
    outputs[0].backward()
    result = numbers(outputs, sum_over_ranks(step, gradients(step)))
    step.zero_grad(set_to_none=True)
    return result, routing


def numbers(outputs: tuple[Tensor, ...], by_parameter: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"output {n}": output.detach() for n, output in enumerate(outputs)} | by_parameter


def routing_of(calls: list, graph: fx.Graph) -> list[tuple[Tensor, Tensor]]:
    """The routing of each layer, from the forward launches of its copies, in whatever order those run."""
    launches = [node.name for node in graph.nodes if node.target is fused_graph.FORWARD]
    by_layer: dict[int, dict[str, tuple]] = {}
    for name, call in zip(launches, calls, strict=True):
        (copy,) = copies_in([name])
        by_layer.setdefault(id(call.args[10]), {})[copy] = call.args
    return [
        (
            torch.cat([copies[c][1] for c in sorted(copies)]),
            torch.cat([copies[c][2] >= 0 for c in sorted(copies)]),
        )
        for copies in by_layer.values()
    ]


def fused(step: torch.nn.Module, inputs: tuple, strategy: str) -> OptimizedModule:
    options = {"backend": "fused", "lowering": "fused", "options": PlanningOptions(memory_limit_gb=1.0)}
    return optimize(step, inputs, strategy=strategy, cluster=SLOW, reduce_gradients="sum", **options)


def on_ranks(case: StepCase, strategy: str) -> None:
    step, inputs = build_step(case)
    expected, routing = plain_step(step, inputs)
    with (
        mock.patch.object(optimized_module, "host_waits", wraps=optimized_module.host_waits) as planned_graph,
        mock.patch.object(fused_experts, "run_forward", wraps=fused_experts.run_forward) as forward,
        mock.patch.object(fused_experts, "moe_backward", wraps=fused_experts.moe_backward) as backward,
    ):
        planned = fused(step, inputs, strategy)
        outputs = planned(*inputs)
        outputs[0].backward()
    got = numbers(outputs, gradients(step))
    assert got.keys() == expected.keys()
    fused_routing = routing_of(forward.call_args_list, planned_graph.call_args.args[0])
    pairs = [pair for both in zip(routing, fused_routing, strict=True) for pair in zip(*both, strict=True)]
    assert max(map(distance, got.values(), (expected[name] for name in got))) < TOLERANCE
    assert all(torch.equal(one, other) for one, other in pairs)
    assert not all(kept.all() for _, kept in routing), "tokens are dropped"
    assert backward.call_count == forward.call_count >= case.layers  # two copies, every other layer
    plan = Plan.from_json(json.loads(json.dumps(planned.plan.to_json())))
    assert (plan.ranges, plan.fused) == (planned.plan.ranges, planned.plan.fused)


def distance(got: Tensor, expected: Tensor) -> float:
    """The largest difference, over the largest value."""
    got, expected = got.double(), expected.double()
    return float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-3))


def copies_in(names: list[str]) -> set[str]:
    """The copies that these nodes belong to."""
    return {match[1] for name in names if (match := re.search(r"_part(\d+)$", name))}


@pytest.mark.parametrize(
    ("strategy", "gate", "layers", "batch"),
    [
        ("duplex", "topk", 2, 3),
        ("duplex", "random", 4, 2),
        ("lancet+duplex", "topk", 4, 5),
    ],
)
def test_copies_train_as_the_module(pool, strategy, gate, layers, batch) -> None:
    top_k = 2 if gate == "topk" else 1
    case = StepCase(gate, top_k, dtype=torch.float32, layers=layers, batch=batch, sequence=5)
    pool.run(on_ranks, case, strategy, ranks=2, timeout_s=240)
