"""Which steps a CUDA graph can capture; what it says of the others. On a GPU: `test_graphed_gpu.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lancet_kernels import optimize
from lancet_kernels.errors import UserError
from lancet_kernels.graphed import GraphedStep, check_capturable
from tests.planned_steps import StepCase, build_step

CASE = StepCase(dtype=torch.float32, layers=2, batch=2, sequence=5)


def waits_of_both(tmp: str) -> tuple[list[str], list[str]]:
    """What makes the host wait in a step on streams, and in one whose layers are fused."""
    found = []
    for backend in ("torch", "fused"):
        step, inputs = build_step(CASE)
        planned = optimize(
            step, inputs, strategy="lancet-dw", backend=backend, lowering="fused", times=f"{tmp}/t.json"
        )
        found.append(list(planned.host_waits))
        assert len(planned.fused_layers) == (backend == "fused")
    return found[0], found[1]


def test_fused_steps_ask_the_device_for_nothing(pool, tmp_path) -> None:
    for on_streams, fused in pool.run(waits_of_both, str(tmp_path), ranks=2, timeout_s=240):
        assert not fused
        # Counts once, rows there and back, forward and backward.
        assert sum("exchange_counts" in name for name in on_streams) == 1
        assert sum("all_to_all" in name for name in on_streams) == 4
        assert len(on_streams) == 5


def test_a_step_on_a_cpu_is_refused(tmp_path) -> None:
    step, inputs = build_step(CASE)
    planned = optimize(step, inputs, strategy="none", times=tmp_path / "t.json")
    with pytest.raises(UserError, match="device of a captured step: got cpu, expected a CUDA device"):
        GraphedStep(planned, inputs)


def test_what_makes_the_host_wait_is_named() -> None:
    parameter = SimpleNamespace(device=torch.device("cuda"))
    module = SimpleNamespace(parameters=lambda: iter([parameter]))
    names = ("exchange_counts", "all_to_all", "all_to_all_1", "all_to_all_2")
    with pytest.raises(UserError, match=r"exchange_counts, all_to_all, all_to_all_1 and 1 more.*fused"):
        check_capturable(SimpleNamespace(module=module, host_waits=names))
    check_capturable(SimpleNamespace(module=module, host_waits=()))
