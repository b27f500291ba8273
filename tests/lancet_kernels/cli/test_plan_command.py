"""`lancet plan`: figures for machines and people, files, and one line for whatever is wrong."""

import json
import re
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest

from lancet_kernels.__main__ import main
from lancet_kernels.cli.plan_command import PlanOptions
from lancet_kernels.graph.costs.clusters import cluster_names, load_cluster
from lancet_kernels.predict.simulate import Setting
from lancet_kernels.schedules import STRATEGY_NAMES
from lancet_kernels.schedules.plan import Plan
from tests.grids import few_of

TINY = "plan --model gpt2-tiny-moe --cluster p4de --gpus 16 --most-parts 2".split()
WHOLE_BATCH = ["--gate", "gshard", "--top-k", "2", "--batch", "3"]


def plan_json(capsys, *arguments):
    assert main([*TINY, "--json", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    (line,) = out.splitlines()
    return json.loads(line)


def test_json_has_every_strategy(capsys):
    found = plan_json(capsys)
    figures = "planning_seconds iteration_ms exposed_ms lower_bound_ms peak_memory_gb fits_memory"
    for key in figures.split():
        assert set(found[key]) == set(STRATEGY_NAMES), key
    assert found["simulated"] is True
    assert (found["model"], found["cluster"], found["gpus"]) == ("gpt2-tiny-moe", "p4de", 16)
    assert found["memory_limit_gb"] == 80.0
    assert all(0 <= found["exposed_ms"][s] < found["iteration_ms"][s] for s in STRATEGY_NAMES)
    assert all(0 < found["lower_bound_ms"][s] <= found["iteration_ms"][s] + 1e-9 for s in STRATEGY_NAMES)
    assert found["iteration_ms"]["auto"] == min(found["iteration_ms"].values())
    assert found["chosen"] in STRATEGY_NAMES[:-1]
    assert found["impossible"] == {}
    assert found["planning_seconds"]["auto"] >= max(found["planning_seconds"].values())


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["duplex", "lancet+duplex"])
def test_a_strategy_that_cannot_be_is_refused_and_auto_does_without(strategy, capsys):
    assert main([*TINY, *WHOLE_BATCH, "--strategy", strategy]) != 0
    error = capsys.readouterr().err
    assert "gate 'gshard', which needs the whole batch" in error
    assert "use strategy lancet" in error
    found = plan_json(capsys, *WHOLE_BATCH)
    assert set(found["impossible"]) == {"duplex", "lancet+duplex"}
    assert set(found["iteration_ms"]) == set(STRATEGY_NAMES) - set(found["impossible"])
    assert main([*TINY, *WHOLE_BATCH]) == 0
    assert f"Not possible: {strategy} (strategy duplex: got gate" in capsys.readouterr().out


@pytest.mark.long
def test_the_figures_are_those_of_the_setting(capsys):
    """The unplanned iteration is the sum of what its instructions cost: nothing overlaps."""
    found = plan_json(capsys, *WHOLE_BATCH, "--strategy", "none")
    setting = Setting("gpt2-tiny-moe", "p4de", 16, "gshard", batch=3, top_k=2, dtype="bfloat16")
    program, cost = setting.priced.program, setting.priced.cost
    blocking = sum(cost(i, program.tensors) for i in program.instructions if i.kind.value != "all_reduce")
    assert found["iteration_ms"]["none"] >= blocking
    assert found["batch"] == 3
    assert found["instructions"] == len(program)


@pytest.mark.parametrize(
    ("cluster", "dtype"),
    [("p4de", "bfloat16"), ("dgx-h100", "bfloat16"), ("p3dn", "float32"), ("local", "float32")],
)
def test_default_dtype_is_the_one_that_the_gpus_are_fast_in(cluster: str, dtype: str) -> None:
    """V100s have no tensor cores for bfloat16, a CPU file no number for it."""
    assert PlanOptions(cluster=cluster, gpus=8).setting().dtype == dtype
    assert PlanOptions(cluster=cluster, gpus=8, dtype="fp16").setting().dtype == "float16"


@pytest.mark.long
def test_flags_win_over_the_environment(capsys, monkeypatch):
    monkeypatch.setenv("LANCET_RHO", "2")
    monkeypatch.setenv("LANCET_GAMMA", "0.5")
    found = plan_json(capsys, "--longest-range-ms", "30")
    wanted = {"most_parts": 2, "group_ms": 0.5, "longest_range_ms": 30.0}
    assert found["planning_options"] == {"partition": wanted, "memory_limit_gb": 80.0}
    found = plan_json(capsys, "--most-parts", "4", "--group-ms", "1")
    wanted = {"most_parts": 4, "group_ms": 1.0, "longest_range_ms": None}
    assert found["planning_options"] == {"partition": wanted, "memory_limit_gb": 80.0}
    monkeypatch.setenv("LANCET_IOTA", "long")
    assert main(TINY) == 1
    assert "LANCET_IOTA: got long" in capsys.readouterr().err


def test_text_explains_the_chosen_strategy(capsys):
    assert main([*TINY, "--strategy", "tutel"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Simulated, nothing was run: gpt2-tiny-moe")
    assert "Plan `tutel`" in out
    assert all(name in out for name in STRATEGY_NAMES)
    assert "Does not fit" not in out


@pytest.mark.long
def test_a_plan_that_does_not_fit_is_said(capsys):
    assert main([*TINY, "--memory-gb", "0.001"]) == 0
    assert "Does not fit" in capsys.readouterr().out


def test_saved_plan_is_the_one_reported(capsys, tmp_path):
    path = tmp_path / "plan.json"
    found = plan_json(capsys, "--strategy", "lancet-dw", "--save", str(path))
    plan = Plan.load(path, Setting("gpt2-tiny-moe", "p4de", 16, dtype="bfloat16").priced.program)
    assert plan.strategy == "lancet-dw"
    assert plan.fingerprint == found["plan_fingerprint"]
    assert plan.report.predicted.iteration_ms == found["iteration_ms"]["lancet-dw"]


@pytest.mark.parametrize("strategy", few_of(STRATEGY_NAMES, 4))
def test_trace_has_a_track_per_resource_without_overlaps(capsys, tmp_path, strategy):
    path = tmp_path / "trace.json"
    found = plan_json(capsys, "--strategy", strategy, "--trace", str(path))
    entries = json.loads(path.read_text())["traceEvents"]
    tracks = {}
    for e in entries:
        if e["ph"] == "X":
            tracks.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    assert set(tracks) == {0, 1}
    for spans in tracks.values():
        # A nanosecond: timestamps in microseconds are rounded sums.
        assert all(a[1] <= b[0] + 1e-3 for a, b in pairwise(sorted(spans)))
    last = max(end for spans in tracks.values() for _, end in spans)
    assert last / 1e3 == pytest.approx(found["iteration_ms"][strategy])
    assert "weight gradient" in {e.get("cat") for e in entries}


@pytest.mark.long
def test_a_cluster_file_of_ones_own(capsys, tmp_path):
    source = Path(__file__).parents[3] / "graph" / "costs" / "clusters" / "p4de.toml"
    path = tmp_path / "mine.toml"
    text = source.read_text().replace('name = "p4de"', 'name = "mine"')
    path.write_text(text.replace("inter_node_gb_per_s = 50.0", "inter_node_gb_per_s = 5.0"))
    slow, fast = plan_json(capsys, "--cluster", str(path)), plan_json(capsys)
    assert slow["cluster"] == "mine"
    assert slow["exposed_ms"]["none"] > 2 * fast["exposed_ms"]["none"]


WRONG = {
    "model": (["--model", "gpt5"], "model: got 'gpt5'"),
    "cluster": (["--cluster", "nowhere"], "cluster: got 'nowhere'"),
    "cluster file": (["--cluster", "/nowhere/c.toml"], "cluster file: got /nowhere/c.toml"),
    "gate": (["--gate", "oracle"], "gate: got 'oracle'"),
    "no gpus": (["--gpus", "0"], "--gpus/--ranks: got 0"),
    "half a node": (["--gpus", "12"], "number of GPUs: got 12"),
    "batch": (["--batch", "0"], "--batch: got 0"),
    "dtype": (["--dtype", "int3"], "dtype: got 'int3'"),
    "strategy": (["--strategy", "magic"], "--strategy"),
    "plan file": (["--save", "/nowhere/plan.json"], "file to write: got /nowhere/plan.json"),
    "trace file": (["--trace", "/"], "file to write: got /"),
    "picture file": (["--timeline", "/nowhere/t.png"], "file to write: got /nowhere/t.png"),
    "picture ending": (["--timeline", "picture.xyz"], "file to write: got picture.xyz"),
    **{
        f"{option} without --hf": ([option, *value], f"options: got {option}, expected only options")
        for option, *value in map(
            str.split,
            ("--search", "--search-seconds 5", "--measured 1s", "--kineto t.json", "--report r.html"),
        )
    },
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_line(refused, case):
    arguments, message = WRONG[case]
    assert message in refused(*TINY, *arguments)


def test_help_names_what_clusters_have():
    said = {field.name: field.metadata["arguments"]["help"] for field in fields(PlanOptions)}
    for name in cluster_names():
        cluster = load_cluster(name)
        for option, names in (
            ("cluster", [name]),
            ("dispatch", cluster.dispatchers),
            ("attention", cluster.attention),
        ):
            assert all(re.search(rf"\b{one}[, ]", said[option]) for one in names), name


@pytest.mark.parametrize("option", ["--memory-gb", "--most-parts", "--group-ms", "--longest-range-ms"])
def test_options_of_the_planner_are_refused_with_hf(refused, option):
    line = refused("plan", "--hf", "config.json", option, 2)
    assert f"options: got --hf and {option}, expected only options" in line


def test_a_cluster_file_that_is_no_text(refused, tmp_path):
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "binary.toml" in refused(*TINY, "--cluster", path)
