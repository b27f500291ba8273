"""Expert groups inside data parallelism: 4 ranks, expert groups of 1, 2 and 4, against one process."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lancet_kernels import Groups, MoELayer, moe_losses, set_gradient_group, set_routing_step
from lancet_kernels.__main__ import main
from lancet_kernels.cli.train import train
from lancet_kernels.cli.train_options import TrainOptions
from lancet_kernels.cli.trainer import find_checkpoint, load_checkpoint, training_state
from lancet_kernels.layer.gpt2_moe import GPT2MoE, ModelConfig, model_config
from lancet_kernels.layer.gradients import clip_gradients, gradient_groups
from lancet_kernels.layer.model_layers import groups_of
from lancet_kernels.layer.summed_gradients import SummedModule
from lancet_kernels.measure.launch import Rank
from lancet_kernels.ops.comm.groups import group_of
from tests.optimized import BOUND, optimized
from tests.planned_steps import gradients
from tests.refusals import refusal

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
        sizes = {"layers": 2, "width": 8, "heads": 2, "sequence": 6, "vocab": VOCABULARY, "num_experts": 4}
        config = ModelConfig("small", top_k=2, gate=case.gate, capacity_factor=case.capacity_factor, **sizes)
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
    loss, _ = SummedModule(step, groups, divide_by=1, bucket_bytes=500)(mine)
    loss.backward()
    found["buckets"] = distances(step, loss, reference)
    norm = torch.stack([g.square().sum() for g in reference[1].values()]).sum().sqrt()
    found["norm"] = {"": float(abs(clip_gradients(step, None, groups) / norm - 1))}
    return found


CASES = {
    "dropless": Case(strategies=("lancet", "lancet+duplex")),
    "random": Case(gate="random", by_mesh=True),
    "capacity": Case(capacity_factor=0.75, strategies=("lancet", "duplex"), by_mesh=True),
}


@pytest.mark.long
@pytest.mark.parametrize(("name", "size"), [("dropless", 2), ("capacity", 2), ("random", 1)])
def test_gradients_of_expert_groups_equal_one_process(pool, name, size):
    case = CASES[name]
    by_rank = pool.run(train_in_groups, case, size, ranks=RANKS, timeout_s=580)
    for found in by_rank:
        assert {*case.strategies, "fallback", "buckets", "norm"} == found.keys()
        assert not {(k, name): d for k, of in found.items() for name, d in of.items() if d > BOUND}
    assert size == 1 or by_rank[0]["lancet"]["parts"] < 0, "nothing was cut"


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
    model = nn.ModuleList([MoELayer(4, 4, 4, groups=group_of(pairs.expert)), MoELayer(4, 4, 4)])
    calls = (
        lambda: groups_of(model),
        lambda: groups_of(model[1], pairs),
        lambda: Groups.from_mesh(mesh, expert="experts"),
        lambda: clip_gradients(model[0], None, tensor),
        lambda: Groups.around(dist.new_group([0, 1, 2]) if dist.get_rank() < 3 else _new_group_and_world()),
    )
    refusals = [refusal(call) for call in calls]
    assert gradient_groups(model[1], everybody)[model[1].w1] == ""
    # However they are given to a layer, they are the same.
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "expert"))
    layer = MoELayer(4, 4, 4, groups=both)
    assert layer.groups is Groups.of(both)
    assert MoELayer(4, 4, 4, groups=both["expert"].get_group()).expert_group == layer.expert_group
    flat = init_device_mesh("cpu", (4,))
    assert MoELayer(4, 4, 4, groups=flat).ranks == 4
    assert Groups.of(flat).expert == MoELayer(4, 4, 4, groups=flat).expert_group
    # torch sorts the ranks of a process group: rank 1 has the first experts, as rank 0 has.
    other_order = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("replica", "expert"))
    given = [ranks_of(g) for g in (pairs, alone, everybody, tensor, Groups.of(both), Groups.of(other_order))]
    return [*given, pairs == again, refusals]


def _new_group_and_world() -> None:
    dist.new_group([0, 1, 2])


def test_groups_on_four_ranks(pool):
    for rank, found in enumerate(pool.run(make_groups, ranks=RANKS)):
        pairs, alone, everybody, tensor, both, other_order, again, refusals = found
        every = [0, 1, 2, 3]
        pair = [0, 1] if rank < 2 else [2, 3]
        assert pairs == {"expert": pair, "replica": [rank % 2, rank % 2 + 2], "data": every, "world": every}
        assert both == pairs
        assert other_order == pairs | {"expert": [rank % 2, rank % 2 + 2], "replica": pair}
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


class Sharded(nn.Module):
    """Two ranks that see the same tokens have half of the hidden width each."""

    def __init__(self, tensor_group: dist.ProcessGroup) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank(tensor_group))
        self.up, self.down = (nn.Linear(*size, bias=False).double() for size in ((6, 4), (4, 6)))
        torch.manual_seed(5)
        self.scale = nn.Parameter(torch.randn(6).double())

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(torch.tanh(self.up(x * self.scale)))).square().sum()


def train_shards() -> dict[str, float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = Sharded(mesh["tensor"].get_group())
    for linear in (model.up, model.down):
        set_gradient_group(linear, mesh["data"].get_group())
    torch.manual_seed(mesh["data"].get_local_rank())
    x = torch.randn(5, 6).double()
    model(x).backward()
    wanted = gradients(model)
    for name, gradient in wanted.items():
        dist.all_reduce(gradient, group=None if name == "scale" else mesh["data"].get_group())
    model.zero_grad()
    ready = optimized(model, (x,), "lancet-dw")
    ready(x).backward()
    return {name: float((g - wanted[name]).abs().max()) for name, g in gradients(model).items()}


def test_gradients_of_shards_are_summed_over_the_ranks_with_the_same_shard(pool):
    for found in pool.run(train_shards, ranks=RANKS, timeout_s=120):
        assert found.keys() == {"up.weight", "down.weight", "scale"}
        assert max(found.values()) < BOUND


# ---- lancet train


def train_on_rank(folder: str, data: str, expert_ranks: int) -> list[float]:
    sizes = {"steps": 3, "batch": 1, "sequence": 16, "validation_batches": 1, "checkpoint_every": 3}
    options = TrainOptions(
        strategy="none", output=f"{folder}/{expert_ranks}", data=data, device="cpu", experts=4,
        expert_ranks=expert_ranks, capacity_factor=None, **sizes,
    )  # fmt: skip
    rank = Rank(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))
    train(options, rank)
    dist.barrier()
    metrics = Path(folder, str(expert_ranks), "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in metrics]


@pytest.mark.long
def test_training_and_checkpoints_in_expert_groups(pool, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} plus {i} is {2 * i}\n" for i in range(1000)))
    pairs, everybody = (
        pool.run(train_on_rank, str(tmp_path), str(text), n, ranks=RANKS, timeout_s=120)[0] for n in (2, 4)
    )
    assert pairs == pytest.approx(everybody, rel=1e-5)
    # What the replicas have saved is one set of experts, which one process can load.
    states = []
    for n in (2, 4):
        path = find_checkpoint(tmp_path / str(n) / "checkpoints")
        model = GPT2MoE(model_config("gpt2-tiny-moe", vocab=256, num_experts=4, capacity_factor=None))
        optimizer = torch.optim.AdamW(model.parameters())
        assert load_checkpoint(path, model, optimizer) == 3
        states.append(training_state(model, optimizer))
    torch.testing.assert_close(*states, rtol=1e-3, atol=1e-4)


def test_expert_ranks_that_do_not_divide(capsys):
    assert main(["train", "--ranks", "4", "--expert-ranks", "3"]) == 1
    assert "expert-ranks: got 3, expected a divisor of the 4 ranks" in capsys.readouterr().err
