"""Runs with experts that are resumed through torch.distributed.checkpoint on other numbers of ranks."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lancet_kernels import Groups, MoELayer, clip_gradients, ddp, export_state_dict, fsdp, moe_losses
from tests.grids import few_of
from tests.optimized import optimized

D, EXPERTS, BATCH = 8, 8, 8


class Step(nn.Module):
    """x[B, D], target[B, D] -> the loss of this rank's part of the batch, divided by the ranks."""

    def __init__(self, groups: Groups | None = None) -> None:
        super().__init__()
        self.input, self.output = nn.Linear(D, D), nn.Linear(D, D)
        self.layer = MoELayer(
            D, 12, EXPERTS, top_k=2, gate="topk", capacity_factor=None, bias=True, groups=groups
        )
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y, sums = self.layer(torch.tanh(self.input(x)), return_sums=True)
        loss = (self.output(x + y) - target).square().mean()
        return (loss + 0.1 * moe_losses([sums]).balance.mean()) / dist.get_world_size()


class Run:
    """A model with its optimizer and its plan. Args: seed: of the initial values. sharing: how many ranks
    share experts; None: all."""

    def __init__(
        self, seed: int, kind: type[torch.optim.Optimizer], sharing: int | None = None, strategy: str = "none"
    ) -> None:
        torch.manual_seed(seed)
        ranks = dist.get_world_size()
        groups = None
        if sharing is not None:
            mesh = init_device_mesh("cpu", (ranks // sharing, sharing), mesh_dim_names=("replica", "expert"))
            groups = Groups.from_mesh(mesh, expert="expert", replica="replica")
        self.model = Step(groups)
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        self.optimizer = kind(self.model.parameters(), lr=0.05, **options)
        self.step = optimized(self.model, self.batch(0), strategy)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """This rank's part of a batch that does not depend on the ranks."""
        generator = torch.Generator().manual_seed(number)
        whole = torch.randn(2, BATCH, D, dtype=torch.float64, generator=generator)
        return tuple(whole.chunk(dist.get_world_size(), 1)[dist.get_rank()])

    def train(self, first: int, last: int) -> list[float]:
        """The losses of these steps, over all ranks."""
        losses = []
        for number in range(first, last):
            loss = self.step(*self.batch(number))
            loss.backward()
            clip_gradients(self.model, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item())
        return losses

    def state(self, options: StateDictOptions) -> dict[str, object]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer}


def interrupted(folder: str, options: StateDictOptions, kind: type) -> list[float]:
    """Losses of a run that saves what it has behind its third step, and goes on; with a plan."""
    run = Run(0, kind, strategy="lancet")
    run.train(0, 3)
    dcp.save(run.state(options), checkpoint_id=folder)
    return run.train(3, 6)


def resumed(folder: str, options: StateDictOptions, kind: type, sharing: int | None) -> list[float]:
    """Losses of a run that starts from there."""
    run = Run(1, kind, sharing)
    state = run.state(options)
    dcp.load(state, checkpoint_id=folder)
    states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(run.model, run.optimizer, **states, options=options)
    return run.train(3, 6)


OPTIONS = {
    "plain": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "cpu": StateDictOptions(cpu_offload=True),
}


ELSEWHERE = ((1, None), (2, None), (4, None), (4, 2))
"""Numbers of ranks, and how many of them share experts."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "kind"),
    [("plain", torch.optim.AdamW), ("flat", torch.optim.AdamW), ("cpu", torch.optim.SGD)],
)
def test_a_run_resumed_on_other_ranks_follows_the_one_that_was_not_interrupted(
    pool, tmp_path: Path, options: str, kind: type
) -> None:
    arguments = str(tmp_path / "checkpoint"), OPTIONS[options], kind
    (losses, _) = pool.run(interrupted, *arguments, ranks=2)
    for ranks, sharing in ELSEWHERE:
        for found in pool.run(resumed, *arguments, sharing, ranks=ranks):
            torch.testing.assert_close(found, losses, rtol=1e-10, atol=0.0)


def steps_with(run: Run, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters behind two steps with this optimizer; the run is as before."""
    before, own = copy.deepcopy(run.model.state_dict()), run.optimizer
    run.optimizer = optimizer
    run.train(2, 4)
    run.optimizer, after = own, copy.deepcopy(run.model.state_dict())
    run.model.load_state_dict(before)
    return after


def states_on_rank(sharing: int | None) -> None:
    run = Run(0, torch.optim.AdamW, sharing)
    run.train(0, 2)
    experts = set(run.model.layer.expert_names())
    own = {name: run.optimizer.state[p]["exp_avg"] for name, p in run.model.named_parameters()}
    state_dict = run.optimizer.state_dict()
    for (name, mine), saved in zip(own.items(), state_dict["state"].values(), strict=True):
        assert isinstance(saved["exp_avg"], DTensor) == (name.removeprefix("layer.") in experts)
        assert not isinstance(saved["step"], DTensor)
        if isinstance(saved["exp_avg"], DTensor):
            assert saved["exp_avg"].shape == (EXPERTS, *mine.shape[1:])
            assert saved["exp_avg"].to_local().data_ptr() == mine.data_ptr()
            shards = [torch.empty_like(mine) for _ in range(sharing or dist.get_world_size())]
            dist.all_gather(shards, mine, group=saved["exp_avg"].device_mesh.get_group())
            assert torch.equal(saved["exp_avg"].full_tensor(), torch.cat(shards))
    saved = copy.deepcopy(state_dict)
    wanted = steps_with(run, run.optimizer)
    # Before its first step an optimizer knows of no experts.
    fresh = [torch.optim.AdamW(run.model.parameters(), lr=1.0) for _ in range(3)]
    fresh[0].load_state_dict(copy.deepcopy(saved))
    run.optimizer.load_state_dict(saved)
    # Whole tensors, as on one rank.
    options = StateDictOptions(full_state_dict=True)
    whole = copy.deepcopy(get_optimizer_state_dict(run.model, run.optimizer, options=options))
    assert not any(isinstance(v, DTensor) for state in whole["state"].values() for v in state.values())
    set_optimizer_state_dict(run.model, fresh[1], whole, options=options)
    # A copy of a model has layers of its own.
    copied = copy.deepcopy(run.model)
    fresh[2] = torch.optim.AdamW(copied.parameters(), lr=1.0)
    state = copy.deepcopy(get_optimizer_state_dict(run.model, run.optimizer))
    set_optimizer_state_dict(copied, fresh[2], state)
    for parameter, mine in zip(copied.parameters(), own.values(), strict=True):
        assert fresh[2].state[parameter]["exp_avg"].shape == mine.shape
    for optimizer in (run.optimizer, *fresh[:2]):
        found = steps_with(run, optimizer)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(("ranks", "sharing"), few_of([(2, None), (4, 2)]))
def test_states_of_experts_are_shards_in_a_state_dict(pool, ranks: int, sharing: int | None) -> None:
    pool.run(states_on_rank, sharing, ranks=ranks)


def names_on_rank() -> list[str]:
    """Model states by name, from a model and from what may be around it."""
    model = Step()
    state = get_model_state_dict(model)
    assert get_model_state_dict(ddp(model)).keys() == state.keys()
    other = Step()
    assert not torch.equal(other.layer.w1, model.layer.w1)
    set_model_state_dict(other, state)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    with pytest.raises(AttributeError, match="expert 9: this rank has"):
        getattr(model.layer.experts, "9")
    return [name for name in state if name.endswith("w1")]


def test_experts_have_their_global_names(pool) -> None:
    by_rank = pool.run(names_on_rank, ranks=2)
    assert by_rank == [[f"layer.experts.{e}.w1" for e in range(4 * r, 4 * r + 4)] for r in range(2)]


def exported(sharing: int | None, is_sharded: bool) -> dict[str, Tensor]:
    run = Run(0, torch.optim.SGD, sharing)
    return export_state_dict(fsdp(run.model) if is_sharded else run.model)


@pytest.mark.parametrize(
    ("ranks", "sharing", "is_sharded"), few_of([(4, 2, True), (2, None, False), (4, 2, False)])
)
def test_all_ranks_export_all_experts(pool, ranks: int, sharing: int | None, is_sharded: bool) -> None:
    torch.manual_seed(0)
    whole = Step().state_dict()
    for state in pool.run(exported, sharing, is_sharded, ranks=ranks):
        assert state.keys() == whole.keys()
        assert all(torch.equal(state[name], whole[name]) for name in whole)
