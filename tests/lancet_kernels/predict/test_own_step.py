"""`lancet plan --module`: a step of the user's own on fake ranks, and one line for whatever is wrong."""

import json
from pathlib import Path

import pytest
import torch

from lancet_kernels import optimize
from lancet_kernels.__main__ import main
from lancet_kernels.predict.own_step import OwnStep
from lancet_kernels.predict.simulate import simulate_setting
from lancet_kernels.schedules.plan import Plan
from tests.own_steps import readme_step

STEPS = Path(__file__).parents[2] / "own_steps"
README_STEP = f"{STEPS}/readme_step.py:make_step"


def plan_json(capsys, *arguments):
    assert main(["plan", "--json", *arguments]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


def test_the_readmes_step_is_planned_for_64_ranks(capsys):
    found = plan_json(capsys, "--module", README_STEP, "--ranks", "64", "--cluster", "p4de")
    assert (found["module"], found["cluster"], found["gpus"]) == (README_STEP, "p4de", 64)
    assert found["iteration_ms"]["lancet"] == min(found["iteration_ms"].values())
    assert "model" not in found
    assert "batch" not in found


def test_the_figures_follow_the_ranks_and_the_cluster():
    """128 rows of 64 floats a rank: priced as the cluster prices them, all-to-all among all ranks."""
    few, many = (OwnStep(README_STEP, "p4de", ranks).priced for ranks in (8, 64))
    for step in (few, many):
        sizes = {i.bytes for i in step.program.instructions if i.op == "lancet.all_to_all"}
        assert sizes == {128 * 64 * 4.0}
        assert not any(i.op == "lancet.sgd" for i in step.program.instructions)
    (weight,) = {i.inputs[2] for i in many.program.instructions if i.name == "grouped_gemm"}
    assert many.program.tensors[weight].shape == (1, 64, 256)
    first = next(i for i in many.program.instructions if i.op == "lancet.all_to_all")
    assert many.cost(first, many.program.tensors) > few.cost(first, few.program.tensors)


def fingerprints_of_a_run_with(path):
    step, inputs = readme_step.make_step()
    planned = optimize(step, inputs, plan=path, cluster="p4de")
    planned(*inputs).backward()
    return planned.plan.program_fingerprint, dict(planned.fallbacks)


def test_ranks_run_the_plan_that_was_made_without_them(capsys, pool, tmp_path):
    """A plan for another program would be refused."""
    path = str(tmp_path / "plan.json")
    plan_json(capsys, "--module", README_STEP, "--ranks", "2", "--cluster", "p4de", "--save", path)
    expected = Plan.load(path).program_fingerprint, {}
    assert pool.run(fingerprints_of_a_run_with, path, ranks=2) == [expected] * 2


@pytest.mark.long
def test_a_step_of_transformers():
    pytest.importorskip("transformers", reason="transformers is not installed")
    found = simulate_setting(OwnStep(f"{STEPS}/olmoe_step.py:make_small_step", "dgx-h100", 16))
    times = {name: plan.report.predicted.iteration_ms for name, plan in found.plans.items()}
    assert times["lancet"] < times["none"]
    # Two layers of 256 tokens through 8 experts each, forward and backward.
    sent = [i.bytes for i in found.program.instructions if i.op == "lancet.all_to_all"]
    assert sent == [8 * 256 * 64 * 4.0] * 8


BAD = """
import torch
from torch import nn

number = 3

class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
    def forward(self, x):
        y = self.inner(x).sum()
        return y if y > 0 else -y

x = lambda: torch.zeros(1, 2)
def nothing(): return None
def alone(): return nn.Linear(2, 2)
def bare_input(): return Branch(), x()
def reads(): return Branch(), (torch.zeros(int(x().sum()), 2),)
def fails(): raise RuntimeError("no weights here")
def needs(size): return Branch(), (x(),)
def no_parameters(): return nn.Identity(), (x(),)
def too_many(): return Branch(), (x(), x())
def branch(): return Branch(), (x(),)
"""

WRONG = {
    "no file": ("nowhere.py:make_step", "module: got nowhere.py, which does not exist, expected"),
    "no function named": ("bad.py", "module: got bad.py, expected FILE.py:function"),
    "no such function": ("bad.py:make_step", "module: got no make_step in bad.py, expected a function"),
    "no function": ("bad.py:number", "module: got a number that is not a function in bad.py"),
    "text": ("notes.txt:f", "module: got notes.txt, expected a Python file (.py)"),
    "syntax": ("syntax.py:f", "file syntax.py: got SyntaxError: '(' was never closed"),
    "missing import": (
        "imports.py:f",
        "got ModuleNotFoundError: No module named 'nowhere' (imports.py, line 2)",
    ),
    "None": ("bad.py:nothing", "bad.py:nothing: got None, expected (module, example inputs)"),
    "a module alone": ("bad.py:alone", "bad.py:alone: got a Linear, expected (module, example inputs)"),
    "a tensor": (
        "bad.py:bare_input",
        "got Branch with FakeTensor as inputs, expected (module, example inputs)",
    ),
    "values": ("bad.py:reads", "(bad.py, line 19), expected a step that does not read values"),
    "an error": ("bad.py:fails", "got RuntimeError: no weights here (bad.py, line 20), expected (module"),
    "arguments": ("bad.py:needs", "needs() missing 1 required positional argument: 'size'"),
    "no parameters": (
        "bad.py:no_parameters",
        "got Identity without parameters to train, expected a training",
    ),
    "inputs": ("bad.py:too_many", "inputs of Branch: got too many positional arguments, expected forward(x)"),
    "a branch": ("bad.py:branch", 'got bad.py, line 13, "return y if y > 0 else -y": Unsupported: Data-'),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    (folder / "bad.py").write_text(BAD)
    (folder / "syntax.py").write_text("x = (")
    (folder / "imports.py").write_text("\nimport nowhere")
    (folder / "notes.txt").write_text("hello")
    return folder


def refusal(capsys, *arguments):
    assert main(["plan", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line(capsys, monkeypatch, folder, case):
    monkeypatch.chdir(folder)
    module, message = WRONG[case]
    assert message in refusal(capsys, "--module", module, "--ranks", "8")
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "3"], "options: got --module and --batch"),
        (["--model", "gpt2-l-moe"], "options: got --module and --model"),
        (["--ranks", "12"], "number of GPUs: got 12"),
    ],
)
def test_options_that_do_not_go_with_a_module(capsys, arguments, message):
    assert message in refusal(capsys, "--module", README_STEP, *arguments)
