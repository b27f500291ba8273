"""The layer on one rank against the MoE blocks of transformers, with the same weights, in float32: output,
and gradients of the input and of all weights."""

import copy

import pytest
import torch
from torch import nn

from lancet_kernels import convert
from tests.grids import few_of
from tests.transformers_models import FAMILIES, distance, exported_gradients, tiny_model

pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.parametrize(
    ("family", "implementation"), few_of([(f, how) for f in FAMILIES for how in ("grouped_mm", "eager")])
)
def test_block(family: str, implementation: str) -> None:
    model = tiny_model(family, torch.float32)
    model.set_experts_implementation(implementation)
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
    gradients = exported_gradients(converted)
    for name, parameter in original.named_parameters():
        assert distance(gradients[name], parameter.grad) < bound, name
