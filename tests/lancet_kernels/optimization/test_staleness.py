"""Plans whose routing has moved: by hand, and in calls of a module on two ranks."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from lancet_kernels import MoELayer
from lancet_kernels.optimization.planning import Staleness, faster
from lancet_kernels.schedules.plan import Plan
from lancet_kernels.schedules.time.simulate import Timeline, simulate
from tests.optimized import optimized
from tests.ranks import RankPool
from tests.schedules.small_programs import given, program

E = 4


def candidates() -> list[tuple[Plan, Timeline]]:
    """A blocks for 10 ms of exchange and takes 20; beside the exchange it takes 32, as kernels share it."""
    alone = program("G c f 1", "X a f 10 G", "A c f 20 G", "Z c f 1 X")
    beside = program("G c f 1", "X a f 10 G", "A c f 32 G", "Z c f 1 X")
    blocking, overlapping = Plan("", "", "none", blocking=("X",)), Plan("", "", "lancet-dw")
    return [(blocking, simulate(alone, given, blocking=("X",))), (overlapping, simulate(beside, given))]


def test_longer_exchanges_make_another_plan_faster() -> None:
    """32 and 34 ms with even rows; 37 and 34 where exchanges take 1.5 times as long."""
    assert faster(candidates(), 1.2, 1.2) == ""
    assert faster(candidates(), 1.0, 1.22) == "", "34.2 ms: within two percent"
    said = faster(candidates(), 1.2, 1.8)
    assert (
        "1.80 times the mean of rows, 1.20 times in the first step: lancet-dw is predicted 8% faster" in said
    )


def test_a_plan_that_was_chosen_against_its_prediction_is_not_stale() -> None:
    """34 ms beside 32 from the first step on; only what routing changes counts."""
    overlapping_first = candidates()[::-1]
    assert faster(overlapping_first, 1.2, 1.2) == ""
    assert faster(overlapping_first, 1.2, 1.8) == "", "34 and 37 ms"
    assert "none is predicted 10% faster" in faster(overlapping_first, 1.8, 1.2)


class Routed(nn.Module):
    """A token goes to the expert that its largest number says."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoELayer(8, 8, E, capacity_factor=None)
        with torch.no_grad():
            self.moe.router.copy_(torch.eye(E, 8))

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.moe(x_TD).sum()


def calls() -> list[str]:
    """What is said before each call, and behind the last; the second call is skewed."""
    torch.manual_seed(0)
    even_TD = torch.eye(8)[torch.arange(8) % E]
    skewed_TD = torch.eye(8)[torch.zeros(8, dtype=torch.int64)]
    module = optimized(Routed(), (even_TD,), "none", compare_every=2)
    module._staleness = Staleness(module._step, candidates(), 2)
    said = []
    for x_TD in (even_TD, skewed_TD, even_TD, even_TD, even_TD):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module(x_TD).backward()
        said.append(" ".join(str(one.message) for one in caught))
    return [*said, module.stale()]


def test_calls_are_counted_and_the_next_one_says_it(pool: RankPool) -> None:
    first, second = pool.run(calls)
    assert first == second
    assert "gets 2.00 times the mean of rows, 1.00 times in the first step" in first[2]
    assert first[:2] + first[3:] == [""] * 5
