"""`lancet explain`: a saved plan, and the difference of two."""

import json
from dataclasses import replace

import pytest

from lancet_kernels.cli import main
from lancet_kernels.commands.explain import difference
from lancet_kernels.schedules.fuse.fused_prediction import LaunchWork
from lancet_kernels.schedules.partition.ranges import PartitionRange
from lancet_kernels.schedules.plan import FusedGroup, Plan

TINY = ["plan", "--model", "gpt2-tiny-moe", "--gpus", "8", "--most-parts", "2"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    for strategy in ("none", "tutel"):
        assert main([*TINY, "--gate", "hash", "--strategy", strategy, "--save", str(folder / strategy)]) == 0
    return [str(folder / name) for name in ("none", "tutel")]


@pytest.mark.long
def test_a_plan_and_the_difference_of_two(files, capsys):
    assert main(["explain", files[0]]) == 0
    assert capsys.readouterr().out.startswith("Plan `none` for gpt2-tiny-moe, 8 GPUs")
    assert main(["explain", files[0], files[0]]) == 0
    assert capsys.readouterr().out.endswith("\n\nBoth plans run the same.\n")
    assert main(["explain", *files]) == 0
    out = capsys.readouterr().out
    assert "strategy: none, and tutel" in out
    assert main(["explain", *files, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["different"] == [line for line in out.splitlines() if line][3:]
    assert found["plans"][files[1]]["strategy"] == "tutel"
    assert not found["runs_the_same"]


def test_every_difference_has_a_line(files):
    one = Plan.load(files[0])
    first, second, *rest = one.order
    cut = PartitionRange(first, second, 2, {})
    group = FusedGroup(first, True, (), LaunchWork(1.0, 1.0), LaunchWork(1.0, 1.0), "requested")
    changes = {
        "program: ": {"program_fingerprint": "another"},
        "memory limit gb: 80.0, and 1.0": {"memory_limit_gb": 1.0},
        f"cut in the second only: {first} .. {second} in 2 parts": {"ranges": (cut,)},
        f"fused launch in the second only: {first}": {"fused": (group,)},
        f"computation waits for: {len(one.blocking)} collectives, and 0": {"blocking": ()},
        f"order: 2 of {len(one.order)} common": {"order": (second, first, *rest)},
    }
    assert difference(one, one) == []
    for text, change in changes.items():
        (line,) = difference(one, replace(one, **change))
        assert line.startswith(text)


def test_a_file_that_is_no_plan(tmp_path, capsys):
    assert main(["explain", str(tmp_path / "missing.json")]) == 1
    assert capsys.readouterr().err.count("\n") == 1
