"""Routers of transformers that choose otherwise when a checkpointed block runs again: the gradients of the
first run."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

pytest.importorskip("transformers")

from lancet_kernels import convert
from lancet_kernels.transformers import routers
from lancet_kernels.transformers.convert import experts_of
from tests.grids import few_of
from tests.transformers_families import tiny_batch, tiny_model

KINDS = [{"use_reentrant": True}, {"use_reentrant": False}, {"use_reentrant": False, "early_stop": False}]
FAMILIES = few_of(["mixtral", "deepseek_v3", "granitemoe", "phimoe", "llama4", "jamba"], 3)


class EqualExperts(nn.Module):
    """A router's weight [E, D] in which each four experts have equal rows but for noise that is drawn anew:
    in each call others of the four win."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = (torch.Generator().manual_seed(seed) for seed in (0, 99))

    def forward(self, weight: Tensor) -> Tensor:
        generator = self.first if torch._C._current_graph_task_id() == -1 else self.again
        noise = torch.rand(weight.shape, generator=generator, dtype=weight.dtype)
        equal = weight[::4].repeat_interleave(4, 0) + 1e-6 * noise
        return weight + (equal - weight).detach()


def block_of(family: str, by_name: bool = False, ran_before: bool = True) -> nn.Module:
    """The first block of a tiny model whose router is undecided.

    by_name: with `experts_implementation="lancet"`, else converted.
    """
    model = tiny_model(family).eval()
    name, _ = next(experts_of(model))
    if by_name:
        model.set_experts_implementation("lancet")
        if ran_before:  # the first forward finds the block
            model(tiny_batch())
    else:
        convert(model, strict=True)
    block = model.get_submodule(name.rpartition(".")[0])
    for part in list(block.modules()):
        weight = part._parameters.get("weight")
        if weight is not None and weight.shape == (8, 16):
            parametrize.register_parametrization(part, "weight", EqualExperts())
            return block
    raise AssertionError(f"{family} has a router of another kind")


def gradients(block: nn.Module, **checkpointed: Any) -> list[Tensor]:
    """Gradients of two forwards whose backwards come afterwards, after two blocks in a row."""
    block = copy.deepcopy(block)
    early_stop = checkpointed.pop("early_stop", True)
    batches = [
        torch.randn(
            2, 6, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        ).requires_grad_()
        for seed in range(2)
    ]

    def once(x: Tensor) -> Tensor:
        y = block(x)
        return x + (y[0] if isinstance(y, tuple) else y).view(x.shape)

    with set_checkpoint_early_stop(early_stop):
        results = []
        for x in batches:
            for _ in range(2):
                x = checkpoint(once, x, **checkpointed) if checkpointed else once(x)
            results.append(x.square().sum())
        for result in results:
            result.backward()
    return [p.grad for p in (*block.parameters(), *batches) if p.grad is not None]


def largest_distance(block: nn.Module, kind: dict[str, Any]) -> float:
    pairs = zip(gradients(block), gradients(block, **kind), strict=True)
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-9)) for a, b in pairs)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_first_run(family: str) -> None:
    block = block_of(family)
    for kind in KINDS:
        assert largest_distance(block, dict(kind)) < 1e-3, kind


def test_of_an_experts_implementation() -> None:
    pytest.importorskip("lancet_kernels.transformers.expert_parallel")
    assert largest_distance(block_of("mixtral", by_name=True), dict(KINDS[1])) < 1e-3
    # The first forward of all, in which the block is told of: as without what is kept, and without an error.
    gradients(block_of("mixtral", by_name=True, ran_before=False), **KINDS[1])


def test_without_what_is_kept_those_of_the_router_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    block = block_of("mixtral")
    monkeypatch.setattr(routers, "_CHOOSES", {})
    assert all(largest_distance(block, dict(kind)) > 0.1 for kind in KINDS)


def test_values_and_indices_of_every_call() -> None:
    """[.3, .3, .1]: a first run chose the second of two equal values."""
    x = torch.tensor([[0.3, 0.3, 0.1]], requires_grad=True)

    run = SimpleNamespace(as_at_first=lambda block, index: torch.where(index == 0, 1, index))
    calls = [
        lambda: torch.topk(x, 1), lambda: x.topk(k=1, dim=-1), lambda: torch.topk(x, 1, 1),
        lambda: x.max(dim=-1), lambda: x.max(-1, keepdim=True), lambda: torch.max(x, 1),
    ]  # fmt: skip
    for call in calls:
        x.grad = None
        with routers._ChoicesAsAtFirst(nn.Identity(), run):
            values, indices = call()
        values.sum().backward()
        assert indices.flatten().tolist() == [1]
        assert values.dim() == indices.dim()
        assert x.grad.tolist() == [[0.0, 1.0, 0.0]]
    integers = torch.tensor([2**40, 0])
    with routers._ChoicesAsAtFirst(nn.Identity(), run):
        assert int(integers.argmax()) == 1
        assert int(integers.max()) == 2**40
        assert torch.max(integers, -integers).tolist() == [2**40, 0]


@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe"])
def test_a_correction_bias_keeps_small_updates(family: str) -> None:
    """1 + 1e-4 is 1 in bfloat16; the rest of the model becomes bfloat16, and the model runs and is copied."""
    model = tiny_model(family, torch.float32)
    name = next(name for name, _ in model.state_dict().items() if name.endswith("correction_bias"))
    convert(model, strict=True)
    model.state_dict()[name].fill_(1 + 1e-4)
    for changed in (model.to(torch.bfloat16), copy.deepcopy(model).half().float().bfloat16()):
        bias = changed.state_dict()[name]
        assert bias.dtype == torch.float32
        assert bool((bias == torch.tensor(1 + 1e-4)).all())
        assert changed.get_input_embeddings().weight.dtype == torch.bfloat16
        changed(tiny_batch()).logits.float().sum().backward()
    assert model.to(torch.float64).state_dict()[name].dtype == torch.float64
