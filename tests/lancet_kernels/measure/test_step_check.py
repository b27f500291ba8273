"""`lancet check`: finds faults that are planted in a step on two ranks, and none in steps that are right."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lancet_kernels import CausalLMStep, MoELayer, convert, ddp, fsdp, moe_losses, prepare_data_parallel
from lancet_kernels.errors import UserError
from lancet_kernels.layer.gpt2_moe import StepResult
from lancet_kernels.measure.difference_kinds import Kind, kind_of_gradient
from lancet_kernels.measure.step_check import Comparison, first_of, on_one_rank, on_this_rank, slice_of
from lancet_kernels.ops.comm.groups import Groups
from tests.grids import few_of
from tests.optimized import optimized
from tests.ranks import RankError
from tests.transformers_models import VOCABULARY, tiny_model

B, S, D, E = 8, 3, 16, 8


class Step(nn.Module):
    """x[B, S, D], target[B, S, D] -> loss. Linear layers around an MoE layer."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.input = nn.Linear(D, D)
        options = {"gate": "topk", "top_k": 2, "capacity_factor": None, **options}
        self.experts = MoELayer(D, 12, E, **options)
        self.output = nn.Linear(D, D)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(4)
        self.double()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (self.output(torch.tanh(self.input(x)) + self.experts(x)) - target).square().mean()


def batch() -> tuple[Tensor, Tensor]:
    """The same on every rank: that of all ranks."""
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(B, S, D, dtype=torch.float64, generator=generator) for _ in range(2))


def on_several() -> bool:
    return dist.get_world_size() > 1


def step(make: Callable[[], nn.Module], around: Callable[[nn.Module], nn.Module]) -> tuple[nn.Module, object]:
    """A model, with what is around it on several ranks."""
    return around(make()) if on_several() else make(), batch()


def under_a_plan() -> tuple[nn.Module, object]:
    """An MoE layer under a plan that cuts."""
    if not on_several():
        return Step(), batch()
    own = slice_of(batch(), dist.get_world_size(), dist.get_rank())
    return optimized(Step(), own, "lancet", reduce_gradients="mean"), batch()


class Balanced(Step):
    """With a capacity of each rank, a shared expert, and a load-balance loss of all ranks."""

    def __init__(self) -> None:
        super().__init__(gate="sigmoid", capacity_factor=1.0, shared_expert_d_ff=12)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y, sums = self.experts(x, return_sums=True)
        loss = (self.output(torch.tanh(self.input(x)) + y) - target).square().mean()
        return loss + 0.01 * moe_losses([sums]).z.mean()


def two_replicas() -> tuple[nn.Module, object]:
    """Two groups of ranks that have all experts."""
    if not on_several():
        return Step(), batch()
    sizes = 2, dist.get_world_size() // 2
    groups = Groups.of(init_device_mesh("cpu", sizes, mesh_dim_names=("replica", "expert")))
    return ddp(Step(groups=groups), groups), batch()


class Dense(Step):
    """No experts."""

    def __init__(self) -> None:
        super().__init__(groups=Groups())
        self.experts = nn.Sequential(nn.Linear(D, 12), nn.GELU(), nn.Linear(12, D)).double()


def fully_sharded(model: Dense) -> nn.Module:
    for part in (model.input, model.experts, model):
        fully_shard(part)
    return model


class Checkpointed(Step):
    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return checkpoint(super().forward, x, target, use_reentrant=False)


def ids() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCABULARY, (4, 7), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def converted() -> tuple[nn.Module, object]:
    """A converted model of transformers, in `ddp`."""
    model = tiny_model("Qwen3-MoE")
    model.config.output_router_logits = False
    if on_several():
        convert(model)
    return ddp(CausalLMStep(model)) if on_several() else CausalLMStep(model), ids()


def of_transformers(implementation: str, folder: str, dtype: torch.dtype) -> tuple[nn.Module, object]:
    """transformers' expert parallelism with FSDP."""
    from tests.lancet_kernels.transformers.test_transformers_ep import loaded

    if not on_several():
        model = tiny_model("Mixtral", dtype)
        model.save_pretrained(folder)
        return model, ids()
    sizes = {"fsdp_size": dist.get_world_size(), "ep_size": 2}
    return loaded(folder, implementation, sizes, dtype=dtype, output_router_logits=False), ids()


with_ddp = functools.partial(step, Step, ddp)
RIGHT = {
    "ddp": with_ddp,
    "fsdp": functools.partial(step, Step, fsdp),
    "plan that cuts": under_a_plan,
    # Other tokens are dropped than in the whole batch.
    "capacity of each rank": functools.partial(step, Balanced, ddp),
    "two replicas": two_replicas,
    "plain ddp": functools.partial(step, Dense, DistributedDataParallel),
    "plain fsdp": functools.partial(step, Dense, fully_sharded),
    "checkpointing": functools.partial(step, Checkpointed, ddp),
    "converted": converted,
}


def reference(make: Callable[[], tuple[nn.Module, object]], file: str, ranks: int) -> None:
    torch.save(on_one_rank(*make(), ranks), file)


def comparison(make: Callable[[], tuple[nn.Module, object]], file: str) -> Comparison:
    model, inputs = make()
    return on_this_rank(model, inputs, torch.load(file, weights_only=False))


@pytest.fixture
def compare(pool, tmp_path: Path):
    """(what to make on one rank, on several, how many) -> what the ranks say."""

    def of_ranks(one: Callable, several: Callable, ranks: int = 2) -> list[Comparison]:
        file = str(tmp_path / "reference.pt")
        pool.run(reference, one, file, ranks, ranks=1)
        return pool.run(comparison, several, file, ranks=ranks)

    return of_ranks


@pytest.mark.parametrize(
    ("name", "ranks"),
    few_of([*((name, 2) for name in RIGHT), ("two replicas", 4), ("fsdp", 4), ("plan that cuts", 4)], 0, 6),
)
def test_nothing_in_a_right_step(compare, name: str, ranks: int) -> None:
    said = compare(RIGHT[name], RIGHT[name], ranks)
    assert first_of(said) is None
    assert all(one.parameters > 5 and len(one.loss) == 2 for one in said)
    assert [bool(one.by_slices) for one in said] == [name == "capacity of each rank"] * ranks


@pytest.mark.parametrize(("implementation", "ranks"), few_of([("lancet", 2), ("all_to_all", 4)]))
def test_nothing_in_expert_parallelism_of_transformers(compare, tmp_path, implementation, ranks) -> None:
    pytest.importorskip("transformers.distributed.expert_parallel")
    pytest.importorskip("accelerate")
    make = functools.partial(of_transformers, implementation, str(tmp_path / "model"), torch.float32)
    said = compare(make, make, ranks)
    assert first_of(said) is None
    assert all(one.parameters > 20 for one in said)


# ---- Faults. Each is planted in a step on several ranks that is right without it.


def missing_sum() -> tuple[nn.Module, object]:
    """One parameter is left out of the sums over the ranks."""
    model = Step()
    prepare_data_parallel(model)
    model._ddp_params_and_buffers_to_ignore.append("output.weight")
    return DistributedDataParallel(model), batch()


def missing_sum_of_replicas() -> tuple[nn.Module, object]:
    """Gradients of experts are not summed over the ranks that hold the same ones."""
    model, inputs = two_replicas()
    model.module.experts.w2._backward_hooks.clear()
    return model, inputs


def factor_of_all() -> tuple[nn.Module, object]:
    """The loss is divided by the number of ranks, and gradients are averaged, too."""

    class Divided(Step):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return super().forward(x, target) / dist.get_world_size()

    return ddp(Divided()), batch()


def factor_of_experts() -> tuple[nn.Module, object]:
    """Gradients of experts are not divided by the number of ranks."""
    model = ddp(Step())
    model.module.experts.w1.register_hook(lambda gradient: gradient * dist.get_world_size())
    return model, batch()


def swapped_weights() -> tuple[nn.Module, object]:
    """Rank 1 computes with its experts in another order."""
    model = ddp(Step())
    layer = model.module.experts
    if dist.get_rank() == 1:
        swap = torch.arange(layer.local_experts)
        swap[:2] = torch.tensor([1, 0])
        weights = layer.weights
        layer.weights = lambda: tuple(None if w is None else w[swap] for w in weights())
    return model, batch()


def swapped_gradients() -> tuple[nn.Module, object]:
    """Gradients of two experts of rank 1 change places."""
    model = ddp(Step())
    if dist.get_rank() == 1:
        model.module.experts.w1.register_hook(lambda g: torch.cat([g[1:2], g[:1], g[2:]]))
    return model, batch()


class OtherRouting(Step):
    """One choice in three is another one on rank 1."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits_TE = nn.functional.linear(x.reshape(-1, D), self.experts.router)
        if dist.get_rank() == 1:
            logits_TE = torch.cat([logits_TE[:4].roll(1, 1), logits_TE[4:]])
        y = self.experts(x, logits_TE=logits_TE)
        return (self.output(torch.tanh(self.input(x)) + y) - target).square().mean()


def routed_otherwise() -> tuple[nn.Module, object]:
    """A few tokens of rank 1 go to other experts."""
    return ddp(OtherRouting()), batch()


def routed_otherwise_in_transformers() -> tuple[nn.Module, object]:
    """The same in a converted model, behind its own router."""
    model, inputs = converted()
    if dist.get_rank() == 1:
        router = model.module.model.model.layers[1].mlp.gate
        router.register_forward_hook(lambda _m, _i, out: (*out[:-1], (out[-1] + 1) % 8))
    return model, inputs


class Cached(nn.Linear):
    """Computes with the weight of its first call, as a copy in another dtype that nobody updates."""

    first = None

    def forward(self, x: Tensor) -> Tensor:
        if self.first is None:
            self.first = self.weight.detach().clone()
        return nn.functional.linear(x, self.weight + (self.first - self.weight).detach(), self.bias)


def stale_weight() -> tuple[nn.Module, object]:
    """A layer computes with the weights of the first step."""
    model = Step()
    model.input = Cached(D, D).double()
    return ddp(model), batch()


def stale_gradient() -> tuple[nn.Module, object]:
    """Rank 0 does not clear one gradient."""
    model = ddp(Step())
    if dist.get_rank() == 0:
        sums: list[Tensor] = []

        def add(parameter: nn.Parameter) -> None:
            sums.append(parameter.grad.clone())
            parameter.grad = sum(sums)

        model.module.output.weight.register_post_accumulate_grad_hook(add)
    return model, batch()


FAULTS = {
    missing_sum: ("gradient", "output.weight", "missing sum", {0: "without the part of rank(s) 1"}),
    factor_of_all: ("gradient", "output.bias", "factor", {0: "0.5 times", 1: "0.5 times"}),
    swapped_weights: ("forward", "experts", "swapped experts", {0: "tokens of experts 4, 5", 1: "4, 5"}),
    routed_otherwise: ("forward", "experts", "routed otherwise", {1: " of 24 choices"}),
    missing_sum_of_replicas: ("gradient", "experts.w2", "missing sum", {0: "of rank(s) 2, 3"}),
    factor_of_experts: ("gradient", "experts.w1", "factor", {0: "2 times", 1: "2 times"}),
    swapped_gradients: ("gradient", "experts.w1", "swapped experts", {1: "expert 4 has that of expert 5"}),
    routed_otherwise_in_transformers: (
        "forward", "model.model.layers.1.mlp.gate", "routed otherwise", {1: "42 of 42 choices"}
    ),
    stale_weight: ("forward", "input", "stale", dict.fromkeys((0, 1), "something is kept from it")),
    stale_gradient: (
        "gradient", "output.weight", "stale",
        dict.fromkeys((0, 1), "that of rank(s) 0 in the step before is still in it"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", few_of(FAULTS, 0, 1, 2, 3))
def test_a_planted_fault_is_named(compare, fault: Callable) -> None:
    right = {routed_otherwise_in_transformers: converted, missing_sum_of_replicas: two_replicas}
    number = 4 if fault is missing_sum_of_replicas else 2
    first, ranks = first_of(compare(right.get(fault, with_ddp), fault, number))
    phase, place, kind, whats = FAULTS[fault]
    assert (first.phase, first.place, first.kind) == (phase, place, kind), first
    assert first.step == (2 if kind == "stale" else 1)
    assert all(what in ranks[rank] for rank, what in whats.items()), ranks
    if len(whats) == 1 and kind != "missing sum":
        assert [*ranks] == [*whats]


class NoSum:
    """In place of FSDP's reduce-scatter: every rank keeps what it has of its own shard."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, **_: Any) -> None:
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


def missing_sum_in_transformers(folder: str) -> tuple[nn.Module, object]:
    """Gradients of experts are not summed over the ranks that have shards of the same ones."""
    model, inputs = of_transformers("lancet", folder, torch.float32)
    model.model.layers[1].mlp.experts.set_custom_reduce_scatter(NoSum())
    return model, inputs


def test_a_missing_sum_in_expert_parallelism_of_transformers_is_named(compare, tmp_path) -> None:
    pytest.importorskip("transformers.distributed.expert_parallel")
    pytest.importorskip("accelerate")
    folder = str(tmp_path / "model")
    right = functools.partial(of_transformers, "lancet", folder, torch.float32)
    first, ranks = first_of(compare(right, functools.partial(missing_sum_in_transformers, folder), 4))
    assert (first.step, first.phase, first.kind) == (1, "gradient", "missing sum"), first
    assert first.place == "model.layers.1.mlp.experts.down_proj"
    lacks = {1: "2, 3", 2: "0, 1", 3: "0, 1"}  # rank 0 that of 3: no token of rank 2 chose its experts
    assert all(ranks[rank] == f"without the part of rank(s) {others}" for rank, others in lacks.items()), (
        ranks
    )


def test_random_numbers_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Flatten(0), nn.Linear(16, 1), nn.Flatten(0))
    with pytest.raises(UserError, match="set dropout to 0"):
        on_one_rank(SumOf(model), (torch.randn(4, 4),), 2)


class SumOf(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sum()


class Reporting(SumOf):
    """A loss to show, and one to differentiate."""

    def forward(self, x: Tensor) -> StepResult:
        objective = super().forward(x)
        return StepResult(objective, *[2 * objective.detach()] * 4)


def test_the_loss_is_what_has_a_gradient() -> None:
    model, x = Reporting(nn.Linear(4, 4)), torch.randn(4, 4)
    objective = model(x).objective.item()
    whole = on_one_rank(model, (x,), 2).steps[0].whole
    assert whole.loss == pytest.approx(objective)
    assert all(gradient is not None for gradient in whole.gradients.values())


def test_batches_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(UserError, match=r"got 5 along its first dimension, expected a multiple of 2"):
        on_one_rank(SumOf(nn.Linear(4, 4)), (torch.randn(5, 4),), 2)


def other_model() -> tuple[nn.Module, object]:
    model, inputs = with_ddp()
    model.module.output = nn.Linear(D, D + 1).double()
    return model, inputs


def test_another_model_is_refused(compare) -> None:
    with pytest.raises(RankError, match=r"parameter output.weight: got \[17, 16\] on each of several ranks"):
        compare(with_ddp, other_model)


def test_a_share_of_an_earlier_gradient_that_is_subtracted_is_named() -> None:
    """slice 0 + slice 1 - half of rank 1's gradient of the step before."""
    generator = torch.Generator().manual_seed(0)
    slices, before = (
        [torch.randn(40, generator=generator, dtype=torch.float64) for _ in range(2)] for _ in range(2)
    )
    mean = (slices[0] + slices[1]) / 2
    kind = kind_of_gradient(mean - before[1] / 4, mean, slices, before, mean)
    assert str(kind) == str(Kind("stale", "that of rank(s) 1 in the step before is still in it"))
