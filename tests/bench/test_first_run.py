"""The first run on a GPU, on a machine without one: steps of all sorts, and its own that run here."""

import json
import math
import runpy
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu import first_run, steps
from bench.gpu.first_run import Step
from tests.processes import ROOT, run, running, wait_for

OURS = "tests.bench.first_run_steps"
NAMES = "right crashes hangs wrong long unasked".split()
STEPS = {name: Step(60, 0, OURS) for name in NAMES} | {
    "hangs": Step(4, 0, OURS),
    "long": Step(999, 999, OURS),
}


@pytest.mark.long
def test_a_step_that_crashes_or_hangs_costs_its_limit_and_no_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(first_run, "STEPS", STEPS)
    order = ["long", "right", "crashes", "hangs", "wrong"]
    given = ["--device", "cpu", "--out", str(tmp_path), "--until", "300", "--only", ",".join(order)]
    assert first_run.main(given) == 1
    (file,) = tmp_path.glob("*.jsonl")
    head, *listed = map(json.loads, file.read_text().splitlines())
    assert head["run"]["label"] == "interpreter: proof, no figures"
    assert {"torch", "triton", "python", "commit", "date", "device"} <= head["run"].keys()
    lines = {line["step"]: line for line in listed}
    assert [(name, line["outcome"]) for name, line in lines.items()] == [
        *zip(order, ("not begun", "right", "failed", "killed", "wrong"), strict=True)
    ]
    assert lines["long"]["why"].startswith("it needs 999 s, ")
    assert all(line["result"]["device"] == "cpu" for name, line in lines.items() if name != "long")
    assert lines["right"]["result"]["interpreted"] == "1"
    # Of the copied tree, not of what is installed.
    package = Path(lines["right"]["result"]["package"])
    assert not package.is_relative_to(ROOT)
    assert lines["hangs"]["said"].endswith("a word before the end\n")
    assert "a word before the end\n" in file.with_suffix(".log").read_text()
    wait_for(lambda: not running(lines["hangs"]["result"]["child"]), 5)


def test_an_unknown_step_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert first_run.main(["--only", "machine,nothing", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("first_run: no step 'nothing'; there are machine, ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_it_says_so_in_a_line(tmp_path: Path) -> None:
    done = run(sys.executable, "bench/gpu/first_run.py", "--out", tmp_path / "new")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"first_run: no CUDA device that torch {torch.__version__} can use\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.long  # by default: one_program, below
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")
def test_what_runs_on_a_cpu_is_right(tmp_path: Path) -> None:
    """Each function of `steps` once, but for those that are called below. ranks_on_one_gpu starts
    "bench.gpu.several_ranks", large_step "bench/gpu/large_step.py"."""
    chosen = "all_programs speed_sonic eta shapes passes ranks_on_one_gpu host large_step".split()
    script, given = "bench/gpu/first_run.py", ["--device", "cpu", "--out", tmp_path, "--until", "900"]
    done = run(sys.executable, script, *given, "--only", ",".join(chosen), timeout_s=1000)
    assert done.returncode == 0, done.stdout
    (file,) = tmp_path.glob("*.jsonl")
    _, *lines = map(json.loads, file.read_text().splitlines())
    assert [line["step"] for line in lines] == chosen
    assert {line["outcome"] for line in lines} == {"right"}
    results = {line["step"]: line["result"] for line in lines}
    for each in results["eta"].values():
        assert all(each[way]["eta"] > 0 for way in ("forward", "backward"))
    assert [*results["eta"]] == ["full", "fast", "middle", "slow"]
    assert results["speed_sonic"]["backward"]["tflops"] > 0


@pytest.mark.long
@pytest.mark.parametrize("processes", [1, 2])
def test_a_step_of_tests_says_the_outcome_of_each(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    said = [*steps.run_tests(("bench/test_peers.py",), "", "gelu", processes, torch.device("cpu"))]
    (name, told), (last, end) = (item for result in said for item in result.items())
    assert (name, told) == ("test_by_torch_is_an_moe_layer[gelu]", {"right": True, "outcome": "passed"})
    assert (last, end) == ("pytest", {"right": True, "exit": 0})


def test_the_table_of_a_run_has_all_its_figures(tmp_path: Path) -> None:
    """From a made-up run, and from none."""
    first_run_table = runpy.run_path(str(ROOT / "docs" / "scripts" / "generate.py"))["first_run"]
    assert first_run_table(tmp_path) == "Not measured: no GPU was at hand."
    run = {"device": "Made-up GPU", "torch": "2.11", "triton": "3.6", "date": "today", "label": "measured"}
    speed = {"right": True, "forward": {"ms": 3.0, "least_ms": 2.0, "tflops": 551.26}}
    slow = {"slow": {"put_ms": 1, "backward": {"ms": 2, "eta": 0.9}}}
    lines = [
        {"step": "speed_sonic", "outcome": "right", "result": speed},
        {"step": "eta", "outcome": "killed", "result": slow},
        {"step": "passes", "outcome": "not begun", "why": "no time"},
    ]
    for name, label in (("first-run-a", "measured"), ("first-run-b", "interpreter")):
        texts = [json.dumps(line) for line in [{"run": run | {"label": label}}, *lines]]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(texts))
    head, _, _, _, *rows = first_run_table(tmp_path).strip().splitlines()
    assert head == "Made-up GPU, torch 2.11, Triton 3.6, today:"
    assert rows == [
        "| `speed_sonic` | right |  |  |  |  |  |  |  |",
        "| `speed_sonic` | forward | 3 | 551.3 |  |  |  |  |  |",
        "| `eta` | killed |  |  |  |  |  |  |  |",
        "| `eta` | slow, backward | 2 |  | 0.9 |  |  |  |  |",
    ]


def test_every_step_is_known_to_its_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(first_run.STEPS) <= {*steps.SPEEDS, *steps.TESTS, *vars(steps)}
    assert all((ROOT / "tests" / name).exists() for names, *_ in steps.TESTS.values() for name in names)
    for step in ("one_program", "machine"):
        steps.main(step, "cpu")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(first_run.FACT)]
    right, found = (json.loads(line.removeprefix(first_run.FACT)) for line in (lines[0], lines[-1]))
    assert right["right"]
    assert found["copy_gb_s"] > 0
    assert found["matmul"]["tflops"] == float(f"{found['matmul']['tflops']:.4g}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_wrong_is_seen(dtype: torch.dtype) -> None:
    """Rounding twice is right, and the gradient of one token; a row that is missing, or NaN, is not, among
    thousands."""
    torch.manual_seed(0)
    wanted = torch.randn(4096, 64)
    eps = torch.finfo(dtype).eps
    rounded = wanted * (1 + eps * torch.randn_like(wanted).clamp(-2, 2))
    assert steps.agreement({"y": rounded.to(dtype)}, {"y": wanted}, dtype)["right"]
    # Of one of 16 experts, with a few elements far beyond the rest.
    one_token = torch.randn(1024, 1).pow(3) * torch.randn(1, 512).pow(3) * 100
    wanted_one = torch.cat([one_token, torch.zeros(15 * 1024, 512)])
    rounded_one = (wanted_one * (1 + 0.5 * eps)).to(dtype)
    assert steps.agreement({"dw1": rounded_one}, {"dw1": wanted_one}, dtype)["right"]
    for value in (0.0, math.nan, math.inf):
        broken = rounded.clone()
        broken[100] = value
        assert not steps.agreement({"y": wanted, "dx": broken}, {"y": wanted, "dx": wanted}, dtype)["right"]
    assert steps.agreement({"y": wanted[:0]}, {"y": wanted[:0]}, dtype)["right"]
