"""Adapters and parametrizations of experts: each rank has those of its own experts.

Two ranks, two experts on each, against one process that has all four.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization

from lancet_kernels import (
    Groups,
    MoELayer,
    UserError,
    ddp,
    expert_parameters,
    fsdp,
    optimize,
    set_gradient_group,
)
from lancet_kernels.layer.gradients import broadcast_replicated, clip_gradients, gradient_groups
from lancet_kernels.layer.model_layers import expert_buffers
from tests.refusals import refusal

E, D, F, RANK = 4, 8, 12, 2


class LowRank(nn.Module):
    """w [L, D, F] -> w + a b, with a, b of each expert; a buffer of the experts, too."""

    def __init__(self, experts: range) -> None:
        super().__init__()
        whole = torch.Generator().manual_seed(5)
        for name, shape in (("a", (E, D, RANK)), ("b", (E, RANK, F))):
            value = torch.randn(shape, generator=whole, dtype=torch.float64)
            setattr(self, name, nn.Parameter(value[experts.start : experts.stop]))
        self.register_buffer(
            "scale", 1.0 + torch.arange(E, dtype=torch.float64)[experts.start : experts.stop]
        )

    def forward(self, w: Tensor) -> Tensor:
        return w + self.scale[:, None, None] * (self.a @ self.b)


class Wrapper(nn.Module):
    """An adapter around a layer, which knows its parameter's name, as PEFT's do."""

    def __init__(self, layer: nn.Module, experts: range) -> None:
        super().__init__()
        self.base_layer, self.parameter_name = layer, "w1"
        self.lora = LowRank(experts)

    def forward(self, x: Tensor) -> Tensor:
        register_parametrization(self.base_layer, "w1", self.lora)
        try:
            return self.base_layer(x)
        finally:
            del self.base_layer.parametrizations["w1"].original, self.base_layer.parametrizations["w1"]


class Step(nn.Module):
    def __init__(self, groups: Groups) -> None:
        super().__init__()
        torch.manual_seed(3)
        whole, self.moe = (
            MoELayer(D, F, E, gate="topk", top_k=2, capacity_factor=None, dtype=torch.float64, groups=given)
            for given in (Groups(), groups)
        )
        self.moe.load_state_dict(whole.state_dict())
        register_parametrization(self.moe, "w1", LowRank(self.moe.expert_ids()))

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x).square().sum()


def batch() -> Tensor:
    return torch.randn(2, 10, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def distances(way: str) -> dict[str, float]:
    """How far gradients on this rank are from those of one process with all experts and tokens."""
    groups, rank = Groups.around(dist.group.WORLD), dist.get_rank()
    reference, step = Step(Groups()), Step(groups)
    reference(batch()).backward()
    mine = batch()[rank : rank + 1]
    # Adapters that differ between ranks, and equal parameters, are compared in the calls afterwards.
    options = {"groups": groups, "compare_every": 1}
    trained = ddp(step) if way == "ddp" else optimize(step, (mine,), strategy=way, **options)
    for _ in range(1 if way == "ddp" else 3):
        step.zero_grad()
        (trained(mine) * 2).backward()
    of_experts, experts = set(expert_parameters(step)), step.moe.expert_ids()
    wrong = {}
    for (name, p), (_, whole) in zip(step.named_parameters(), reference.named_parameters(), strict=True):
        expected = whole.grad[experts.start : experts.stop] if p in of_experts else whole.grad
        wrong[name] = float((p.grad - expected).abs().max() / expected.abs().max())
    return wrong


@pytest.mark.parametrize("way", ["ddp", "lancet", pytest.param("lancet-dw", marks=pytest.mark.long)])
def test_adapters_of_experts_get_their_own_gradients(pool, way):
    for of_rank in pool.run(distances, way, ranks=2, timeout_s=240):
        assert len(of_rank) == 5
        assert not {name: distance for name, distance in of_rank.items() if distance > 1e-12}


def replicas() -> list[bool]:
    """Broadcasting leaves what lies on experts alone; the norm of a clipping counts it once."""
    step = Step(Groups.around(dist.group.WORLD))
    before = copy.deepcopy(step.state_dict())
    broadcast_replicated(step, step.moe.groups)
    same = [torch.equal(value, before[name]) for name, value in step.state_dict().items()]
    mine = batch()[dist.get_rank() : dist.get_rank() + 1]
    trained = ddp(step)
    trained(mine).backward()
    reference = Step(Groups())
    (reference(batch()) / 2).backward()
    norm, whole = clip_gradients(step, None), clip_gradients(reference, None, Groups())
    return [*same, bool(torch.isclose(norm, whole, rtol=1e-12))]


def test_what_lies_on_experts_is_not_broadcast_and_counts_once(pool):
    assert all(map(all, pool.run(replicas, ranks=2)))


def wrapped() -> list[str]:
    groups = Groups.around(dist.group.WORLD)
    layer = MoELayer(D, F, E, groups=groups)
    model = nn.Sequential(Wrapper(layer, layer.expert_ids()))
    over = gradient_groups(model, groups)
    return [name for name, p in model.named_parameters() if over[p] == groups.replica]


def test_adapters_around_a_layer_belong_to_the_experts_that_they_name(pool):
    names = ["0.base_layer.w1", "0.base_layer.w2", "0.lora.a", "0.lora.b"]
    assert pool.run(wrapped, ranks=2) == [names, names]


class Biased(MoELayer):
    def __init__(self, *args: int, **options: object) -> None:
        super().__init__(*args, **options)
        self.scale = nn.Parameter(torch.ones(self.local_experts))


def of_a_subclass() -> tuple[str, bool]:
    groups = Groups.around(dist.group.WORLD)
    layer = Biased(D, F, E, groups=groups)
    text = refusal(lambda: gradient_groups(nn.Sequential(layer), groups))
    set_gradient_group(layer, None, ["scale"])
    return text, gradient_groups(nn.Sequential(layer), groups)[layer.scale] == ""


def test_a_parameter_that_a_subclass_adds_is_refused_until_its_ranks_are_said(pool):
    for text, is_alone in pool.run(of_a_subclass, ranks=2):
        assert text.startswith(
            "parameter scale of 0: got a Biased that adds it to an MoELayer, expected to know"
        )
        assert "set_gradient_group" in text
        assert is_alone


class Scaled(Biased):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.sum()


def sharded_subclass() -> tuple[str, bool, float, float]:
    """-> the refusal; is it the rank's own afterwards; distances of its gradient, without a plan and with."""
    groups, rank = Groups.around(dist.group.WORLD), dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), Scaled(D, F, E, groups=groups)).double()
    model[1].scale.data.fill_(1.0 + rank)
    plain = copy.deepcopy(model)
    text = refusal(lambda: fsdp(copy.deepcopy(model)))
    set_gradient_group(model[1], None, ["scale"])
    fsdp(model)
    kept = torch.equal(model[1].scale.to_local(), plain[1].scale)
    x = torch.randn(6, D, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    plain(x).square().sum().backward()
    distances = []
    for planned in (False, True):
        model.zero_grad()
        whole = Loss(model)
        (optimize(whole, (x,)) if planned else whole)(x).backward()
        distances.append(float((model[1].scale.grad.to_local() - plain[1].scale.grad / 2).abs().max()))
    return text, kept, *distances


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().sum()


def test_fsdp_leaves_each_rank_what_a_subclass_adds(pool):
    for text, kept, *distances in pool.run(sharded_subclass, ranks=2):
        assert text.startswith("parameter scale of 1: got a Scaled that adds it to an MoELayer")
        assert kept
        assert max(distances) < 1e-12


def tensor_parallel() -> str:
    mesh = DeviceMesh("cpu", [0, 1])
    model = nn.Sequential(nn.Linear(D, D), MoELayer(D, F, E))
    parallelize_module(model[0], mesh, ColwiseParallel())
    return refusal(lambda: ddp(model))


def test_ddp_of_tensor_parallel_parameters_is_refused(pool):
    for text in pool.run(tensor_parallel, ranks=2):
        assert text.startswith("data parallelism of Sequential: got 0.weight as a DTensor, expected plain")


# ---- state dicts


def test_a_parametrized_layer_has_a_state_dict_by_expert():
    layer = MoELayer(D, F, E)
    weight_norm(layer, "w1", dim=0)
    state = layer.state_dict()
    assert [name for name in state if ".3." in name] == [
        "experts.3.parametrizations.w1.original0",
        "experts.3.parametrizations.w1.original1",
        "experts.3.w2",
    ]
    other = MoELayer(D, F, E)
    weight_norm(other, "w1", dim=0)
    assert other.load_state_dict(state).missing_keys == []
    assert torch.equal(layer.w1, other.w1)
    del state["experts.3.parametrizations.w1.original1"]
    missing = other.load_state_dict(state, strict=False).missing_keys
    assert missing == ["experts.3.parametrizations.w1.original1"]


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, w: Tensor) -> Tensor:
        return self.factor * w


def test_a_parametrization_without_rows_of_experts_has_no_state_dict():
    layer = MoELayer(D, F, E)
    register_parametrization(layer, "w1", Shared())
    with pytest.raises(UserError, match=r"state of parametrizations\.w1\.0\.factor: got a tensor \(\)"):
        layer.state_dict()


def states() -> dict[str, Tensor]:
    step = Step(Groups.around(dist.group.WORLD))
    return {name: value.detach().clone() for name, value in step.state_dict().items() if "experts" in name}


def test_states_of_two_ranks_load_where_one_has_all_experts(pool):
    first, second = pool.run(states, ranks=2)
    assert not first.keys() & second.keys()
    whole = Step(Groups())
    expected = copy.deepcopy(whole.state_dict())
    with torch.no_grad():
        for tensor in (*expert_parameters(whole), *expert_buffers(whole)):
            tensor.zero_()
    whole.load_state_dict(first | second | {"moe.router": expected["moe.router"]}, strict=False)
    assert all(torch.equal(value, expected[name]) for name, value in whole.state_dict().items())


def wrapped_states(folder: str) -> list[dict[str, Tensor]]:
    """An adapter around a layer in a state dict, gathered, before and after it is loaded again."""
    layer = MoELayer(D, F, E, groups=Groups.around(dist.group.WORLD))
    model = nn.Sequential(Wrapper(layer, layer.expert_ids()))
    model[0].base_layer = layer  # once more
    state, gathered = model.state_dict(), []
    checkpoint.save(state, checkpoint_id=folder)
    for is_loaded in (False, True):
        if is_loaded:
            with torch.no_grad():
                for value in state.values():
                    value.zero_()
            checkpoint.load(state, checkpoint_id=folder)
            model.load_state_dict(state)
            state = model.state_dict()
        gathered.append({name: value.full_tensor() for name, value in state.items() if "lora" in name})
    return gathered


def test_adapters_around_a_layer_are_shards_in_a_state_dict(pool, tmp_path):
    wanted = {f"0.lora.{name}": value for name, value in LowRank(range(E)).state_dict().items()}
    for gathered in pool.run(wrapped_states, str(tmp_path), ranks=2):
        for found in gathered:
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], value) for name, value in wanted.items())
