"""transformers' expert parallelism on our ops (`ep_implementation="lancet"`) beside its own "all_to_all":
loss and all gradients, for each family, with FSDP, expert-FSDP and tensor parallelism."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from lancet_kernels import CausalLMStep, moe_layers
from lancet_kernels.transformers import routers
from tests.grids import few_of
from tests.optimized import optimized
from tests.ranks import RankPool
from tests.refusals import refusal
from tests.transformers_models import EXPERT_PARALLEL, PLANNED, tiny_batch, tiny_model

pytest.importorskip("transformers.distributed.expert_parallel")
pytest.importorskip("accelerate")

from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.integrations.moe import use_experts_implementation

from lancet_kernels.transformers.expert_parallel import LancetEP


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """family -> the folder of a saved model; made once."""
    folders: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp("models") / family
            tiny_model(family).save_pretrained(folders[family])
        return folders[family]

    return folder


def loaded(
    folder: str, implementation: str, sizes: dict[str, int], kind: Any = AutoModelForCausalLM, **options: Any
) -> nn.Module:
    """The model, sharded by transformers."""
    config = DistributedConfig(ep_implementation=implementation, **sizes)
    options = {"dtype": torch.float64, "experts_implementation": "eager", **options}
    environment = {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank())}
    environment["WORLD_SIZE"] = str(dist.get_world_size())
    with mock.patch.dict(os.environ, environment):
        return kind.from_pretrained(folder, distributed_config=config, **options)


def loss_and_gradients(
    folder: str, implementation: str, sizes: dict[str, int], autocast: bool = False, **options: Any
) -> dict:
    model = loaded(folder, implementation, sizes, **options)
    batch = tiny_batch(dist.get_rank() // sizes.get("tp_size", 1))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.detach(), **local_gradients(model)}


def local_gradients(model: nn.Module) -> dict[str, Tensor]:
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {n: g.to_local() if hasattr(g, "to_local") else g for n, g in gradients.items() if g is not None}


def differences(folder: str, sizes: dict[str, int], options: dict[str, Any]) -> tuple[int, float, bool]:
    """-> compared gradients, the largest difference relative to the largest of its tensor, and do experts
    have gradients other than 0?"""
    theirs = loss_and_gradients(folder, "all_to_all", sizes, **options)
    ours = loss_and_gradients(folder, "lancet", sizes, **options)
    return compared(ours, theirs)


def compared(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[int, float, bool]:
    assert ours.keys() == theirs.keys()
    worst = max(
        float((ours[n] - t).abs().max() / t.abs().max().clamp(min=1e-30))
        for n, t in theirs.items()
        if t.numel()
    )
    return len(ours) - 1, worst, any(bool(g.any()) for n, g in ours.items() if "experts" in n)


def planned(folder: str, sizes: dict[str, int], strategy: str) -> tuple[int, float, bool]:
    """As `differences`, of the second of two planned steps beside "all_to_all" without a plan. In float32:
    torch 2.13 divides float64 gradients of experts that one rank has alone twice."""
    options = {"dtype": torch.float32}
    if "GPT-OSS" in folder and dist.get_world_size() == 2:
        options["swiglu_limit"] = 6.0  # an activation of their own
    theirs = loss_and_gradients(folder, "all_to_all", sizes, **options)
    model = loaded(folder, "lancet", sizes, **options)
    batch = tiny_batch(dist.get_rank())
    inputs = batch["input_ids"], batch["labels"]
    step = optimized(CausalLMStep(model), inputs, strategy, reduce_gradients="mean", accumulate=2)
    for _ in range(2):
        model.zero_grad()
        if strategy == "microbatches":
            loss, _ = step.microbatches([inputs, inputs])
        else:
            loss = step(*inputs)
            loss.backward()
    assert not step.fallbacks
    return compared({"loss": loss.detach(), **local_gradients(model)}, theirs)


def check(
    pool: RankPool, folder: Path, ranks: int, sizes: dict[str, int], bound: float = 1e-9, **options
) -> None:
    check_compared(pool.run(differences, str(folder), sizes, options, ranks=ranks, timeout_s=240), bound)


def check_compared(of_ranks: list[tuple[int, float, bool]], bound: float) -> None:
    for count, worst, experts in of_ranks:
        assert count > 20
        assert worst < bound
        assert experts


def names_and_kinds(folder: str) -> list[tuple[str, str]]:
    loaded(folder, "all_to_all", {"fsdp_size": 2, "ep_size": 2})  # that others were built does not matter
    model = loaded(folder, "lancet", {"fsdp_size": 2, "ep_size": 2})
    return [(one.name, one.activation) for one in moe_layers(model)]


@pytest.mark.parametrize(
    ("family", "activation"), few_of([("Mixtral", "swiglu"), ("GPT-OSS", "interleaved-clamped-swiglu")], 1)
)
def test_plain_weights_run_in_grouped_products(pool, saved, family, activation):
    expected = [(f"experts {i}", activation) for i in range(2)]
    assert pool.run(names_and_kinds, str(saved(family))) == [expected] * 2


STRATEGIES = "lancet-dw", "none", "lancet", "lancet", "lancet", "microbatches"


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "ranks", "sizes", "strategy"),
    [(*of, strategy) for of, strategy in zip(PLANNED, STRATEGIES, strict=True)],
)
def test_planned_steps_equal_all_to_all(pool, saved, family, ranks, sizes, strategy):
    results = pool.run(planned, str(saved(family)), sizes, strategy, ranks=ranks, timeout_s=400)
    check_compared(results, 1e-4)


class OwnExperts(nn.Module):
    """Experts that are no weights: the square of a row, times the number of the expert from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 2

    def forward(self, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
        return (x.square().unsqueeze(1) * ((index + 1) * weight).unsqueeze(2)).sum(1)


def on_two_ranks(experts: nn.Module) -> LancetEP:
    return LancetEP(experts, init_device_mesh("cpu", (2,)), DeviceMesh("cpu", [dist.get_rank()]))


def own_forward(all_to_rank: int | None) -> tuple[bool, bool]:
    """Experts with a forward of their own, four on two ranks; all tokens to the experts of one rank, or as it
    comes. -> equals the sum over the choices, gradients of tokens and weights too?"""
    layer = on_two_ranks(OwnExperts())
    torch.manual_seed(dist.get_rank())
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(5)])
    if all_to_rank is not None:
        index = 2 * all_to_rank + index % 2
    y = layer(x, index, weight)
    reference = (x.square().unsqueeze(1) * ((index % 2 + 1) * weight).unsqueeze(2)).sum(1)
    y_gradients = torch.autograd.grad(y.sin().sum(), (x, weight))
    gradients = torch.autograd.grad(reference.sin().sum(), (x, weight))
    same = all(torch.allclose(a, b) for a, b in zip(y_gradients, gradients, strict=True))
    return torch.allclose(y, reference), same


def refusal_of_a_plan() -> str:
    experts = OwnExperts()
    layer = on_two_ranks(experts)
    fully_shard(experts)
    assert type(experts) is not OwnExperts
    return refusal(lambda: layer.forward_of(experts))


def test_other_experts_are_not_planned(pool):
    """And named by their own class, not by FSDP's."""
    message, other = pool.run(refusal_of_a_plan)
    assert message == other
    assert "experts OwnExperts: got no `use_experts_implementation`" in message


@pytest.mark.parametrize("all_to_rank", [None, 1])
def test_other_experts_run_their_own_forward(pool, all_to_rank):
    assert pool.run(own_forward, all_to_rank) == [(True, True)] * 2


class Config:
    _experts_implementation = "grouped_mm"


def of_kind(gate: bool, bias: bool, transposed: bool, concatenated: bool) -> nn.Module:
    """Experts as transformers' decorator describes them: four, D = 8, F = 16."""

    @use_experts_implementation(
        has_gate=gate, has_bias=bias, is_transposed=transposed, is_concatenated=concatenated
    )
    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = 4
            self.act_fn = nn.SiLU()
            for name, inner, outer in (("gate_up_proj" if gate else "up_proj", 8, 32), ("down_proj", 16, 8)):
                outer = 16 if name == "up_proj" else outer
                shape = (4, inner, outer) if transposed else (4, outer, inner)
                self.register_parameter(name, nn.Parameter(torch.randn(shape)))
                if bias:
                    self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(4, outer)))

        if not concatenated:

            def _apply_gate(self, gate_up: Tensor) -> Tensor:
                return torch.tanh(gate_up[..., ::2]) * gate_up[..., 1::2]

        def forward(self, *args: Tensor) -> Tensor:
            raise AssertionError("its grouped products run in place of it")

    return Experts(Config())


def grouped_on_one_rank(*kind: bool) -> float:
    """The largest difference of results and gradients between ours and transformers' grouped products."""
    torch.manual_seed(1)
    experts, mesh = of_kind(*kind), init_device_mesh("cpu", (1,))
    theirs = copy.copy(experts)
    x, weight = torch.randn(6, 8, requires_grad=True), torch.rand(6, 2, requires_grad=True)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(6)])
    inputs = [x, weight, *experts.parameters()]
    results = []
    for run in (LancetEP(experts, mesh, mesh), theirs):
        y = run(x, index, weight)
        results.append([y, *torch.autograd.grad(y.sin().sum(), inputs)])
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("gate", "concatenated"), [(True, True), (True, False), (False, True)])
def test_every_layout_of_weights(pool, gate, bias, transposed, concatenated):
    assert pool.run(grouped_on_one_rank, gate, bias, transposed, concatenated, ranks=1)[0] < 1e-5


def other_layers(names: list[str]) -> str:
    experts = of_kind(True, False, False, True)
    layer = on_two_ranks(experts)
    experts.name = names[dist.get_rank()]
    return refusal(lambda: layer(torch.ones(3, 8), torch.tensor([[0], [1], [2]]), torch.ones(3, 1)))


def what_is_kept(folder: str) -> tuple[list[str], set[torch.dtype]]:
    """-> blocks that keep their choices; dtypes of correction biases of a model in bfloat16."""
    model = loaded(folder, "lancet", {"ep_size": 2, "fsdp_size": 2})
    blocks = model.named_modules()
    names = [name for name, block in blocks if routers._enter in block._forward_pre_hooks.values()]
    buffers = model.to(torch.bfloat16).named_buffers()
    return names, {b.dtype for name, b in buffers if name.endswith("correction_bias")}


def test_routers_keep_choices_and_biases(pool, saved):
    """What they do with them: test_routers.py."""
    for names, dtypes in pool.run(what_is_kept, str(saved("DeepSeek-V3")), ranks=2):
        assert names == ["model.layers.1.mlp"]
        assert dtypes
        assert all(dtype.itemsize >= 4 for dtype in dtypes)


def test_ranks_in_other_layers_are_named(pool):
    for message in pool.run(other_layers, ["experts 0", "experts 1"]):
        assert "experts 0 on rank 0" in message or "experts 1 on rank 1" in message


@pytest.mark.parametrize(("dtype", "bound"), few_of([(torch.float32, 1e-4), (torch.bfloat16, 0.05)], 1))
def test_autocast_and_lower_precision(pool, saved, dtype, bound):
    """In float32 beside transformers' grouped products; in autocast the experts compute in bfloat16."""
    options = {"dtype": torch.float32, "experts_implementation": "grouped_mm"}
    options["autocast"] = dtype is torch.bfloat16
    check(pool, saved("Qwen3-MoE"), 2, {"fsdp_size": 2, "ep_size": 2}, bound, **options)


CASES = (
    ("Qwen3-MoE", 2, {"fsdp_size": 2, "ep_size": 2}),
    ("GPT-OSS", 2, {"tp_size": 2, "ep_size": 2}),
    ("Mixtral", 4, {"fsdp_size": 4, "ep_size": 2}),
    ("OLMoE", 4, {"fsdp_size": 4, "ep_size": 4}),
    ("DeepSeek-V3", 4, {"fsdp_size": 2, "tp_size": 2, "ep_size": 4}),
    ("GPT-OSS", 4, {"fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 2}),
)
"""Family, ranks, and sizes of the meshes."""


def test_every_family_has_a_case() -> None:
    assert {family for family, *_ in CASES} == {*EXPERT_PARALLEL}


@pytest.mark.parametrize(("family", "ranks", "sizes"), few_of(CASES))
def test_every_family_equals_all_to_all(pool, saved, family, ranks, sizes):
    check(pool, saved(family), ranks, sizes)
