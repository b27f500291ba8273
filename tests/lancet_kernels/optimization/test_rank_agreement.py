"""Each decision that changes the order of collectives, with a rank that would decide otherwise alone
(the table in `rank_agreement`); on FSDP with experts over both ranks, where gloo would end the process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import init_device_mesh

from lancet_kernels import OptimizedModule, fsdp
from lancet_kernels.ops.comm.groups import Groups
from lancet_kernels.optimization import optimized_module, trial
from lancet_kernels.optimization.optimize import optimize
from lancet_kernels.schedules.plan import PLAIN
from tests.lancet_kernels.optimization.test_sharded import (
    Case,
    Step,
    batch_of,
    copied,
    distance,
    gradients_of,
    groups_with,
)
from tests.optimized import optimized
from tests.ranks import RankPool
from tests.refusals import refusal
from tests.setups import Model, batch

BOUND = 1e-9


class Summed(Step):
    """The sum over the tokens, so that a rank may have none."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.input(x)
        for block in self.blocks:
            x, _ = block(x)
        return (self.head(x) - 0.3 * self.again(x.tanh())).square().sum()


def planned(strategy: str) -> OptimizedModule:
    groups = groups_with(2)
    step = fsdp(Summed(groups, balance=0.0), init_device_mesh("cpu", (2,)), groups)
    options = {"groups": groups, "reduce_gradients": "sum", "compare_every": 1}
    return optimized(step, (batch_of(dist.get_rank(), 0),), strategy, accumulate=2, **options)


@contextlib.contextmanager
def hooked(step: OptimizedModule) -> Iterator[None]:
    handle = step.module.head.register_forward_hook(lambda _module, _inputs, output: output.clone())
    yield
    handle.remove()


@contextlib.contextmanager
def evaluated(step: OptimizedModule) -> Iterator[None]:
    step.eval()
    yield
    step.train()


def gradients_are_right(step: OptimizedModule, batches: list[Callable[[int], Tensor]], whole: Step) -> None:
    """They are those of all ranks' batches. Args: batches: of each microbatch, by rank."""
    whole.zero_grad()
    for of_rank in batches:
        for rank in range(dist.get_world_size()):
            whole(of_rank(rank)).backward()
    assert distance(step.module, whole, Case(2)) < BOUND
    step.module.zero_grad()


def one_rank_decides_otherwise(strategy: str) -> dict[str, list[str]]:
    """-> by what rank 1 does, why this rank runs without its plan."""
    step, whole, reasons = planned(strategy), Summed(Groups(), balance=0.0), {}
    is_last = dist.get_rank() == 1
    assert bool(step.plan.pair) == (strategy == "microbatches")

    def sized(rows: int, number: int = 0) -> Callable[[int], Tensor]:
        return lambda rank: batch_of(rank, number)[: rows if rank == 1 else 4]

    situations = {
        "nothing": ([sized(4), sized(4, 1)], contextlib.nullcontext()),
        "another shape": ([sized(4), sized(3, 1)], contextlib.nullcontext()),
        "more shapes than are kept": ([sized(2), sized(3), sized(2)], contextlib.nullcontext()),
        "no tokens": ([sized(4), sized(0, 1)], contextlib.nullcontext()),
        "a hook": ([sized(4), sized(4, 1)], hooked(step)),
        "evaluation mode": ([sized(4), sized(4, 1)], evaluated(step)),
        "nothing again": ([sized(4), sized(4, 1)], contextlib.nullcontext()),
    }
    with mock.patch.object(optimized_module, "MOST_SHAPES", 1):
        for name, (batches, alone) in situations.items():
            step.fallbacks.clear()
            with alone if is_last else contextlib.nullcontext():
                step.microbatches([(of_rank(dist.get_rank()),) for of_rank in batches])
            gradients_are_right(step, batches, whole)
            reasons[name] = sorted(step.fallbacks)
    return reasons


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["microbatches", "lancet"])
@pytest.mark.filterwarnings("ignore")
def test_no_rank_runs_the_plan_where_one_cannot(pool: RankPool, strategy: str) -> None:
    others, last = pool.run(one_rank_decides_otherwise, strategy, timeout_s=300.0)
    kept = ("nothing", "another shape", "more shapes than are kept", "no tokens", "nothing again")
    assert [last[name] for name in kept] == [others[name] for name in kept] == [[]] * 5
    for name, reason in (
        ("a hook", "no longer so: no forward_hooks on head"),
        ("evaluation mode", "the module is in evaluation mode"),
    ):
        assert last[name] == [reason]
        assert others[name] == [f"rank 1: {reason}"]


def ranks_that_call_otherwise() -> list[str]:
    step = planned("microbatches")
    is_last = dist.get_rank() == 1
    x = (batch_of(dist.get_rank(), 0),)
    before = copied({n: p.to_local() for n, p in step.module.named_parameters()})
    said = [refusal(lambda: step.microbatches([x] * (3 if is_last else 2)))]
    said.append(refusal(lambda: step.microbatches([x] * 2) if is_last else step(*x)))
    # Nothing has been sent or changed.
    step(*x).backward()
    assert all(torch.equal(p.to_local(), before[n]) for n, p in step.module.named_parameters())
    assert gradients_of(step.module)
    return said


def test_ranks_that_call_otherwise_are_named_on_all_of_them(pool: RankPool) -> None:
    """Calls without gradients, and a rank that refuses one: `test_setups.ranks_that_do_different_things`."""
    for microbatches, calls in pool.run(ranks_that_call_otherwise, timeout_s=300.0):
        assert "2 microbatches on rank(s) 0 and 3 microbatches on rank(s) 1" in microbatches
        assert "a call on rank(s) 0 and 2 microbatches on rank(s) 1" in calls


def arguments_that_differ() -> list[str]:
    is_last = dist.get_rank() == 1

    def planned(**own: object) -> str:
        return refusal(lambda: optimize(Model(), batch(), cluster="p3dn", **(own if is_last else {})))

    with mock.patch.dict(os.environ, {"LANCET_WITHOUT_PASSES": "order"} if is_last else {}):
        passes = planned()
    return [
        planned(strategy="lancet"),
        planned(accumulate=2),
        planned(compare_every=7),
        planned(reduce_gradients="sum"),
        planned(plan="plan.json"),
        passes,
    ]


def test_other_arguments_of_optimize_are_named(pool: RankPool) -> None:
    for said in pool.run(arguments_that_differ):
        for text, words in zip(
            said,
            (
                "strategy='auto' on rank 0 and 'lancet' on rank 1",
                "accumulate=1 on rank 0 and 2 on rank 1",
                "compare_every=1000 on rank 0 and 7 on rank 1",
                "reduce_gradients='mean' on rank 0 and 'sum' on rank 1",
                "plan=False on rank 0 and True on rank 1",
                "LANCET_WITHOUT_PASSES='' on rank 0 and 'order' on rank 1",
            ),
            strict=True,
        ):
            assert words in text


def planned_with_other_threads(times: str) -> str:
    with mock.patch.object(torch, "get_num_threads", return_value=1 + dist.get_rank()):
        return optimize(Model(), batch(), times=times, trials=0).plan.fingerprint


@pytest.mark.long
def test_ranks_on_other_devices_look_for_the_same_times(pool: RankPool, tmp_path) -> None:
    first, second = pool.run(planned_with_other_threads, str(tmp_path / "times.json"), timeout_s=300.0)
    assert first == second


def files_of_one_rank(folder: str) -> list[tuple[str, bool]]:
    """Stored times, a plan and a damaged plan on one rank; trials whose winner differs by rank."""
    rank, chosen = dist.get_rank(), []
    times, cache = f"{folder}/times-{rank}.json", f"{folder}/plan-{rank}.json"
    real = trial.in_turn

    def measured(
        plain_ms: float, ways: dict, *arguments: object, **options: object
    ) -> dict[str, list[float]]:
        """Plans are fastest on rank 0, the module as it is on rank 1; the slowest rank counts."""
        of_plans, of_plain = (1.0, plain_ms) if rank == 0 else (100.0, 1.0)
        taken = real(ways, *arguments, **options)
        return {name: [of_plain if name == PLAIN else of_plans] * len(ms) for name, ms in taken.items()}

    for plain_ms, damaged in ((1000.0, False), (1000.0, True), (10.0, True)):
        if damaged and rank == 0:
            with open(cache, "w") as file:
                file.write("{}")
        with mock.patch.object(trial, "in_turn", partial(measured, plain_ms)):
            ready = optimize(Model(), batch(), times=times, cache=cache if rank == 0 else None, trials=1)
        chosen.append((ready.plan.fingerprint, ready.plan.plain))
        ready(*batch()).backward()
    return chosen


@pytest.mark.long
def test_files_and_times_of_one_rank_decide_for_all(pool: RankPool, tmp_path) -> None:
    first, second = pool.run(files_of_one_rank, str(tmp_path), timeout_s=300.0)
    assert first == second
    assert [plain for _, plain in first] == [False, False, True]


def capture_fails_on_one_rank() -> str:
    model = Model()
    if dist.get_rank() == 1:
        model.drop.register_forward_hook(lambda _module, _inputs, y: 2 * y if y.sum() > 0 else y)
    return refusal(lambda: optimize(model, batch(), cluster="p3dn"))


def test_a_graph_that_one_rank_lacks_is_named_on_all(pool: RankPool) -> None:
    first, second = pool.run(capture_fails_on_one_rank)
    assert "no graph on rank(s) 1" in first
    assert "hook" in second
    assert "on drop" in second
