"""`optimize` of models after `fully_shard`: FSDP's gathers and scatters in the plan.

The reference is the same model whole on one rank, with the batches of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.utils.checkpoint import checkpoint

from lancet_kernels import MoELayer, OptimizedModule, clip_gradients, fsdp, moe_losses
from lancet_kernels.ops.comm.groups import Groups
from lancet_kernels.optimization.optimize import optimize
from tests.grids import few_of
from tests.optimized import one_capture, optimized
from tests.ranks import RankPool
from tests.trials import with_times

D, BATCH = 8, 4
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """ranks that share experts; how the others hold the parameters; of what type."""

    expert_ranks: int = 1
    replicated: bool = False
    reshard: bool | None = None
    checkpointed: bool = False
    dtype: torch.dtype = torch.float64


class Block(nn.Module):
    def __init__(self, groups: Groups | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.layer = MoELayer(
            D, 12, 4, top_k=2, gate="topk", capacity_factor=None, activation="swiglu", groups=groups
        )
        self.mix = nn.Linear(D, D)

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        y, sums = self.layer(self.norm(x), return_sums=True)
        return x + y + torch.tanh(self.mix(x)), sums


class Step(nn.Module):
    """x[B, S, 5] -> loss. The last weight has 7 rows, which no number of ranks divides; two are tied."""

    def __init__(self, groups: Groups | None, case: Case = Case(), balance: float = 0.01) -> None:
        super().__init__()
        self.groups, self.checkpointed, self.balance = groups, case.checkpointed, balance
        torch.manual_seed(0)
        self.input = nn.Linear(5, D)
        self.blocks = nn.ModuleList(Block(groups) for _ in range(2))
        self.head, self.again = nn.Linear(D, 7), nn.Linear(D, 7)
        self.again.weight = self.head.weight
        for parameter in self.parameters():
            parameter.data *= 5
        self.to(case.dtype)

    def forward(self, x: Tensor) -> Tensor:
        x, of_layers = self.input(x), []
        for block in self.blocks:
            x, sums = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
            of_layers.append(sums)
        loss = (self.head(x) - 0.3 * self.again(x.tanh())).square().mean()
        return loss + self.balance * moe_losses(of_layers, self.groups).balance.mean()


def batch_of(rank: int, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(BATCH, 3, 5, dtype=torch.float64, generator=generator).to(dtype)


def groups_with(expert_ranks: int) -> Groups:
    shape = (dist.get_world_size() // expert_ranks, expert_ranks)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "expert"))
    return Groups.from_mesh(mesh, "expert", "replica")


def sharded(case: Case, **options: object) -> Step:
    """The step with its parameters sharded over the ranks."""
    ranks = dist.get_world_size()
    shape = (2, ranks // 2) if case.replicated else (ranks,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])
    groups = groups_with(case.expert_ranks)
    return fsdp(Step(groups, case), mesh, groups, reshard_after_forward=case.reshard, **options)


def planned(case: Case) -> OptimizedModule:
    return optimized(sharded(case), (batch_of(dist.get_rank(), 0),), "none", reduce_gradients="mean")


def whole(case: Case = Case()) -> Step:
    """The same on this rank alone, with the same values."""
    return Step(Groups(), Case(dtype=case.dtype))


def full(name: str, tensor: Tensor, like: Tensor, case: Case) -> tuple[Tensor, Tensor]:
    """What the ranks hold of a tensor together, and the same part of the whole model's."""
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    if ".layer.w" in name:
        experts = like.shape[0] // case.expert_ranks
        like = like.narrow(0, experts * (dist.get_rank() % case.expert_ranks), experts)
    return tensor.detach(), like.detach()


def off_by(tensors: Tensors, like: Tensors, case: Case) -> float:
    """The largest difference, as a share of the largest element of its tensor (of 0.001 if that is less)."""
    worst = 0.0
    for name, tensor in tensors.items():
        mine, theirs = full(name, tensor, like[name], case)
        worst = max(worst, float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3)))
    return worst


def distance(step: nn.Module, reference: nn.Module, case: Case) -> float:
    """How far the gradients are off."""
    return off_by(gradients_of(step), gradients_of(reference), case)


def gradients_of(step: nn.Module) -> Tensors:
    return {name: parameter.grad for name, parameter in step.named_parameters()}


def optimizer_of(step: nn.Module, case: Case) -> torch.optim.Optimizer:
    """Adam in float64. It divides by the size of a gradient: where that is rounding alone, float32 moves a
    parameter by a whole step either way."""
    kind = torch.optim.Adam if case.dtype is torch.float64 else torch.optim.SGD
    return kind(step.parameters(), lr=0.01)


def copied(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def three_steps(case: Case, strategies: Iterable[str]) -> dict[str, float]:
    """By strategy, how far gradients, norms and parameters are off in three clipped steps of an optimizer,
    which are those of the whole model. One capture serves all strategies."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    reference, expected = whole(case), []
    theirs = optimizer_of(reference, case)
    for number in range(3):
        reference(torch.cat([batch_of(r, number, case.dtype) for r in range(ranks)])).backward()
        gradients = copied(gradients_of(reference))
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        theirs.step()
        theirs.zero_grad()
        expected.append((gradients, norm, copied(dict(reference.named_parameters()))))
    step, worst = sharded(case), {}
    start = copied(dict(step.named_parameters()))
    with one_capture():
        for strategy in strategies:
            ready = optimized(step, (batch_of(rank, 0, case.dtype),), strategy, reduce_gradients="mean")
            own, differences = optimizer_of(step, case), []
            for number, (gradients, norm, parameters) in enumerate(expected):
                ready(batch_of(rank, number, case.dtype)).backward()
                differences.append(off_by(gradients_of(step), gradients, case))
                differences.append(float((clip_gradients(step, 0.5, step.groups) - norm).abs() / norm))
                own.step()
                own.zero_grad()
                differences.append(off_by(dict(step.named_parameters()), parameters, case))
            assert not ready.fallbacks
            worst[strategy] = max(differences)
            with torch.no_grad():
                for name, parameter in step.named_parameters():
                    parameter.copy_(start[name])
    return worst


STRATEGIES = ("none", "tutel", "lancet-dw", "lancet-partition", "lancet", "duplex", "lancet+duplex")
ENDS = ("none", "lancet+duplex")
CASES = [(2, Case(expert_ranks=2), ("duplex",))]
# All strategies where each use gathers, and where nothing but the first forward does.
CASES += [(2, Case(2), STRATEGIES), (2, Case(2, reshard=False, checkpointed=True), STRATEGIES)]
CASES += [
    (2, case, ENDS)
    for case in (
        Case(2, checkpointed=True),
        Case(2, reshard=False),
        Case(1),
        Case(1, reshard=False, checkpointed=True),
        Case(2, dtype=torch.float32),
    )
]
# Whoever shares experts and holds copies.
CASES += [
    (4, Case(1), ("tutel", "lancet")),
    (4, Case(1, replicated=True, checkpointed=True), ("lancet-dw", "duplex")),
    (4, Case(2, reshard=False), ("lancet-partition", "lancet+duplex")),
    (4, Case(2, replicated=True), ("lancet-dw", "lancet-partition")),
    (4, Case(4, checkpointed=True), ("lancet", "lancet+duplex")),
    (4, Case(4, replicated=True, reshard=False), ("tutel", "duplex")),
    (4, Case(2, replicated=True, dtype=torch.float32), ENDS),
]
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-5}


@pytest.mark.parametrize(("ranks", "case", "strategies"), few_of(CASES))
def test_equals_the_whole_model(pool: RankPool, ranks: int, case: Case, strategies: tuple[str, ...]) -> None:
    # Seven plans, on a machine that may be busy.
    limits = {"timeout_s": 600.0, "collective_timeout_s": 120.0}
    for worst in pool.run(three_steps, case, strategies, ranks=ranks, **limits):
        assert worst.keys() == set(strategies)
        assert max(worst.values()) < BOUNDS[case.dtype], worst


# ---- What stays of FSDP.


class Halves(nn.Module):
    """A block in bfloat16 between ones in float32, as `MixedPrecisionPolicy` has it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.input = nn.Linear(5, D)
        self.blocks = nn.ModuleList(Block(None) for _ in range(2))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, D))

    def forward(self, x: Tensor) -> Tensor:
        x = self.input(x) * self.scale
        for block in self.blocks:
            x, _ = block(x)
        return x.float().square().mean()


def mixed_precision(reduce_dtype: torch.dtype | None) -> list[float]:
    """Largest differences of loss and gradients from FSDP's own, which have 8 bits."""
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype, output_dtype=torch.float32)
    step = fsdp(Halves(), mp_policy=policy)
    x = batch_of(dist.get_rank(), 0).float()
    ready = optimized(step, (x,), "none", reduce_gradients="mean")
    step.zero_grad()
    results = []
    for module in (step, ready):
        loss = module(x)
        loss.backward()
        gradients = [p.grad.full_tensor() for p in step.parameters()]
        assert all(p.grad.dtype is p.dtype is torch.float32 for p in step.parameters())
        step.zero_grad()
        results.append([loss.detach(), *gradients])
    assert not ready.fallbacks
    assert results[0][0].dtype is results[1][0].dtype
    pairs = zip(*results, strict=True)
    return [float((own - planned).abs().max() / own.abs().max().clamp(min=1e-3)) for own, planned in pairs]


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, D), nn.Linear(D, 6)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


def columns_of_second(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.shape == (6, D) else None


def sharded_along_columns() -> float:
    step, reference, x = Dense(), Dense(), batch_of(dist.get_rank(), 0)
    fully_shard(step, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=columns_of_second)
    assert step.second.weight.placements == (Shard(1),)
    ready = optimized(step, (x,), "none", reduce_gradients="mean")
    reference(torch.cat([batch_of(r, 0) for r in range(2)])).backward()
    ready(x).backward()
    assert not ready.fallbacks
    return distance(step, reference, Case())


def test_parameters_sharded_along_another_dimension(pool: RankPool) -> None:
    assert max(pool.run(sharded_along_columns)) < 1e-9


def summed_without_a_plan() -> float:
    step, reference, x = Dense().float(), Dense().float(), batch_of(dist.get_rank(), 0).float()
    fsdp(step)
    optimized(step, (x,), "none", reduce_gradients="sum")
    step(x).backward()
    for rank in range(2):
        reference(batch_of(rank, 0).float()).backward()
    return distance(step, reference, Case())


def test_sums_in_float32_that_fsdp_does_itself(pool: RankPool) -> None:
    assert max(pool.run(summed_without_a_plan)) < 1e-5


def tried_sharded(folder: str, plain_ms: float) -> tuple[bool, float]:
    """Trials of a sharded model: whether it runs as it is then, and how far its gradients are off."""
    case, groups = Case(expert_ranks=2), groups_with(2)
    step, x = Step(groups), batch_of(dist.get_rank(), 0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with with_times(plain=plain_ms):
        ready = optimize(step, (x,), shard=mesh, groups=groups, times=f"{folder}/times.json", trials=1)
    assert all(isinstance(parameter, DTensor) for parameter in step.parameters())
    assert all(parameter.grad is None for parameter in step.parameters()), "trials leave no gradient"
    reference = whole()
    reference(torch.cat([batch_of(r, 0) for r in range(dist.get_world_size())])).backward()
    ready(x).backward()
    return ready.plan.plain, distance(step, reference, case)


@pytest.mark.long
@pytest.mark.parametrize("plain_ms", [1.0, 1000.0])
def test_sharded_model_is_tried_as_it_is_and_with_plans(
    pool: RankPool, tmp_path: Path, plain_ms: float
) -> None:
    for plain, off in pool.run(tried_sharded, str(tmp_path), plain_ms):
        assert plain == (plain_ms == 1.0)
        assert off < 1e-9


@pytest.mark.long
@pytest.mark.parametrize("reduce_dtype", few_of([None, torch.float32]))
def test_mixed_precision_is_that_of_fsdp(pool: RankPool, reduce_dtype: torch.dtype | None) -> None:
    for differences in pool.run(mixed_precision, reduce_dtype):
        assert max(differences) < 2e-2


def bytes_of_this_rank(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """What parameters, gradients and the optimizer's state take here."""
    tensors = [t for p in model.parameters() for t in (p, p.grad, *optimizer.state[p].values())]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if t.dim()]
    return sum(t.numel() * t.element_size() for t in local)


def memory() -> list[int]:
    case = Case(expert_ranks=2)
    step, reference = planned(case), whole()
    x = batch_of(dist.get_rank(), 0)
    result = []
    for module, model in ((step, step.module), (reference, reference)):
        optimizer = torch.optim.Adam(model.parameters())
        module(x).backward()
        optimizer.step()
        result.append(bytes_of_this_rank(model, optimizer))
    return result


@pytest.mark.long
def test_each_rank_holds_its_share(pool: RankPool) -> None:
    for mine, all_of_it in pool.run(memory, ranks=4):
        # The last shard of 7 rows over 4 ranks has one; small weights have fewer rows than ranks.
        assert mine < 1.15 * all_of_it / 4


def calls_without_the_plan() -> None:
    """After a forward without gradients, in evaluation mode, and of the model itself."""
    case = Case(expert_ranks=2)
    x = batch_of(dist.get_rank(), 0)
    model, reference = sharded(case), whole()
    with torch.no_grad():
        model(x)  # which leaves the outermost module gathered
    step = optimized(model, (x,), "none", reduce_gradients="mean")
    reference(torch.cat([batch_of(r, 0) for r in range(dist.get_world_size())])).backward()
    with torch.no_grad():
        step(x)
    for mode in (lambda: step, lambda: step.module, step.eval, step.train):
        mode()(x).backward()
        assert distance(step.module, reference, case) < 1e-9
        step.module.zero_grad()
    assert step.fallbacks == {"the module is in evaluation mode": 1}
    # A batch of another size runs with the plan.
    longer, reference = [torch.cat([batch_of(r, k) for k in range(2)]) for r in range(2)], whole()
    reference(torch.cat(longer)).backward()
    step(longer[dist.get_rank()]).backward()
    assert distance(step.module, reference, case) < 1e-9
    assert step.fallbacks.total() == 1


@pytest.mark.long
def test_calls_without_the_plan(pool: RankPool) -> None:
    pool.run(calls_without_the_plan)


def evaluated_under_inference_mode() -> None:
    """By a planned step, before FSDP has gathered anything itself."""
    x = batch_of(dist.get_rank(), 0)
    step = optimized(sharded(Case()), (x,), "none")
    with torch.inference_mode():
        first = step(x)
    step.eval()
    assert torch.equal(step(x), first)


@pytest.mark.long
def test_a_sharded_step_is_evaluated_under_inference_mode(pool: RankPool) -> None:
    pool.run(evaluated_under_inference_mode)


def trained(case: Case, steps: Iterable[int], folder: Path, load: bool, plan: bool) -> list[float]:
    """Losses of some steps, after loading a checkpoint or before saving one."""
    step = sharded(case)
    optimizer = torch.optim.Adam(step.parameters(), lr=0.01)
    if load:
        state = get_state_dict(step, optimizer)
        state = {"model": state[0], "optimizer": state[1]}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(step, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    own = batch_of(dist.get_rank(), 0)
    ready = optimized(step, (own,), "none", reduce_gradients="mean") if plan else step
    losses = []
    for number in steps:
        # The same tokens on any number of ranks.
        loss = ready(
            torch.cat([batch_of(r, number) for r in range(4)]).chunk(dist.get_world_size())[dist.get_rank()]
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    if not load:
        state = get_state_dict(step, optimizer)
        dcp.save({"model": state[0], "optimizer": state[1]}, checkpoint_id=folder)
    return losses


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "then"), [(2, 4), (4, 2)])
def test_a_checkpoint_goes_on_without_the_plan(pool: RankPool, tmp_path: Path, ranks: int, then: int) -> None:
    def run(ranks: int, steps: range, load: bool, plan: bool) -> list[float]:
        return pool.run(trained, Case(2), steps, tmp_path, load, plan, ranks=ranks)[0]

    run(ranks, range(2), load=False, plan=True)
    rest = run(then, range(2, 4), load=True, plan=False)
    uninterrupted = run(ranks, range(4), load=False, plan=False)
    assert rest == pytest.approx(uninterrupted[2:], rel=1e-9)
