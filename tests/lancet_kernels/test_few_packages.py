"""A machine with torch, Triton and numpy alone plans and trains, as long as nothing is cut."""

import subprocess
import sys
from pathlib import Path

import pytest

BARE = """
import sys
for name in ("ortools", "matplotlib", "tqdm", "tokenizers", "hypothesis", "pandas"):
    sys.modules[name] = None  # importing it raises ImportError
import torch
from lancet_kernels import optimize
from tests.planned_steps import StepCase, build_step

step, inputs = build_step(StepCase(dtype=torch.float32, layers=2, batch=2, sequence=4))
planned = optimize(step, inputs, strategy="lancet-dw", cluster="p3dn")
planned(*inputs)[0].backward()
assert all(p.grad.isfinite().all() for p in step.parameters())
print(planned.plan.strategy)
"""


@pytest.mark.long
def test_without_the_solver_and_the_pictures() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", BARE],
        cwd=root, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["lancet-dw"]
