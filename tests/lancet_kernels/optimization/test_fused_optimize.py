"""`optimize(backend="fused")` in the interpreter against `backend="torch"`: losses, gradients, parameters."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lancet_kernels import MoELayer, OptimizedModule, optimize, set_routing_step
from lancet_kernels.graph.from_fx import program_from_graph
from lancet_kernels.kernels.symmetric import SharedMemory
from lancet_kernels.ops.moe import fused_experts, fused_graph
from lancet_kernels.optimization import optimized_module
from lancet_kernels.schedules import plan as fused_prediction
from lancet_kernels.schedules.cut.partition_range import PartitionOptions
from lancet_kernels.schedules.strategies import PlanningOptions
from tests.grids import few_of
from tests.lancet_kernels.layer.test_fused_layer import largest_difference
from tests.planned_steps import StepCase, build_step

PLANNED = {"cluster": "p3dn", "options": PlanningOptions(PartitionOptions(most_parts=2))}
"""For a cluster, to measure nothing here; more parts take longer to plan."""


def train(
    case: StepCase, backend: str, steps: int, varying: bool = False
) -> tuple[list[dict[str, Tensor]], OptimizedModule]:
    """Loss, gradients and parameters of every step, plain SGD. -> those, and the planned step.

    Args: varying: with other numbers of tokens in each step and on every rank (`SHAPES`).
    """
    step, inputs = build_step(case)
    planned = optimize(step, inputs, strategy="lancet", backend=backend, **PLANNED)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
    results = []
    for number in range(steps):
        batch, length = SHAPES[number][dist.get_rank()] if varying else inputs[0].shape
        set_routing_step(step, number)
        loss = planned(*(t[:batch, :length].contiguous() for t in inputs))[0]
        loss.backward()
        result = {"loss": loss.detach()}
        for name, parameter in step.named_parameters():
            if parameter.grad is not None:
                result[f"{name}.grad"] = parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        results.append(result | {name: p.detach().clone() for name, p in step.named_parameters()})
    return results, planned


def compare(case: StepCase, steps: int) -> tuple[float, list[tuple], list[int]]:
    """The largest difference, over the largest value; what became of each layer; how many gradients of
    other layers rode along in each fused backward that really ran."""
    expected, on_streams = train(case, "torch", steps)
    with (
        mock.patch.object(fused_experts, "moe_forward", wraps=fused_experts.moe_forward) as forward,
        mock.patch.object(fused_experts, "moe_backward", wraps=fused_experts.moe_backward) as backward,
    ):
        got, planned = train(case, "fused", steps)
    riding = [len(call.kwargs["dense"]) for call in backward.call_args_list]
    assert forward.call_count == len(riding)
    worst = largest_difference(expected, got)
    # What a CUDA graph could not capture: on streams sizes travel through the host, forward and backward.
    waiting = {name.partition("_part")[0] for name in on_streams.host_waits}
    assert {"exchange_counts", "all_to_all"} <= waiting or dist.get_world_size() == 1
    assert len(planned.fused_layers) == case.layers // 2
    assert not planned.host_waits
    plan, explained = planned.plan, planned.plan.explain()
    return worst, [(group.fused, group.why, group.layer in explained) for group in plan.fused], riding


def compare_with_riders(case: StepCase, steps: int) -> tuple[float, list[tuple], list[int]]:
    """The same as if launches hid everything: every gradient of another layer that may ride along does."""
    with mock.patch.object(fused_prediction, "LEAST_HIDDEN", float("-inf")):
        return compare(case, steps)


def case_of(gate: str, layers: int) -> StepCase:
    top_k = 2 if gate == "topk" else 1
    return StepCase(gate, top_k, dtype=torch.float32, batch=2, sequence=5, layers=layers)


@pytest.mark.parametrize(
    ("gate", "ranks", "steps", "layers"), few_of([("topk", 1, 1, 2), ("topk", 2, 3, 4), ("random", 2, 3, 4)])
)
def test_steps(pool, gate, ranks, steps, layers) -> None:
    case = case_of(gate, layers)
    run = compare_with_riders if gate == "topk" else compare
    for worst, groups, riding in pool.run(run, case, steps, ranks=ranks, timeout_s=240):
        assert worst < 2e-4
        # A plan that says "fused" and runs the ops would give the same numbers.
        moe_layers = layers // 2
        assert len(riding) >= moe_layers * steps
        assert len(groups) == moe_layers
        assert all(fused and shown for fused, _, shown in groups), groups
        assert gate != "topk" or sum(riding) > (layers - 2) * steps


SHAPES = (((2, 5), (1, 3)), ((1, 4), (2, 5)), ((1, 3), (2, 4)))
"""Batch and length of each rank, step by step; none more than what was planned."""


def compare_varying(case: StepCase, steps: int) -> tuple[float, dict[str, int], list[str]]:
    """The largest difference of the two backends; calls without a plan; regions that were made."""
    made = []
    allocate = SharedMemory.allocate
    note = lambda memory, name, *given: made.append(name) or allocate(memory, name, *given)  # noqa: E731
    expected, on_streams = train(case, "torch", steps, varying=True)
    with mock.patch.object(SharedMemory, "allocate", note):
        got, planned = train(case, "fused", steps, varying=True)
    assert planned.fused_layers
    return largest_difference(expected, got), dict(on_streams.fallbacks + planned.fallbacks), made


@pytest.mark.long
def test_other_numbers_of_tokens_on_every_rank(pool) -> None:
    """Each rank captures what it needs, with the plan of all; the exchanges stay as they are."""
    limits = {"timeout_s": 500, "collective_timeout_s": 200}
    for worst, fallbacks, made in pool.run(compare_varying, case_of("random", 2), 3, **limits):
        assert worst < 2e-4
        assert not fallbacks
        assert sum(name.endswith(".rows") for name in made) == 2, made


def bytes_of_tickets(case: StepCase) -> set[int]:
    """What the tickets of a planned step stand for, as its program counts them."""
    with mock.patch.object(
        optimized_module, "host_waits", wraps=optimized_module.host_waits
    ) as planned_graph:
        train(case, "fused", 1)
    graph = planned_graph.call_args.args[0]
    program = program_from_graph(graph)
    forwards = [node for node in graph.nodes if node.target is fused_graph.FORWARD]
    return {program.tensors[f"{node.name}.1"].bytes for node in forwards}


@pytest.mark.long
def test_plans_count_what_a_layer_keeps(pool) -> None:
    """The rows that it received, and the values before the activation."""
    case = StepCase(dtype=torch.float32, batch=2, sequence=5, layers=2, capacity_factor=None)
    received, width, hidden = 2 * 10, 8, 32
    for counted in pool.run(bytes_of_tickets, case, timeout_s=400):
        assert counted == {4 * received * (hidden + width)}


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(16, 16)
        self.layer = MoELayer(16, 24, 2, backend="fused", max_tokens=40, receive_factor=1.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.before(x)).square().sum()


@pytest.mark.long
def test_a_planned_layer_has_the_options_of_its_module() -> None:
    planned = optimize(OneLayer(), (torch.ones(7, 16),), strategy="lancet-dw", **PLANNED)
    (exchange,) = planned.fused_layers
    assert (exchange.max_tokens, exchange.receive_factor) == (40, 1.5)
    planned(torch.ones(7, 16)).backward()
    planned(torch.ones(19, 16)).backward()  # more than planned, within max_tokens
    assert not planned.fallbacks


@pytest.mark.long
def test_forwards_whose_backward_never_comes_give_their_banks_back() -> None:
    case = StepCase(dtype=torch.float32, layers=2, batch=2, sequence=5)
    step, inputs = build_step(case)
    planned = optimize(step, inputs, strategy="lancet-dw", backend="fused", lowering="fused", **PLANNED)
    first = planned(*inputs)[0].detach()
    for _ in range(4):
        objective = planned(*inputs)[0]
    torch.testing.assert_close(objective, first)
    objective.backward()
    assert all(p.grad is not None for p in step.parameters())
