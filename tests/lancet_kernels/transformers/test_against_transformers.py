"""The layer on one rank against the MoE blocks of transformers, with the same weights, in float32: output,
and gradients of the input and of all weights."""

import copy

import pytest
import torch
from torch import nn

from lancet_kernels import UserError, convert
from tests.grids import few_of
from tests.transformers_models import FAMILIES, check_gradients, distance, tiny_batch, tiny_model

pytest.importorskip("transformers", reason="transformers is not installed")

INTERCHANGEABLE = [family for family in FAMILIES if family != "DBRX"]
"""Families whose experts transformers can compute in other ways: DBRX has one of its own."""


@pytest.mark.parametrize("family", few_of(INTERCHANGEABLE))
def test_block(family: str) -> None:
    model = tiny_model(family, torch.float32)
    model.set_experts_implementation("grouped_mm")
    original = nn.Sequential(model.model.layers[1].mlp)
    converted = copy.deepcopy(original)
    convert(converted, strict=True)
    x, dy = torch.randn(2, 17, 16), torch.randn(2, 17, 16)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    theirs, ours = original(inputs[0]), converted(inputs[1])
    if isinstance(theirs, tuple):  # GPT-OSS: the weights of the chosen experts come second
        (theirs, weights), (ours, own_weights) = theirs, ours
        assert distance(own_weights, weights) < 1e-6
    theirs.backward(dy)
    ours.backward(dy)
    bound = 1e-4
    assert distance(ours, theirs) < bound
    assert distance(inputs[1].grad, inputs[0].grad) < bound
    check_gradients(converted, original, bound)


@pytest.mark.parametrize("family", few_of(INTERCHANGEABLE))
def test_experts_implementation(family: str) -> None:
    """`experts_implementation="lancet"`, in the first step and with other weights in a second one."""
    pytest.importorskip("transformers.distributed.expert_parallel")
    import lancet_kernels.transformers.expert_parallel  # noqa: F401  registers

    models = [tiny_model(family, torch.float32) for _ in range(2)]
    models[1].set_experts_implementation("lancet")
    names = [*models[1].state_dict()]
    for _ in range(2):
        losses = [model(**tiny_batch()).loss for model in models]
        for model, loss in zip(models, losses, strict=True):
            model.zero_grad()
            loss.backward()
        assert distance(losses[1], losses[0]) < 1e-5
        for (name, ours), theirs in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
            assert ours.grad is None or distance(ours.grad, theirs.grad) < 1e-3, name
        with torch.no_grad():
            for parameter in [*models[0].parameters(), *models[1].parameters()]:
                parameter.mul_(0.9)
    assert "lancet_experts" in models[1].model.layers[1].mlp.experts.__dict__
    assert [*models[1].state_dict()] == names
    again = copy.deepcopy(models[1])
    again.model.layers[1].mlp.experts.down_proj.data.zero_()
    assert float(again(**tiny_batch()).loss) != float(models[1](**tiny_batch()).loss)
    models[1].model.layers[1].mlp.experts._is_expert_parallel = True
    del models[1].model.layers[1].mlp.experts.__dict__["lancet_experts"]
    with pytest.raises(
        UserError, match=r"experts_implementation='lancet' of .*: got experts on several ranks"
    ):
        models[1](**tiny_batch())
