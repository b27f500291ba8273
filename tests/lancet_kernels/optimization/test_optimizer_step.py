"""`optimize(..., optimizer=)`: parameters are those of the ordinary loop."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import init_device_mesh

from lancet_kernels import OptimizedModule, clip_gradients, fsdp
from lancet_kernels.graph.program.program import Phase
from lancet_kernels.ops.comm.groups import Groups
from tests.grids import few_of
from tests.lancet_kernels.optimization.test_sharded import Case, Step, batch_of, distance, groups_with
from tests.optimized import optimized
from tests.ranks import RankPool
from tests.refusals import refusal

BOUND = 1e-9
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.002, momentum=0.9, nesterov=True),
}


def planned(
    shards: bool, strategy: str, name: str, expert_ranks: int, accumulate: int = 1
) -> tuple[OptimizedModule, torch.optim.Optimizer]:
    groups = groups_with(expert_ranks)
    step = Step(groups, balance=0.0)
    if shards:
        fsdp(step, init_device_mesh("cpu", (dist.get_world_size(),)), groups)
    optimizer = OPTIMIZERS[name](step.parameters())
    inputs = (batch_of(dist.get_rank(), 0),)
    options = {"groups": groups, "reduce_gradients": "mean", "accumulate": accumulate}
    return optimized(step, inputs, strategy, optimizer=optimizer, **options), optimizer


def whole(number: int, microbatches: int) -> torch.Tensor:
    """The batches of all ranks and microbatches of a step."""
    ranks = range(dist.get_world_size())
    return torch.cat([batch_of(r, 10 * number + k) for k in range(microbatches) for r in ranks])


def trains_like_the_loop(shards: bool, strategy: str, name: str, expert_ranks: int, accumulate: int) -> None:
    step, optimizer = planned(shards, strategy, name, expert_ranks, accumulate)
    phases = {i.phase for i in step.timeline.program.instructions}
    assert Phase.OPTIMIZER in phases, "the optimizer's step is planned"
    reference, case = Step(Groups(), balance=0.0), Case(expert_ranks)
    ordinary = OPTIMIZERS[name](reference.parameters())
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, ordinary)]
    rank = dist.get_rank()
    for number in range(3):
        step.microbatches([(batch_of(rank, 10 * number + k),) for k in range(accumulate)])
        reference(whole(number, accumulate)).backward()
        ordinary.step()
        assert distance(step.module, reference, case, of_gradients=True) < BOUND
        assert distance(step.module, reference, case, of_gradients=False) < BOUND
        # What is not cleared counts in the next step, as in any loop; microbatches refuse it.
        if number != 1 or accumulate > 1:
            optimizer.zero_grad()
            ordinary.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    # A call without the plan, and a loop of the user's own.
    for number, mode in ((3, False), (4, True)):
        step.train(mode)
        for k in range(2):
            with contextlib.nullcontext() if k else step.no_sync():
                (step(batch_of(rank, 10 * number + k)) / 2).backward()
        reference(whole(number, 2)).backward()
        ordinary.step()
        assert distance(step.module, reference, case, of_gradients=False) < BOUND
        optimizer.zero_grad()
        ordinary.zero_grad()
    assert step.fallbacks == {"the module is in evaluation mode": 2}
    assert {int(state["step"]) for state in optimizer.state.values() if "step" in state} <= {5}


CASES = [
    (True, "lancet", "adamw", 1, 2),
    (False, "lancet", "adamw", 2, 1),
    *((s, strategy, "sgd", 2, 1) for s in (False, True) for strategy in ("none", "tutel", "lancet-dw")),
    *((s, "lancet+duplex", "adamw", 2, 3) for s in (False, True)),
    *((s, "microbatches", name, 2, 3) for s in (False, True) for name in OPTIMIZERS),
]


@pytest.mark.parametrize(("shards", "strategy", "name", "expert_ranks", "accumulate"), few_of(CASES))
def test_parameters_are_those_of_the_loop(
    pool: RankPool, shards: bool, strategy: str, name: str, expert_ranks: int, accumulate: int
) -> None:
    pool.run(trains_like_the_loop, shards, strategy, name, expert_ranks, accumulate)


def resumes() -> None:
    """A state that is saved after a step of the plan, and loaded into another optimizer, and back."""
    step, optimizer = planned(False, "lancet", "adamw", 2)
    x = batch_of(dist.get_rank(), 0)
    step(x).backward()
    optimizer.zero_grad()
    saved = copy.deepcopy((step.module.state_dict(), optimizer.state_dict()))
    step(x).backward()
    optimizer.zero_grad()
    after = [p.detach().clone() for p in step.module.parameters()]
    step.module.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    step(x).backward()
    for parameter, value in zip(step.module.parameters(), after, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=0.0, atol=0.0)


@pytest.mark.long
def test_resume(pool: RankPool) -> None:
    pool.run(resumes)


def refusals() -> list[str]:
    step, optimizer = planned(False, "none", "adamw", 2)
    x, said = batch_of(dist.get_rank(), 0), []

    def refused(what: object, *arguments: object, **options: object) -> None:
        said.append(refusal(lambda: what(*arguments, **options)))

    first, second = step(x), step(x)
    refused((first + second).backward)
    optimizer.zero_grad()
    early = step(x)
    step(x).backward()
    refused(early.backward)
    clip_gradients(step.module, None, step.module.groups)
    other = Step(step.module.groups, balance=0.0)
    for wrong in (
        torch.optim.LBFGS(other.parameters()),
        torch.optim.SGD(nn.Linear(2, 2).parameters()),
        "adam",
    ):
        refused(optimized, other, (x,), "none", groups=step.module.groups, optimizer=wrong)
    own = torch.optim.SGD(other.parameters())
    groups = {"groups": step.module.groups, "optimizer": own}
    refused(optimized, other, (x,), "none", reduce_gradients=False, **groups)
    other.input.weight.register_hook(lambda gradient: 2 * gradient)
    refused(optimized, other, (x,), "none", **groups)
    return said


def test_refusals(pool: RankPool) -> None:
    expected = [
        "two calls of the optimized module in one backward",
        "a call that was made before the optimizer's last step",
        "a step of one parameter fails",
        "no trained parameter of the model",
        "a str",
        "reduce_gradients=False",
        "a hook on input.weight",
    ]
    for said in pool.run(refusals):
        assert len(said) == len(expected)
        for message, part in zip(said, expected, strict=True):
            assert part in message


def alone() -> None:
    """On one rank, nothing is summed; the step is at the end of the backward."""
    model = Step(Groups(), balance=0.0)
    reference = copy.deepcopy(model)
    own, theirs = (OPTIMIZERS["adamw"](m.parameters()) for m in (model, reference))
    step = optimized(model, (batch_of(0, 0),), "none", optimizer=own)
    for number in range(2):
        step(batch_of(0, number)).backward()
        reference(batch_of(0, number)).backward()
        theirs.step()
        for optimizer in (own, theirs):
            optimizer.zero_grad()
    assert distance(model, reference, Case(), of_gradients=False) < BOUND


@pytest.mark.long
def test_one_rank(pool: RankPool) -> None:
    pool.run(alone, ranks=1)
