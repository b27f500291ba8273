"""Files of `optimize`: plans and measured times; what fits is used, the rest is said and made anew."""

import contextlib
import io
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import lancet_kernels.optimization.planning as library
from lancet_kernels import UserError
from lancet_kernels.optimization.optimize import optimize
from lancet_kernels.schedules.cut.partition_range import PartitionOptions
from lancet_kernels.schedules.plan import Plan
from lancet_kernels.schedules.strategies import Planner, PlanningOptions
from tests.grids import few_of
from tests.optimized import BOUND, outcome_of
from tests.planned_steps import SmallStep, StepCase, build_step

IN_TWO_PARTS = PlanningOptions(PartitionOptions(most_parts=2))


@pytest.fixture(scope="module")
def small_step() -> SmallStep:
    """A captured step of this one process."""
    return SmallStep(StepCase(layers=2))


@pytest.fixture(scope="module")
def plan(small_step) -> Plan:
    return library.plans_for(small_step.costed(), "lancet", IN_TWO_PARTS, None, 1)[0]


def plans_on_rank(cache: str) -> None:
    """The file is missing, then there, then given."""
    module, inputs = build_step(StepCase(layers=2))
    plain = outcome_of(module, inputs, reduced=False)
    for number, name in enumerate(("cache", "cache", "plan")):
        with counted_plans() as planned, contextlib.redirect_stderr(io.StringIO()) as said:
            ready = optimize(module, inputs, cluster="p3dn", reduce_gradients="sum", **{name: cache})
        assert bool(planned) == (dist.get_rank() == 0 and number == 0), "rank 0 alone plans, once"
        assert said.getvalue() == ""
        # Its sums wait for rank 0, which writes the file.
        assert outcome_of(ready, inputs, reduced=True).distance(plain) < BOUND
        assert Plan.load(cache).fingerprint == ready.plan.fingerprint, "the file has another plan"


@contextlib.contextmanager
def counted_plans():
    """Strategies that are planned inside the block."""
    planned: list[str] = []
    candidates = Planner.candidates

    def counted(planner: Planner, strategy: str, most: int) -> list[Plan]:
        planned.append(strategy)
        return candidates(planner, strategy, most)

    with mock.patch.object(Planner, "candidates", counted):
        yield planned


def edited(change: Callable[[dict], object]) -> Callable[[str], str]:
    """Does something to the values of a file."""

    def spoil(text: str) -> str:
        data = json.loads(text)
        change(data)
        return json.dumps(data)

    return spoil


SPOILED: dict[str, Callable[[str], str | bytes]] = {
    "fitting": lambda text: text,
    "damaged": lambda text: text[:100],
    "binary": lambda _: b"\xff\x00\x81",
    "list": lambda _: "[1, 2]",
    "deep": lambda _: "[" * 100_000 + "]" * 100_000,
    "foreign": edited(lambda data: data.update(program_fingerprint="0" * 64)),
    "reordered": edited(lambda data: data["order"].reverse()),
    "numbers": edited(lambda data: data.update(order=[*range(len(data["order"]))])),
    "strange parts": edited(lambda data: data["ranges"][0].update(parts="two")),
    "no parts": edited(lambda data: data["ranges"][0].update(parts=0)),
    "other strategy": edited(lambda data: data.update(strategy="tutel")),
}
"""What becomes of a fitting plan file."""


def write_plan_file(plan: Plan, path: Path, kind: str) -> None:
    plan.save(path)
    text = SPOILED[kind](path.read_text())
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.mark.parametrize("kind", few_of(SPOILED, 0, 1, 4, 7))
def test_plan_files(small_step, plan, tmp_path, caplog, kind):
    path = tmp_path / "plan.json"
    write_plan_file(plan, path, kind)
    with counted_plans() as planned:
        again = library.plans_for(small_step.costed(), "lancet", IN_TWO_PARTS, path, 1)[0]
    again.save(path)
    assert plan.ranges, "nothing was cut, so no part can be strange"
    assert again.fingerprint == plan.fingerprint == Plan.load(path, small_step.program).fingerprint
    assert len(planned) == (kind != "fitting")
    ignored = kind not in ("fitting", "other strategy")
    assert [message.startswith("planning anew: ") for message in caplog.messages] == [True] * ignored


@pytest.mark.long
def test_plan_of_other_options_is_made_anew(small_step, tmp_path, monkeypatch):
    for name in ("LANCET_RHO", "LANCET_GAMMA", "LANCET_IOTA"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "plan.json"

    def plan(given: PlanningOptions | None) -> bool:
        """-> whether it was planned anew."""
        options = library.on_device(given, torch.device("cpu"), "")
        with counted_plans() as planned:
            library.plans_for(small_step.costed(), "lancet", options, path, 1)[0].save(path)
        return bool(planned)

    two, three = IN_TWO_PARTS, PlanningOptions(PartitionOptions(most_parts=3))
    assert [plan(three), plan(three), plan(two), plan(two)] == [True, False, True, False]
    monkeypatch.setenv("LANCET_RHO", "2")
    assert not plan(None), "the environment says the same"
    assert all(r.parts == 2 for r in Plan.load(path).ranges)
    assert plan(replace(two, memory_limit_gb=1e3))


@pytest.mark.parametrize(
    "kind", few_of(["fitting", "damaged", "foreign", "reordered", "other strategy"], 0, 2)
)
def test_given_plan_is_used_or_refused(small_step, plan, tmp_path, kind):
    path = tmp_path / "plan.json"
    write_plan_file(plan, path, kind)
    with contextlib.nullcontext() if kind == "fitting" else pytest.raises(UserError):
        assert library.plan_of_file(path, small_step.costed(), "lancet").fingerprint == plan.fingerprint


@pytest.mark.long
def test_plan_files_of_two_ranks(pool, tmp_path):
    pool.run(plans_on_rank, str(tmp_path / "plan.json"), ranks=2, timeout_s=120)


def times_on_rank(times: str) -> tuple[list[str], list[str], float]:
    """Warnings of two calls that measure, the first one with a damaged file; distance from the module."""
    module, inputs = build_step(StepCase(layers=2))
    plain = outcome_of(module, inputs, reduced=False)
    said = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ready = optimize(module, inputs, strategy="none", times=times, reduce_gradients="sum")
        said.append([str(w.message) for w in caught if "measured times" in str(w.message)])
    return (*said, outcome_of(ready, inputs, True).distance(plain))


@pytest.mark.long
def test_damaged_times_are_measured_again(pool, tmp_path):
    path = tmp_path / "times.json"
    path.write_text('{"format": "lancet-meas')
    first, second = pool.run(times_on_rank, str(path), ranks=2, timeout_s=180)
    for damaged, _, distance in (first, second):
        assert len(damaged) <= 1
        assert distance < BOUND
    assert len(first[0]) == 1
    assert "ignored and will be measured again" in first[0][0]
    assert not first[1]
    assert not second[1]
    kept = json.loads(path.read_text())
    assert kept["format"] == "lancet-measured-times"
    assert len(kept["milliseconds"]) > 20
