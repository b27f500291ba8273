"""The cost function of fused launches: what it says, and whether a fit finds it again from made-up points."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lancet_kernels.kernels.fit_cost import LARGEST_ERROR, fit_cost
from lancet_kernels.kernels.fused_cost import CostPoint, FusedCost, LaunchWork
from tests.grids import few_of
from tests.lancet_kernels.kernels.cost_points import TRUTH, made_up_points

EXAMPLE = LaunchWork(200e6, 1e12, 0.0, 132, 16, early_flops=0.5e12)


def test_the_example_of_the_docstring() -> None:
    assert TRUTH.communication_ms(EXAMPLE) == pytest.approx(1.527, abs=1e-3)
    assert TRUTH.gemm_ms(EXAMPLE) == pytest.approx(1.775, abs=1e-3)
    assert TRUTH.milliseconds(EXAMPLE) == pytest.approx(2.002, abs=1e-3)
    riding = replace(EXAMPLE, independent_flops=0.232e12)
    assert TRUTH.communication_ms(riding) == pytest.approx(1.76)
    assert TRUTH.milliseconds(riding) == pytest.approx(2.272, abs=1e-3)


def test_a_rank_alone_puts_before_it_computes() -> None:
    alone = replace(EXAMPLE, early_flops=0.0)
    assert TRUTH.communication_ms(alone) == pytest.approx(1.01)
    assert TRUTH.gemm_ms(alone) == pytest.approx(2.015, abs=1e-3)


def test_the_backward_of_a_pass_has_twice_the_work_and_the_same_rows() -> None:
    grid = {"programs": 132, "comm_programs": 16}
    forward = LaunchWork.of_pass("forward", 1000, 64, 256, "gelu", 2, 4, **grid)
    assert (forward.bytes, forward.expert_flops) == (1000 * 64 * 2, 2 * 1000 * 64 * 256 * 2)
    backward = LaunchWork.of_pass("backward", 1000, 64, 256, "gelu", 2, 4, **grid)
    assert (backward.bytes, backward.expert_flops) == (forward.bytes, 2 * forward.expert_flops)
    # Three of four ranks' rows are here before the last ones come, and dW needs all of them.
    assert forward.early_flops == backward.early_flops == 0.75 * forward.expert_flops
    # swiglu's first weight has 2F columns.
    swiglu = LaunchWork.of_pass("forward", 1000, 64, 256, "swiglu", 2, 4, **grid)
    assert swiglu.expert_flops == 1.5 * forward.expert_flops


@pytest.mark.parametrize("name", ["bytes", "expert_flops", "independent_flops"])
@pytest.mark.parametrize("comm_programs", few_of([1, 16, 132], 1))
def test_more_work_never_takes_less_time(name, comm_programs) -> None:
    base = replace(EXAMPLE, comm_programs=comm_programs, independent_flops=0.1e12)
    times = [TRUTH.milliseconds(replace(base, **{name: step * getattr(base, name)})) for step in range(9)]
    assert times == sorted(times)
    assert times[-1] > times[0]


def test_programs_that_put_are_missing_where_it_is_computed() -> None:
    """More of them shift the balance from computing to communication, until the link is full."""
    works = [LaunchWork(400e6, 0.1e12, 0.4e12, 132, c) for c in (2, 4, 8, 16, 32, 40, 64, 128)]
    communication = [TRUTH.communication_ms(work) for work in works]
    assert communication == sorted(communication, reverse=True)
    assert communication[0] > 1.2 * communication[5]
    # 40 programs fill the link of 400 GB/s; beyond, they only lack.
    assert communication[5] == pytest.approx(communication[6])
    assert TRUTH.gemm_ms(works[6]) > TRUTH.gemm_ms(works[5])
    best = min(works, key=TRUTH.milliseconds)
    assert best.comm_programs not in (2, 128)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_fit_finds_the_parameters_again(direction) -> None:
    points = [p for p in made_up_points() if p.direction == direction]
    found = fit_cost(points)
    for name, expected in vars(TRUTH).items():
        assert getattr(found, name) == pytest.approx(expected, rel=1e-3, abs=1e-4), name
    assert found.error(points) < 1e-6


def test_a_fit_of_noisy_points_is_near() -> None:
    noise = random.Random(0)
    points = [
        replace(p, ms=p.ms * noise.gauss(1, 0.03)) for p in made_up_points() if p.direction == "backward"
    ]
    found = fit_cost(points)
    assert found.efficiency == pytest.approx(TRUTH.efficiency, rel=0.1)
    assert found.link_gb_per_s == pytest.approx(TRUTH.link_gb_per_s, rel=0.1)
    assert found.program_gb_per_s == pytest.approx(TRUTH.program_gb_per_s, rel=0.2)
    assert found.program_tflops == pytest.approx(TRUTH.program_tflops, rel=0.1)
    for work in (EXAMPLE, replace(EXAMPLE, independent_flops=0.2e12, comm_programs=33)):
        assert found.milliseconds(work) == pytest.approx(TRUTH.milliseconds(work), rel=0.1)
    assert found.error(points) < 0.06


@pytest.mark.parametrize(
    ("link", "program"),
    [(30.0, 10.0), (5000.0, 10.0)],
    ids=["the link is always full", "the link is never full"],
)
def test_what_was_never_the_limit_is_not_made_up(link, program) -> None:
    truth = replace(TRUTH, link_gb_per_s=link, program_gb_per_s=program)
    points = [p for p in made_up_points(truth) if p.direction == "backward"]
    found = fit_cost(points)
    # As fast as the grids that were seen, no faster.
    assert found.link_gb_per_s == pytest.approx(min(link, 132 * program), rel=1e-3)
    assert found.program_gb_per_s == pytest.approx(min(program, link / 8), rel=1e-3)
    for point in (p for p in points if p.kind == "fused"):
        assert found.milliseconds(point.work) == pytest.approx(point.ms, rel=0.01)


@pytest.mark.parametrize("kind", ["put", "gemm", "fused"])
def test_too_few_points_are_refused_by_name(kind) -> None:
    points = [p for p in made_up_points() if p.direction == "forward"]
    one_size = max(p.work.bytes or p.work.expert_flops for p in points if p.kind == kind)
    few = [p for p in points if p.kind != kind or (p.work.bytes or p.work.expert_flops) == one_size]
    words = {"put": "puts alone", "gemm": "GEMMs alone", "fused": "fused launches"}
    with pytest.raises(ValueError, match=f"{words[kind]} of 1 sizes, at least 2"):
        fit_cost(few)
    with pytest.raises(ValueError, match="of 0 sizes"):
        fit_cost([])


@pytest.mark.parametrize("kind", ["put", "gemm", "fused"])
def test_times_that_shrink_with_the_size_are_refused(kind) -> None:
    points = [
        replace(p, ms=1e3 / p.ms**3) if p.kind == kind else p
        for p in made_up_points() if p.direction == "forward"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="does not grow"):
        fit_cost(points)


def test_a_function_that_misses_its_own_points_is_refused() -> None:
    chaos = random.Random(1)
    points = [
        replace(p, ms=p.ms * chaos.choice((0.1, 1, 10))) if p.kind == "fused" else p
        for p in made_up_points() if p.direction == "backward"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="misses"):
        fit_cost(points)
    assert LARGEST_ERROR < 0.5


@pytest.mark.parametrize(
    "change",
    [{"bytes": -1.0}, {"bytes": float("nan")}, {"bytes": "8"}, {"bytes": True}, {"bytes": None},
     {"expert_flops": float("inf")}, {"programs": 0}, {"programs": 2.5}, {"comm_programs": 133}],
)  # fmt: skip
def test_work_that_cannot_be_is_refused(change) -> None:
    with pytest.raises(ValueError, match=r"is|put"):
        replace(EXAMPLE, **change)


@pytest.mark.parametrize(
    ("direction", "ms"), [("sideways", 1.0), ("forward", 0.0), ("forward", -1.0), ("forward", "1")]
)
def test_points_that_cannot_be_are_refused(direction, ms) -> None:
    with pytest.raises(ValueError, match=r"direction|ms"):
        CostPoint(direction, EXAMPLE, ms)


def test_sorts_of_points() -> None:
    assert isinstance(TRUTH, FusedCost)
    assert CostPoint("forward", EXAMPLE, 1.0).kind == "fused"
    assert CostPoint("forward", replace(EXAMPLE, bytes=0.0), 1.0).kind == "gemm"
    assert CostPoint("forward", replace(EXAMPLE, expert_flops=0.0), 1.0).kind == "put"
