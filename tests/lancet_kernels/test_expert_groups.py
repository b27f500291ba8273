"""Expert groups inside data parallelism: 4 ranks, expert groups of 1, 2 and 4, against one process."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lancet_kernels import Groups, MoELayer, UserError, moe_losses, set_routing_step
from lancet_kernels.gradients import GradientBuckets, clip_gradients, gradient_groups, groups_of
from lancet_kernels.models import GPT2MoE, ModelConfig
from lancet_kernels.ops.groups import group_of
from lancet_kernels.schedules import STRATEGY_NAMES
from tests.optimized import BOUND, optimized
from tests.planned_steps import gradients

RANKS = 4
VOCABULARY = 13


@dataclass(frozen=True)
class Case:
    gate: str = "topk"
    capacity_factor: float | None = None
    strategies: tuple[str, ...] = ("lancet",)
    by_mesh: bool = False


class Step(nn.Module):
    """A GPT-2 with experts, and its loss with both router losses."""

    def __init__(self, case: Case, group: dist.ProcessGroup | Groups, ranks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = ModelConfig(
            "small",
            layers=2,
            width=8,
            heads=2,
            sequence=6,
            vocab=VOCABULARY,
            num_experts=4,
            top_k=2,
            gate=case.gate,
            capacity_factor=case.capacity_factor,
        )
        self.model, self.ranks = GPT2MoE(config, group).double(), ranks
        self.data = group if isinstance(group, Groups) else None
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(10)
        set_routing_step(self.model, 3)

    def forward(self, token_BS: Tensor) -> tuple[Tensor, ...]:
        logits_BSV, sums = self.model(token_BS)
        loss = nn.functional.cross_entropy(logits_BSV.flatten(0, 1), token_BS.flatten())
        moe = moe_losses(sums, self.data)
        return (loss + 0.1 * moe.balance.mean() + 0.01 * moe.z.mean()) / self.ranks, logits_BSV.detach()


def batch() -> Tensor:
    """[B, S] of all ranks together."""
    return torch.randint(0, VOCABULARY, (8 * RANKS, 6), generator=torch.Generator().manual_seed(1))


def one_process(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the whole batch with all experts here; with a capacity, each rank's batch is
    routed for itself, and the router losses are those of the sums."""
    step = Step(case, Groups(), 1)
    slices = [batch()] if case.capacity_factor is None else batch().chunk(RANKS)
    losses, all_sums = [], []
    for token_BS in slices:
        logits_BSV, sums = step.model(token_BS)
        losses.append(nn.functional.cross_entropy(logits_BSV.flatten(0, 1), token_BS.flatten()))
        all_sums = [a.plus(b) for a, b in zip(all_sums, sums, strict=True)] if all_sums else sums
    moe = moe_losses(all_sums, Groups())
    loss = torch.stack(losses).mean() + 0.1 * moe.balance.mean() + 0.01 * moe.z.mean()
    loss.backward()
    return loss.detach(), gradients(step)


def expert_group(size: int) -> dist.ProcessGroup:
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, RANKS, size)]
    return groups[dist.get_rank() // size]


def distances(step: Step, loss: Tensor, reference: tuple[Tensor, dict[str, Tensor]]) -> dict[str, float]:
    """How far this rank's loss (the sum over the ranks) and gradients are from one process's."""
    wanted_loss, wanted = reference
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    found = {"loss": float(abs(loss - wanted_loss))}
    own = gradients(step)
    assert own.keys() == wanted.keys()
    for name, gradient in own.items():
        whole = wanted[name]
        if name.rsplit(".", 1)[1] in ("w1", "w2"):
            ids = step.model.blocks[1].feed_forward.expert_ids()
            whole = whole[ids.start : ids.stop]
        found[name] = float((gradient - whole).abs().max() / whole.abs().max())
    return found


def train_in_groups(case: Case, size: int) -> dict[str, dict[str, float]]:
    reference = one_process(case)
    mine = batch().chunk(RANKS)[dist.get_rank()]
    if case.by_mesh:
        mesh = init_device_mesh("cpu", (RANKS // size, size), mesh_dim_names=("replica", "expert"))
        group = Groups.from_mesh(mesh, expert="expert", replica="replica")
    else:
        group = expert_group(size)
    found = {}
    for strategy in case.strategies:
        step = Step(case, group, RANKS)
        ready = optimized(step, (mine,), strategy)
        loss, _ = ready(mine)
        loss.backward()
        found[strategy] = distances(step, loss, reference)
        found[strategy]["parts"] = -sum(planned.parts for planned in ready.plan.ranges)
    # In another mode than planned the plain module runs, and gradients are summed one by one.
    step.zero_grad()
    loss, _ = ready.eval()(mine)
    loss.backward()
    found["fallback"] = distances(step, loss, reference)
    # Without a plan: buckets.
    step = Step(case, group, RANKS)
    groups = groups_of(step)
    buckets = GradientBuckets(step, groups, bucket_bytes=500)
    loss, _ = step(mine)
    loss.backward()
    buckets.finish()
    found["buckets"] = distances(step, loss, reference)
    norm = torch.stack([g.square().sum() for g in reference[1].values()]).sum().sqrt()
    found["norm"] = {"": float(abs(clip_gradients(step, None, groups) / norm - 1))}
    return found


def check(by_rank: list[dict[str, dict[str, float]]], strategies: tuple[str, ...]) -> None:
    for found in by_rank:
        assert {*strategies, "fallback", "buckets", "norm"} == found.keys()
        far = {(k, name): d for k, of in found.items() for name, d in of.items() if d > BOUND}
        assert not far


@pytest.mark.parametrize("size", [2])
def test_gradients_of_expert_groups_equal_one_process(pool, size):
    case = Case()
    by_rank = pool.run(train_in_groups, case, size, ranks=RANKS, timeout_s=240)
    check(by_rank, case.strategies)
    assert by_rank[0]["lancet"]["parts"] < 0, "nothing was cut"


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        Case(strategies=STRATEGY_NAMES),
        Case(gate="random", strategies=("none", "lancet"), by_mesh=True),
        Case(capacity_factor=0.75, strategies=STRATEGY_NAMES, by_mesh=True),
    ],
    ids=["dropless", "random", "capacity"],
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_gradients_of_expert_groups_equal_one_process_for_all_strategies(pool, case, size):
    check(pool.run(train_in_groups, case, size, ranks=RANKS, timeout_s=580), case.strategies)


# ---- The groups themselves


def ranks_of(groups: Groups) -> dict[str, list[int]]:
    names = {"expert": groups.expert, "replica": groups.replica, "data": groups.data, "world": groups.world}
    return {
        k: dist.get_process_group_ranks(group_of(v)) if v else [dist.get_rank()] for k, v in names.items()
    }


def make_groups() -> list[object]:
    pairs = Groups.around(expert_group(2))
    again = Groups.around(group_of(pairs.expert))
    alone = Groups.around(expert_group(1))
    everybody = Groups.around()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "expert"))
    tensor = Groups.from_mesh(mesh, expert="expert")
    model = nn.ModuleList([MoELayer(4, 4, 4, group=group_of(pairs.expert)), MoELayer(4, 4, 4)])
    refusals = []
    for refused in (
        lambda: groups_of(model),
        lambda: groups_of(model[1], pairs),
        lambda: Groups.from_mesh(mesh, expert="experts"),
        lambda: clip_gradients(model[0], None, tensor),
        lambda: Groups.around(dist.new_group([0, 1, 2]) if dist.get_rank() < 3 else _new_group_and_world()),
    ):
        try:
            refused()
        except UserError as error:
            refusals.append(str(error))
    assert gradient_groups(model[1], everybody)[model[1].w1] == ""
    return [ranks_of(g) for g in (pairs, alone, everybody, tensor)] + [pairs == again, refusals]


def _new_group_and_world() -> None:
    dist.new_group([0, 1, 2])


def test_groups_on_four_ranks(pool):
    for rank, found in enumerate(pool.run(make_groups, ranks=RANKS)):
        pairs, alone, everybody, tensor, again, refusals = found
        every = [0, 1, 2, 3]
        pair = [0, 1] if rank < 2 else [2, 3]
        assert pairs == {"expert": pair, "replica": [rank % 2, rank % 2 + 2], "data": every, "world": every}
        assert again
        assert alone == {"expert": [rank], "replica": every, "data": every, "world": every}
        assert everybody == {"expert": every, "replica": [rank], "data": every, "world": every}
        assert tensor == {"expert": pair, "replica": [rank], "data": pair, "world": every}
        assert [text.split(":")[0] for text in refusals] == [
            "expert groups of the model's MoE layers",
            "expert groups of the model's MoE layers",
            "dimension of the mesh",
            "groups",
            "expert groups",
        ]
        assert "[0, 1, 2], [0, 1, 2, 3]" in refusals[-1]
