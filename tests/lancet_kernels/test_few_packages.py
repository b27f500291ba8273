"""A machine with torch, Triton and numpy alone plans and trains, as long as nothing is cut."""

import pytest

from tests.processes import printed

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
    assert printed("-c", BARE).split() == ["lancet-dw"]
