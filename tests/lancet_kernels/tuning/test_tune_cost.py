"""Measuring fused launches for the planner: which are timed, that all run, and what is stored as what."""

from __future__ import annotations

import dataclasses
import json
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lancet_kernels.cli import main
from lancet_kernels.graph.cost_entry import INTERPRETER, LayerKind
from lancet_kernels.graph.measured_launches import measured_launches
from lancet_kernels.kernels import tuning
from lancet_kernels.kernels.gemm_config import GemmConfig
from lancet_kernels.kernels.overlap_config import OverlapConfig
from lancet_kernels.kernels.tuning import TunedCache
from lancet_kernels.measuring.timing import Clock
from lancet_kernels.tuning import tune_cost, tune_tasks
from lancet_kernels.tuning.background_compiler import BackgroundCompiler
from lancet_kernels.tuning.candidates import Outcome
from lancet_kernels.tuning.place import Place
from lancet_kernels.tuning.tune_cost import CostOutcome, launches_of, measure_points
from lancet_kernels.tuning.tune_ranks import Ranks
from lancet_kernels.tuning.tune_tasks import make_tasks
from lancet_kernels.tuning.tuner import tune
from lancet_kernels.tuning.workloads import WORKLOADS, Workload
from tests.graph.cost_points import costs_of

TINY = Workload("tiny", 16, 16, 16, 4, 2)
# Four programs, of which one puts: enough for every kind of launch to differ.
SMALL = OverlapConfig(
    GemmConfig(16, 16, 16, 1, 1), put_rows=4, put_block=16, reduce_tokens=4, reduce_block=16, programs=4
)
PLACE = Place(torch.device("cpu"), "NVIDIA H100 80GB HBM3", 90, 132)
CPU = Clock(torch.device("cpu"))
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")


@pytest.fixture
def cache(tmp_path) -> TunedCache:
    return TunedCache(tmp_path / "tuned.json")


def small_task(monkeypatch):
    """The overlap task of the tiny workload, with one candidate: what the interpreter runs in no time."""
    (task,) = make_tasks([TINY], torch.float32, ["overlap"])
    made_up = dataclasses.replace(
        task.tunable, candidates=lambda task, place: [SMALL], specimens=lambda task, config, arch: []
    )
    monkeypatch.setitem(tune_tasks._TUNABLES, "overlap", made_up)
    monkeypatch.setattr(BackgroundCompiler, "judge", lambda *_: True)
    return task


@pytest.fixture
def once(monkeypatch) -> None:
    """A pass takes a second in the interpreter: no warm-up, and two numbers of tokens."""
    monkeypatch.setattr(tune_cost, "WARMUP", 0)
    monkeypatch.setattr(tune_cost, "TOKEN_SHARES", (1, 2))


def test_twelve_launches_a_shape_of_three_sizes() -> None:
    tokens = WORKLOADS["gpt2-s-moe"].tokens
    launches = launches_of(WORKLOADS["gpt2-s-moe"])
    assert len(set(launches)) == len(launches) == 12
    for share in (1, 2, 4):
        of_size = {(direction, riders) for direction, count, riders in launches if count * share == tokens}
        # Nothing rides in a forward.
        assert of_size == {("forward", 0), ("backward", 0), ("backward", 1), ("backward", 4)}


@pytest.mark.long
@without_gpu
def test_every_launch_runs_and_gives_a_point_also_where_a_direction_is_two_launches(once) -> None:
    config = dataclasses.replace(SMALL, split=True)
    points = measure_points(TINY, torch.float32, config, CPU, Ranks(), rounds=1)
    assert len({(p.direction, p.rows, p.rider_flops) for p in points}) == len(points) == 8
    assert all(p.ms > 0 for p in points)
    assert max(p.rows for p in points) <= TINY.tokens * TINY.choices
    one = 2.0 * TINY.tokens * TINY.width**2
    assert {p.rider_flops for p in points if p.direction == "backward"} == {0.0, one, 4 * one}
    assert {p.rider_flops for p in points if p.direction == "forward"} == {0.0}


def two_ranks() -> list[tuple]:
    clock = Clock(torch.device("cpu"))
    slow = clock.once
    # By its clock, rank 1 takes a second longer for everything.
    clock.once = lambda work: slow(work) + 1000.0 * dist.get_rank()
    with mock.patch.multiple(tune_cost, WARMUP=0, TOKEN_SHARES=(1,)):
        found = measure_points(TINY, torch.float32, SMALL, clock, Ranks(), rounds=1)
    return [(p.direction, p.rows, p.rider_flops, p.ms) for p in found]


@pytest.mark.long
@without_gpu
def test_ranks_have_the_same_points_and_the_slowest_one_counts(pool) -> None:
    first, second = pool.run(two_ranks, timeout_s=240)
    assert first == second
    assert all(ms > 1000 for *_, ms in first)


@pytest.mark.long
@without_gpu
def test_what_the_interpreter_took_is_stored_as_that_and_never_taken_for_a_gpu(
    cache, monkeypatch, once
) -> None:
    """Although the place says that it is an H100."""
    task = small_task(monkeypatch)
    (outcome,) = tune([task], PLACE, cache, clock=CPU, rounds=1)
    assert (outcome.status, outcome.cost.status) == ("tuned", "measured")
    ((key, entry),) = costs_of(cache).entries().items()
    assert (entry.device, entry.how) == (INTERPRETER, INTERPRETER)
    assert key.endswith("on interpreter, 1 ranks")
    assert len(entry.points) == outcome.cost.launches == len(launches_of(TINY))
    monkeypatch.setenv("LANCET_TUNED", str(cache.path))
    monkeypatch.setattr(tuning, "device_name", lambda device: (PLACE.name, 90))
    kind = LayerKind(16, 16, "gelu", "float32", 1)
    assert measured_launches(kind, torch.device("cuda", 0))[0] is None
    assert measured_launches(kind, torch.device("cpu"))[0] is None
    # A second run finds both, the configuration and its cost.
    monkeypatch.setattr(tune_cost, "measure_points", None)
    (again,) = tune([task], PLACE, cache, clock=CPU, rounds=1)
    assert (again.status, again.cost.status) == ("known", "known")


@pytest.mark.long
def test_a_cost_that_is_missing_is_measured_although_the_configuration_is_known(cache, monkeypatch) -> None:
    task = small_task(monkeypatch)
    asked = []

    def measure(workload, dtype, config, clock, ranks, rounds):
        asked.append(config)
        return []

    monkeypatch.setattr(tune_cost, "measure_points", measure)
    tune([task], PLACE, cache, clock=CPU, rounds=1)
    cache.path.write_text(
        json.dumps({k: v for k, v in json.loads(cache.path.read_text()).items() if k != "costs"})
    )
    (outcome,) = tune([task], PLACE, cache, clock=CPU, rounds=1)
    assert (outcome.status, outcome.cost.status) == ("known", "measured")
    assert asked == [SMALL, SMALL]
    assert outcome.cost.text.startswith(
        "too few measurements to plan with: forward launches with 0 numbers of rows"
    )
    # Another configuration's, or all again.
    monkeypatch.setattr(Outcome, "config", dataclasses.replace(SMALL, comm_programs=2))
    assert tune([task], PLACE, cache, clock=CPU, rounds=1)[0].cost.status == "measured"
    assert tune([task], PLACE, cache, clock=CPU, rounds=1)[0].cost.status == "known"
    assert tune([task], PLACE, cache, clock=CPU, rounds=1, force=True)[0].cost.status == "measured"


def test_no_time_leaves_it_for_the_next_run_and_what_does_not_run_is_said(cache, monkeypatch) -> None:
    task = small_task(monkeypatch)

    def fails(*_):
        raise RuntimeError("no shared memory\nat all")

    monkeypatch.setattr(tune_cost, "measure_points", fails)
    common = {"rounds": 1, "force": False, "save": True}
    late = tune_cost.cost_of_winner(task, SMALL, PLACE, cache, Ranks(), CPU, in_time=False, **common)
    assert late == CostOutcome("left", len(launches_of(TINY)))
    failed = tune_cost.cost_of_winner(task, SMALL, PLACE, cache, Ranks(), CPU, in_time=True, **common)
    assert (failed.status, failed.text) == ("failed", "does not run: no shared memory")
    assert costs_of(cache).entries() == {}


@without_gpu
def test_a_dry_run_says_how_many_launches(capsys, tmp_path) -> None:
    cache = str(tmp_path / "x.json")
    arguments = ["tune", "--kinds", "overlap", "--workload", "gpt2-s-moe", "--cache", cache]
    assert main([*arguments, "--dry-run"]) == 0
    assert "fused launches: 12 launches, each 15 times, would be timed\n" in capsys.readouterr().out
    assert main([*arguments, "--dry-run", "--json"]) == 0
    (task,) = json.loads(capsys.readouterr().out)["tasks"]
    assert task["cost"] == {"status": "dry-run", "launches": 12, "text": ""}
    assert not list(tmp_path.iterdir())
