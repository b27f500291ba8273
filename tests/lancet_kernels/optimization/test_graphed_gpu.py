"""A whole optimised step as one CUDA graph, replayed with changing data."""

from dataclasses import replace

import pytest
import torch

from lancet_kernels import GraphedStep, optimize
from lancet_kernels.errors import UserError
from tests.planned_steps import VOCABULARY, StepCase, build_step

pytestmark = pytest.mark.gpu
# Rows of 64 bytes and more: descriptors can load them.
CASE = StepCase(dtype=torch.float32, width=32, batch=4, sequence=16, experts=8)


@pytest.mark.parametrize(("backend", "dtype"), [("torch", torch.bfloat16), ("fused", torch.float32)])
def test_fifty_replays_with_changing_data(backend, dtype, tmp_path):
    if backend == "torch" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("torch's grouped_mm asks this GPU for the counts")
    rtol, atol = (5e-2, 5e-2) if dtype == torch.bfloat16 else (1e-2, 1e-3)
    step, inputs = build_step(replace(CASE, dtype=dtype))
    step.cuda()
    inputs = [t.cuda() for t in inputs]
    options = {"strategy": "lancet-dw", "backend": backend, "times": tmp_path / "times.json"}
    planned = optimize(step, inputs, lowering="fused", **options)
    assert len(planned.fused_layers) == (2 if backend == "fused" else 0)
    graphed = GraphedStep(planned, inputs)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.01)
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, VOCABULARY, inputs[0].shape, generator=generator).cuda()
        targets = torch.randint(0, VOCABULARY, inputs[1].shape, generator=generator).cuda()
        replayed = [t.clone() for t in graphed(tokens, targets)]
        mine = {name: p.grad.clone() for name, p in step.named_parameters()}
        if seed % 10 == 9:
            # The module as it stands, with the same parameters.
            kept = {name: p.grad for name, p in step.named_parameters()}
            step.zero_grad(set_to_none=True)
            outputs = step(tokens, targets)
            outputs[0].backward()
            for one, other in zip(replayed, outputs, strict=True):
                torch.testing.assert_close(one, other.detach(), rtol=rtol / 10, atol=atol / 10)
            for name, parameter in step.named_parameters():
                torch.testing.assert_close(mine[name], parameter.grad, rtol=rtol, atol=atol, msg=name)
                parameter.grad = kept[name]
        optimizer.step()
    with pytest.raises(UserError, match="inputs of a captured step"):
        graphed(tokens[:2], targets[:2])
