"""Converted models on two ranks, each with its own batch, against the originals with all experts on each."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lancet_kernels import CausalLMStep, convert, export_state_dict, fsdp, moe_layers
from tests.optimized import optimized
from tests.planned_steps import gradients, sum_over_ranks
from tests.ranks import RankPool
from tests.transformers_models import BOUND, FAMILIES, distance, exported_gradients, tiny_batch, tiny_model

pytest.importorskip("transformers", reason="transformers is not installed")


def compare(model: nn.Module, loss: Tensor, original: nn.Module, case: str) -> None:
    """The loss of this rank, and all gradients summed over the ranks, are those of the original."""
    theirs = CausalLMStep(original)(**tiny_batch(dist.get_rank()))
    theirs.backward()
    assert distance(loss, theirs) < BOUND, case
    ours = exported_gradients(model)
    for name, parameter in original.named_parameters():
        dist.all_reduce(parameter.grad)
        assert distance(ours[name], parameter.grad) < 10 * BOUND, f"{case}: {name}"


def all_families(families: list[str]) -> None:
    for family in families:
        model = tiny_model(family)
        original, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
        convert(model, strict=True)
        assert all(layer.w1.shape[0] == 4 for layer in moe_layers(model))
        after = export_state_dict(model)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], value) for name, value in before.items()), family

        loss = CausalLMStep(model)(**tiny_batch(dist.get_rank()))
        loss.backward()
        summed = sum_over_ranks(model, gradients(model))
        for name, parameter in model.named_parameters():
            parameter.grad = summed.get(name)
        compare(model, loss, original, family)


@pytest.mark.long
def test_every_family(pool: RankPool) -> None:
    pool.run(all_families, list(FAMILIES), timeout_s=240)


def sharded(family: str) -> None:
    model = tiny_model(family)
    before = copy.deepcopy(model.state_dict())
    convert(model, strict=True)
    fsdp(model)
    after = export_state_dict(model)
    assert after.keys() == before.keys()
    assert all(type(after[name]) is Tensor for name in before)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_export_of_a_sharded_model_is_the_original(pool: RankPool) -> None:
    pool.run(sharded, next(iter(FAMILIES)), ranks=2, timeout_s=120)


def planned(family: str, tied_and_checkpointed: bool = False) -> None:
    model = tiny_model(family)
    if tied_and_checkpointed:
        model.config.tie_word_embeddings = True
        model.tie_weights()
        model.gradient_checkpointing_enable()
        model.train()
        assert model.lm_head.weight is model.model.embed_tokens.weight
    original = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "expert"))
    convert(model, mesh, strict=True)
    batch = tiny_batch(dist.get_rank())
    step = optimized(CausalLMStep(model), batch)
    loss = step(**batch)
    loss.backward()
    compare(model, loss, original, family)
    assert not step.fallbacks
    assert step.plan.ranges, "nothing is cut"
    assert (step.plan.report.recomputation is not None) == tied_and_checkpointed


@pytest.mark.long
@pytest.mark.parametrize("family", ["Qwen3-MoE", "Mixtral", "OLMoE"])
def test_tied_and_checkpointed(pool: RankPool, family: str) -> None:
    """Tied embeddings and `gradient_checkpointing_enable()`."""
    pool.run(planned, family, True, timeout_s=240)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_a_plan(pool: RankPool, family: str) -> None:
    pool.run(planned, family, timeout_s=240)
