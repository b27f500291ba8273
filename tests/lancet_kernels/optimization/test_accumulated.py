"""Gradients of several microbatches: equal to those of one large batch, and summed over the ranks once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import init_device_mesh
from torch.utils.checkpoint import checkpoint

from lancet_kernels import OptimizedModule, fsdp
from lancet_kernels.ops.comm import collectives as accumulated
from lancet_kernels.ops.comm.groups import Groups
from lancet_kernels.ops.comm.link_group import LinkGroup
from tests.grids import few_of
from tests.lancet_kernels.optimization.test_sharded import Case, Step, batch_of, distance, groups_with
from tests.optimized import optimized
from tests.ranks import RankPool
from tests.refusals import refusal

BOUND = 1e-9


def planned(shards: bool, strategy: str, reduction: str = "mean") -> OptimizedModule:
    """The step, with experts over all ranks."""
    groups = groups_with(dist.get_world_size())
    step = Step(groups, balance=0.0)
    if shards:
        fsdp(step, init_device_mesh("cpu", (dist.get_world_size(),)), groups)
    inputs = (batch_of(dist.get_rank(), 0),)
    return optimized(step, inputs, strategy, groups=groups, reduce_gradients=reduction, accumulate=4)


def microbatches(number: int) -> list[tuple[Tensor]]:
    return [(batch_of(dist.get_rank(), k),) for k in range(number)]


class Shared(torch.nn.Module):
    """One layer under two names, with a checkpoint around the second call, whose graph reads the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 8, dtype=torch.float64)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.second, self.first(x), use_reentrant=False).square().mean()


def a_layer_under_two_names() -> None:
    inputs = [
        (torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(k)),)
        for k in range(2)
    ]
    step = optimized(Shared(), inputs[0], "lancet-dw", reduce_gradients="mean", accumulate=2)
    assert step.timeline.times.others == 1, "simulated as it runs: one microbatch without sums, then one with"
    step.microbatches(inputs)
    reference = Shared()
    reference(torch.cat([x for (x,) in inputs])).backward()
    torch.testing.assert_close(step.module.first.weight.grad, reference.first.weight.grad)
    torch.testing.assert_close(step.module.first.bias.grad, reference.first.bias.grad)


def test_a_layer_under_two_names(pool: RankPool) -> None:
    pool.run(a_layer_under_two_names)


def one_large_batch(number: int) -> Step:
    """Gradients of the whole model for all tokens of all ranks together."""
    reference = Step(Groups(), balance=0.0)
    ranks = range(dist.get_world_size())
    reference(torch.cat([batch_of(r, k) for k in range(number) for r in ranks])).backward()
    return reference


@contextlib.contextmanager
def counted_sums() -> Iterator[list[str]]:
    """What is summed over the ranks by a plan inside the context."""
    sums: list[str] = []

    def counts(name: str):
        start = getattr(LinkGroup, name)

        def started(*arguments: object) -> object:
            sums.append(name)
            return start(*arguments)

        return mock.patch.object(LinkGroup, name, started)

    with counts("allreduce_coalesced"), counts("reduce_scatter_tensor_coalesced"):
        yield sums


def several_equal_one(shards: bool, strategy: str) -> None:
    step, case = planned(shards, strategy), Case(dist.get_world_size())
    assert bool(step.plan.pair) == (strategy == "microbatches")
    once = None
    for number in (1, 2, 4):
        reference = one_large_batch(number)
        with counted_sums() as sums:
            losses = step.microbatches(microbatches(number))
        assert len(losses) == number
        assert distance(step.module, reference, case) < BOUND
        assert sums, "gradients are summed"
        once = once or sums
        assert sums == once, "as often for several microbatches as for one"
        step.module.zero_grad()
    reference = one_large_batch(3)
    own_loop(step)
    assert distance(step.module, reference, case) < BOUND
    assert step.fallbacks == {"the module is in evaluation mode": 1}
    # On top of gradients that are summed already.
    own_loop(step)
    step.microbatches(microbatches(3))
    for parameter in reference.parameters():
        parameter.grad *= 3
    assert distance(step.module, reference, case) < BOUND


def own_loop(step: OptimizedModule) -> None:
    """The loop of a user over three microbatches; the second runs without the plan."""
    for k, (x,) in enumerate(microbatches(3)):
        with step.no_sync() if k < 2 else contextlib.nullcontext():
            step.train(k != 1)
            (step(x) / 3).backward()
    step.train()


CASES = [(False, "microbatches"), (True, "microbatches"), (False, "lancet-dw"), (True, "lancet+duplex")]


@pytest.mark.parametrize(("shards", "strategy"), few_of(CASES))
def test_several_microbatches_are_one_large_batch(pool: RankPool, shards: bool, strategy: str) -> None:
    pool.run(several_equal_one, shards, strategy)


def replicated_shards() -> None:
    """HSDP whose shards are whole parameters: gradients are summed over copies alone.

    Of a pair, and of one more.
    """
    groups, case = groups_with(1), Case(1)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    model = fsdp(Step(groups, balance=0.0), mesh, groups)
    inputs = (batch_of(dist.get_rank(), 0),)
    options = {"groups": groups, "reduce_gradients": "mean", "accumulate": 3}
    step = optimized(model, inputs, "microbatches", **options)
    step.microbatches(microbatches(3))
    assert distance(model, one_large_batch(3), case) < BOUND


@pytest.mark.long
def test_replicated_shards(pool: RankPool) -> None:
    pool.run(replicated_shards)


def sums_and_refusals() -> str:
    """With "sum", gradients are those of the sum of all losses."""
    step, case = planned(False, "none", reduction="sum"), Case(dist.get_world_size())
    reference = one_large_batch(2)
    step.microbatches(microbatches(2))
    factor = 2 * dist.get_world_size()
    for parameter in step.module.parameters():
        parameter.grad /= factor
    assert distance(step.module, reference, case) < BOUND
    return refusal(lambda: step.microbatches([]))


@pytest.mark.long
def test_sum_of_losses(pool: RankPool) -> None:
    for said in pool.run(sums_and_refusals):
        assert said == "microbatches: got none, expected one or more; give their inputs"


def after_no_sync(strategy: str) -> None:
    """Microbatches sum what a backward under no_sync left, if it was not set to zero since."""
    step, case = planned(False, strategy), Case(dist.get_world_size())
    first, second = microbatches(2)
    step(*first).backward()
    with step.no_sync():
        step(*second).backward()
        step.module.zero_grad()
        with pytest.raises(RuntimeError), pytest.warns(UserWarning, match="runs without its plan"):
            step.microbatches([(torch.zeros(1, 1, 1, dtype=torch.float64),)])
        assert all(parameter.grad is None for parameter in step.module.parameters())
        (step(*first) / 2).backward()
    step.microbatches([first, second])
    reference = one_large_batch(2)
    reference(torch.cat([batch_of(r, 0) for r in range(dist.get_world_size())])).div(2).backward()
    assert distance(step.module, reference, case) < BOUND


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["none", "microbatches"])
def test_microbatches_after_no_sync(pool: RankPool, strategy: str) -> None:
    pool.run(after_no_sync, strategy)


def two_steps_of_one_model() -> None:
    """What one leaves under no_sync, the next sum over the ranks adds, whichever step it is of."""
    step, case = planned(False, "none"), Case(dist.get_world_size())
    first, second = microbatches(2)
    groups = groups_with(dist.get_world_size())
    other = optimized(step.module, first, groups=groups, reduce_gradients="mean")
    for before, after in ([step], [other]), ([step, other], [other]), ([other, step], [other, step]):
        step.module.zero_grad()
        with contextlib.ExitStack() as stack:
            for one in before:
                stack.enter_context(one.no_sync())
                one(*first).backward()
        for one in after:
            one(*second).backward()
        reference = Step(Groups(), balance=0.0)
        for k, times in enumerate((len(before), len(after))):
            batch = torch.cat([batch_of(rank, k) for rank in range(dist.get_world_size())])
            (reference(batch) * times).backward()
        assert distance(step.module, reference, case) < BOUND


def test_two_steps_of_one_model(pool: RankPool) -> None:
    pool.run(two_steps_of_one_model)


def failing() -> None:
    """After a failure in the last backward, gradients and what is held are as before the microbatches."""
    step, batches = planned(True, "microbatches"), microbatches(3)
    add = accumulated.GradientSum.add

    def fails_in_the_last(self: accumulated.GradientSum, summand: Tensor) -> Tensor | None:
        if self.accumulation.sums:
            raise ZeroDivisionError
        return add(self, summand)

    def gradients() -> dict[str, Tensor]:
        return {name: parameter.grad for name, parameter in step.module.named_parameters()}

    step.microbatches(batches)
    before = gradients()
    once = {name: gradient.clone() for name, gradient in before.items()}
    fails = mock.patch.object(accumulated.GradientSum, "add", fails_in_the_last)
    with fails, pytest.raises(ZeroDivisionError):
        step.microbatches(batches)
    assert all(gradient is before[name] for name, gradient in gradients().items())
    step.microbatches(batches)
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, 2 * once[name])


@pytest.mark.long
def test_failure_leaves_no_gradient(pool: RankPool) -> None:
    pool.run(failing)
