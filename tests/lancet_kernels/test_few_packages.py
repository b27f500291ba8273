"""A machine with torch, Triton and numpy alone plans and trains."""

import pytest

from tests.processes import printed

BARE = """
import sys
for name in ("ortools", "matplotlib", "tqdm", "hypothesis", "pandas"):
    sys.modules[name] = None  # importing it raises ImportError
import torch
from lancet_kernels import optimize
from tests.planned_steps import StepCase, build_step

step, inputs = build_step(StepCase(dtype=torch.float32, layers=2, batch=2, sequence=4))
planned = optimize(step, inputs, strategy=sys.argv[1], cluster="p3dn")
planned(*inputs)[0].backward()
assert all(p.grad.isfinite().all() for p in step.parameters())
print(planned.plan.strategy)
"""


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["lancet", "auto"])
def test_without_solvers_and_pictures(strategy: str) -> None:
    assert printed("-c", BARE, strategy).split() == [strategy]
