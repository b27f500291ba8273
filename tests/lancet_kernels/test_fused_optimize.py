"""`optimize(backend="fused")` in the interpreter against `backend="torch"`: losses, gradients, parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lancet_kernels import (
    MoELayer,
    OptimizedModule,
    fused_step,
    optimization,
    optimize,
    set_routing_step,
)
from lancet_kernels.captured_step import CapturedStep
from lancet_kernels.errors import UserError
from lancet_kernels.graph.from_fx import program_from_fx
from lancet_kernels.ops import fused_experts, fused_graph
from lancet_kernels.ops.fused_experts import LayerExchange
from lancet_kernels.schedules import fused
from lancet_kernels.schedules.fused_layers import MatchedLayer
from lancet_kernels.symmetric import SharedMemory
from tests.grids import few_of
from tests.lancet_kernels.test_fused_layer import largest_difference
from tests.planned_steps import StepCase, build_step

GATES = ("switch", "topk", "hash", "random", "sigmoid")  # every partitionable one
CLUSTER = "p3dn"  # planned for it, to measure nothing here


def train(case: StepCase, backend: str, steps: int) -> tuple[list[dict[str, Tensor]], OptimizedModule]:
    """Loss, gradients and parameters of every step, plain SGD. -> those, and the planned step."""
    step, inputs = build_step(case)
    planned = optimize(step, inputs, strategy="lancet", backend=backend, cluster=CLUSTER)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
    results = []
    for number in range(steps):
        set_routing_step(step, number)
        loss = planned(*inputs)[0]
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
    with mock.patch.object(fused, "LEAST_HIDDEN", float("-inf")):
        return compare(case, steps)


@pytest.mark.parametrize(
    ("gate", "ranks", "steps", "layers"), few_of([("topk", 1, 1, 2), *((gate, 2, 3, 4) for gate in GATES)])
)
def test_steps(pool, gate, ranks, steps, layers) -> None:
    case = StepCase(
        gate=gate, dtype=torch.float32, batch=2, sequence=5, top_k=2 if gate == "topk" else 1, layers=layers
    )
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


def train_varying(
    case: StepCase, backend: str, steps: int
) -> tuple[list[dict[str, Tensor]], OptimizedModule]:
    """Loss and gradients of steps with other numbers of tokens on every rank."""
    step, inputs = build_step(case)
    planned = optimize(step, inputs, strategy="lancet", backend=backend, cluster=CLUSTER)
    results = []
    for number, shapes in enumerate(SHAPES[:steps]):
        batch, length = shapes[dist.get_rank()]
        set_routing_step(step, number)
        loss = planned(*(t[:batch, :length].contiguous() for t in inputs))[0]
        loss.backward()
        grads = {name: p.grad.clone() for name, p in step.named_parameters() if p.grad is not None}
        results.append({"loss": loss.detach()} | grads)
        step.zero_grad()
    return results, planned


def compare_varying(case: StepCase, steps: int) -> tuple[float, dict[str, int], list[str]]:
    """The largest difference of the two backends; calls without a plan; regions that were made."""
    made = []
    allocate = SharedMemory.allocate
    note = lambda memory, name, *given: made.append(name) or allocate(memory, name, *given)  # noqa: E731
    expected, on_streams = train_varying(case, "torch", steps)
    with mock.patch.object(SharedMemory, "allocate", note):
        got, planned = train_varying(case, "fused", steps)
    assert planned.fused_layers
    return largest_difference(expected, got), dict(on_streams.fallbacks + planned.fallbacks), made


@pytest.mark.parametrize(("gate", "steps"), few_of([("topk", 2), *((gate, 3) for gate in GATES)]))
def test_other_numbers_of_tokens_on_every_rank(pool, gate, steps) -> None:
    """Each rank captures what it needs, with the plan of all; the exchanges stay as they are."""
    case = StepCase(
        gate=gate, dtype=torch.float32, batch=2, sequence=5, top_k=2 if gate == "topk" else 1, layers=2
    )
    for worst, fallbacks, made in pool.run(
        compare_varying, case, steps, timeout_s=500, collective_timeout_s=200
    ):
        assert worst < 2e-4
        assert not fallbacks
        assert sum(name.endswith(".rows") for name in made) == 2, made


@contextmanager
def kept(what: str) -> Iterator[None]:
    """Inside, planned fused layers keep "rows" or "tokens"."""
    exchange_of = CapturedStep._exchange_of

    def with_keep(step: CapturedStep, layer: MatchedLayer) -> LayerExchange:
        exchange = exchange_of(step, layer)
        exchange.keep = what
        return exchange

    with mock.patch.object(CapturedStep, "_exchange_of", with_keep):
        yield


def kept_both_ways(case: StepCase, steps: int) -> tuple[bool, list[int], list[float], list[float]]:
    """-> whether steps that keep tokens give the bits of steps that keep rows. Then, with rows, with tokens:
    bytes that the ticket of a pass stands for, predicted ms of backward launches, predicted peak memory."""
    results, ticket_bytes, backward_ms, peak_gb = [], [], [], []
    for what in ("rows", "tokens"):
        with kept(what), mock.patch.object(optimization, "realize", wraps=optimization.realize) as realized:
            result, planned = train(case, "fused", steps)
        results.append(result)
        nodes = realized.call_args.args[0].graph.nodes
        forwards = [node for node in nodes if node.target is fused_graph.FORWARD]
        backwards = [node for node in nodes if node.target is fused_graph.BACKWARD]
        xs = {node.args[0] if what == "tokens" else None for node in forwards}
        assert {node.args[-1] for node in backwards} == xs
        program = program_from_fx(realized.call_args.args[0])
        (ticket,) = {program.tensors[f"{node.name}.1"].bytes for node in forwards}
        ticket_bytes.append(ticket)
        backward_ms.append(sum(group.backward_ms for group in planned.plan.fused))
        peak_gb.append(planned.plan.predicted.peak_memory_gb)
    same = all(torch.equal(a[name], b[name]) for a, b in zip(*results, strict=True) for name in a)
    return same, ticket_bytes, backward_ms, peak_gb


@pytest.mark.parametrize(("ranks", "steps", "layers"), few_of([(2, 1, 2), (2, 3, 4)]))
def test_plans_follow_what_layers_keep(pool, ranks, steps, layers) -> None:
    """The backward of a layer that keeps tokens reads the forward's x, which the plan's memory counts."""
    case = StepCase(dtype=torch.float32, batch=2, sequence=5, layers=layers, capacity_factor=None)
    received, width, hidden = ranks * 10, 8, 32
    for same, ticket_bytes, (rows_ms, tokens_ms), (rows_gb, tokens_gb) in pool.run(
        kept_both_ways, case, steps, ranks=ranks, timeout_s=400
    ):
        assert same
        assert ticket_bytes == [4 * received * (hidden + width), 4 * received * hidden]
        assert tokens_ms >= rows_ms
        assert tokens_gb < rows_gb


class OneLayer(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.before = nn.Linear(16, 16)
        self.layer = MoELayer(16, 24, 2, backend="fused", max_tokens=40, receive_factor=1.5, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.before(x)).square().sum()


def test_a_planned_layer_has_the_options_of_its_module() -> None:
    for options in ({"banks": 3}, {"keep": "tokens"}):
        planned = optimize(OneLayer(**options), (torch.ones(7, 16),), strategy="lancet-dw", cluster=CLUSTER)
        (number,) = planned.fused_layers
        exchange = fused_graph._layers[number]
        assert (exchange.max_tokens, exchange.receive_factor) == (40, 1.5)
        assert all(getattr(exchange, name) == value for name, value in options.items())
        planned(torch.ones(7, 16)).backward()
        planned(torch.ones(19, 16)).backward()  # more than planned, within max_tokens
        assert not planned.fallbacks


@pytest.mark.long
def test_forwards_whose_backward_never_comes_give_their_banks_back() -> None:
    case = StepCase(dtype=torch.float32, layers=2, batch=2, sequence=5)
    step, inputs = build_step(case)
    planned = optimize(step, inputs, strategy="lancet-dw", backend="fused", lowering="fused", cluster=CLUSTER)
    first = planned(*inputs)[0].detach()
    for _ in range(4):
        objective = planned(*inputs)[0]
    torch.testing.assert_close(objective, first)
    objective.backward()
    assert all(p.grad is not None for p in step.parameters())
    with pytest.raises(UserError, match="at most 2 open"):
        [planned(*inputs) for _ in range(3)]


@pytest.mark.long
@pytest.mark.parametrize(("milliseconds", "expected"), [(1e6, 0), (0.0, 1)])
def test_fused_layers_must_make_the_whole_step_faster(tmp_path, milliseconds, expected) -> None:
    """Each layer is predicted faster, but the step is not: then all stay on streams, and the plan says so."""
    choose_groups = fused_step.choose_groups

    def optimistic(*args, **options):
        groups = choose_groups(*args, **options | {"lowering": "fused"})
        return tuple(replace(group, forward_ms=milliseconds, backward_ms=milliseconds) for group in groups)

    step, inputs = build_step(StepCase(dtype=torch.float32, layers=2, batch=2, sequence=5))
    with (
        mock.patch.object(fused_step, "choose_groups", optimistic),
        mock.patch.object(fused_step.FusedChoice, "interpreted", False),
    ):
        planned = optimize(step, inputs, strategy="lancet-dw", backend="fused", times=tmp_path / "t.json")
    assert len(planned.fused_layers) == expected
    assert sum(group.fused for group in planned.plan.fused) == expected
    assert ("streams: the whole step is predicted faster" in planned.plan.explain()) == (not expected)
