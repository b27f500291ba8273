"""What `GraphedStep` says of steps that a CUDA graph cannot capture. On a GPU: `test_graphed_gpu.py`.

That fused steps can be captured, and which instructions of others stand in the way: `test_fused_optimize.py`.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lancet_kernels.errors import UserError
from lancet_kernels.optimization.graphed import GraphedStep, check_capturable


def test_a_step_on_a_cpu_is_refused() -> None:
    step = SimpleNamespace(module=torch.nn.Linear(2, 2), host_waits=())
    with pytest.raises(UserError, match="device of a captured step: got cpu, expected a CUDA device"):
        GraphedStep(step, [torch.zeros(2)])


def test_a_module_without_a_plan_is_refused() -> None:
    with pytest.raises(UserError, match=r"step to capture: got Linear, expected one of optimize\(\)"):
        GraphedStep(torch.nn.Linear(2, 2), [torch.zeros(2)])


def test_what_makes_the_host_wait_is_named() -> None:
    parameter = SimpleNamespace(device=torch.device("cuda"))
    module = SimpleNamespace(parameters=lambda: iter([parameter]))
    names = ("exchange_counts", "all_to_all", "all_to_all_1", "all_to_all_2")
    with pytest.raises(UserError, match=r"exchange_counts, all_to_all, all_to_all_1 and 1 more.*fused"):
        check_capturable(SimpleNamespace(module=module, host_waits=names))
    check_capturable(SimpleNamespace(module=module, host_waits=()))
