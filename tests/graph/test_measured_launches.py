"""What was measured of fused launches, in the cache: who finds it, and what becomes of corrupt records."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest
import torch

from lancet_kernels.graph.cost_entry import INTERPRETER, LayerKind
from lancet_kernels.graph.measured_launches import measured_launches
from lancet_kernels.kernels import tuning
from lancet_kernels.kernels.tuning import TunedCache
from tests.graph.cost_points import CONFIG, GPU, cost_entry, costs_of, fast, put, slow, tuned_entry
from tests.processes import processes
from tests.tuned_cache import cache as cache

KIND = LayerKind(2048, 2048, "gelu", "bfloat16", 8)
GPU_DEVICE = torch.device("cuda", 0)


def test_what_was_stored_comes_back(cache) -> None:
    entry = cost_entry(KIND)
    put(cache, [tuned_entry(KIND)], [entry])
    assert costs_of(cache).entries() == {entry.key: entry}
    cost, words = measured_launches(KIND, GPU_DEVICE)
    assert cost.milliseconds("backward", 40000, 2e11) == pytest.approx(fast("backward", 40000, 2e11))
    assert words == (
        f"measured 2026-11-21 on {GPU}, 8 ranks, 12 launches: 65536 rows take 1.100 ms forward, "
        "2.100 ms backward"
    )


def test_the_packages_table_goes_first(cache) -> None:
    put(cache, [tuned_entry(KIND)], [cost_entry(KIND)])
    put(TunedCache(tuning.PACKAGE_TABLE), [tuned_entry(KIND)], [cost_entry(KIND, slow)])
    cost, _ = measured_launches(KIND, GPU_DEVICE)
    assert cost.milliseconds("forward", 16384) == pytest.approx(slow("forward", 16384, 0.0))


@pytest.mark.parametrize(
    "other",
    [{"ranks": 4}, {"width": 1024}, {"hidden": 1024}, {"activation": "swiglu"}, {"dtype": "float16"}],
    ids=str,
)
def test_another_sort_of_layer_is_not_measured_by_it(cache, other) -> None:
    put(cache, [tuned_entry(KIND)], [cost_entry(KIND)])
    cost, words = measured_launches(replace(KIND, **other), GPU_DEVICE)
    assert cost is None
    assert words.startswith("nothing is measured for overlap width=")


def test_another_device_the_cpu_and_the_interpreter_are_not_measured_by_it(cache, monkeypatch) -> None:
    put(cache, [tuned_entry(KIND)], [cost_entry(KIND)])
    assert measured_launches(KIND, torch.device("cpu")) == (None, "nothing is measured on a CPU")
    monkeypatch.setattr(tuning, "device_name", lambda device: ("NVIDIA A100-SXM4-80GB", 80))
    assert measured_launches(KIND, GPU_DEVICE)[0] is None
    cache.path.unlink()
    proof = cost_entry(KIND, device=INTERPRETER, how=INTERPRETER)
    put(cache, [tuned_entry(KIND)], [proof])
    assert costs_of(cache).entries() == {proof.key: proof}
    for name in (GPU, INTERPRETER):
        monkeypatch.setattr(tuning, "device_name", lambda device, name=name: (name, 90))
        assert measured_launches(KIND, GPU_DEVICE)[0] is None


def test_points_of_a_configuration_that_is_no_longer_taken_are_not_taken(cache) -> None:
    put(cache, [tuned_entry(KIND, replace(CONFIG, comm_programs=33))], [cost_entry(KIND)])
    cost, words = measured_launches(KIND, GPU_DEVICE)
    assert cost is None
    assert "another configuration" in words


def test_too_few_points_are_said_to_be_that(cache) -> None:
    entry = cost_entry(KIND)
    put(cache, [tuned_entry(KIND)], [replace(entry, points=entry.points[:5])])
    cost, words = measured_launches(KIND, GPU_DEVICE)
    assert cost is None
    assert words.startswith("there are too few measurements for overlap width=2048")
    assert "backward launches with 1 numbers of rows, at least 2 are needed" in words


def test_a_file_without_costs_is_read_as_ever_and_keeps_its_entries(cache) -> None:
    put(cache, [tuned_entry(KIND)])
    assert "costs" not in json.loads(cache.path.read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert costs_of(cache).entries() == {}
    put(cache, [], [cost_entry(KIND)])
    put(cache, [tuned_entry(replace(KIND, width=1024))])
    assert len(cache.entries()) == 2
    assert len(costs_of(cache).entries()) == 1


@pytest.mark.parametrize("costs", [5, "text", [1, 2], None, True])
def test_corrupt_costs_are_ignored_with_one_warning_and_the_entries_stay(cache, costs) -> None:
    put(cache, [tuned_entry(KIND)])
    data = json.loads(cache.path.read_text())
    cache.path.write_text(json.dumps(data | {"costs": costs}))
    stored = costs_of(cache)
    with pytest.warns(UserWarning, match="measured costs in .* not readable"):
        assert stored.entries() == {}
    assert len(cache.entries()) == 1
    stored.put([cost_entry(KIND)])
    assert len(stored.entries()) == 1


def nested(data: dict, change: dict) -> dict:
    """`data` with some of its values changed, those of dicts one by one."""
    return {
        key: nested(value, change[key]) if isinstance(value, dict) and isinstance(change.get(key), dict)
        else change.get(key, value)
        for key, value in data.items()
    } | {key: value for key, value in change.items() if key not in data}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"points": 5},
        {"points": [5]},
        {"points": [{"direction": "forward"}]},
        {"points": [{"direction": "forward", "rows": -1, "rider_flops": 1, "ms": 1}]},
        {"points": [{"direction": "forward", "rows": 1, "rider_flops": 1, "ms": None}]},
        {"points": [{"direction": "up", "rows": 1, "rider_flops": 1, "ms": 1}]},
        # As versions before 2026-11-22 had them.
        {"points": [{"direction": "forward", "work": {"bytes": 1, "expert_flops": 1}, "ms": 1}]},
        {"config": {"programs": 4}},
        {"config": None},
        {"kind": {"ranks": 9}},
        {"kind": {"width": 2048, "more": 1}},
        {"kind": None},
        {"how": "guessed"},
        {"how": INTERPRETER},
        {"device": INTERPRETER},
        {"unknown": 1},
    ],
    ids=str,
)
def test_one_corrupt_record_is_ignored_with_a_warning_and_the_others_stay(cache, change) -> None:
    good, bad = cost_entry(replace(KIND, ranks=4)), cost_entry(KIND)
    put(cache, [tuned_entry(KIND)], [good, bad])
    data = json.loads(cache.path.read_text())
    if change == {"config": {"programs": 4}}:
        data["costs"][bad.key]["config"] = change["config"]
    else:
        data["costs"][bad.key] = nested(data["costs"][bad.key], change)
    cache.path.write_text(json.dumps(data))
    fresh = costs_of(cache)
    with pytest.warns(UserWarning, match="is ignored"):
        assert fresh.entries() == {good.key: good}
    with pytest.warns(UserWarning, match="is ignored"):
        assert measured_launches(KIND, GPU_DEVICE)[0] is None


def put_many(path: str, process: int) -> None:
    for number in range(5):
        kind = LayerKind(64, 64, "gelu", "bfloat16", 10 * process + number + 1)
        put(TunedCache(path), [tuned_entry(replace(kind, width=64 + kind.ranks))], [cost_entry(kind)])


@pytest.mark.long
def test_processes_that_write_at_once_lose_nothing(cache) -> None:
    context = processes()
    writers = [context.Process(target=put_many, args=(str(cache.path), p)) for p in range(2)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    assert [process.exitcode for process in writers] == [0, 0]
    assert (len(costs_of(cache).entries()), len(cache.entries())) == (10, 10)
