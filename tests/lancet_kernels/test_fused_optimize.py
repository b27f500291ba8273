"""`optimize(backend="fused")` in the interpreter against `backend="torch"`: losses, gradients, parameters."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lancet_kernels import OptimizedModule, fused_step, optimize, set_routing_step
from lancet_kernels.errors import UserError
from lancet_kernels.kernels import overlap
from lancet_kernels.ops import fused_experts
from lancet_kernels.schedules import fused
from tests.grids import few_of
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
        mock.patch.object(overlap, "moe_backward", wraps=overlap.moe_backward) as backward,
    ):
        got, planned = train(case, "fused", steps)
    riding = [len(call.kwargs["dense"]) for call in backward.call_args_list]
    assert forward.call_count == len(riding)
    worst = 0.0
    for one, other in zip(expected, got, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            scale = one[name].abs().max().clamp_min(1e-3)
            worst = max(worst, float((other[name] - one[name]).abs().max() / scale))
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
