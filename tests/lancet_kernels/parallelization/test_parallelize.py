"""`parallelize` on ranks: the same numbers as the model on one device, whatever the strategy."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as recomputed

from lancet_kernels import parallelize
from lancet_kernels.graph.costs.clusters import Cluster, load_cluster
from lancet_kernels.parallelization.parallel_module import ParallelModule
from lancet_kernels.schedules.shard.sharding_baselines import BASELINES
from tests.grids import few_of
from tests.schedules.shard.test_sharding_signatures import MODELS, tiny

GB_PER_S = (1.0, 100.0, 1000.0)
"""Links of three clusters: for each another strategy is the best."""


def cluster(gb_per_s: float) -> Cluster:
    """One GPU a node; what is small here takes as much less time."""
    alone = replace(load_cluster("hidup-v100"), gpus_per_node=1, inter_node_gb_per_s=gb_per_s)
    return replace(alone, inter_node_latency_us=0.0, launch_us=0.0, per_peer_us=0.0)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def distance(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return (found - expected).abs().max().item()


def gradient_errors(step: ParallelModule, model: nn.Module) -> dict[str, float]:
    """By parameter of the model on one device."""
    errors = {}
    own = dict(step.named_parameters())
    for name, parameter in model.named_parameters():
        found = whole(step.whole(name, own[name].grad))
        errors[name] = distance(found, parameter.grad)
    return errors


def errors_of(
    name: str, layers: int, strategy: str, gb_per_s: float
) -> tuple[float, dict[str, float], dict[str, float]]:
    """Errors of the loss, of each gradient, and of each parameter after 3 steps of Adam."""
    model, batch = tiny(name, 8, layers)
    step = parallelize(copy.deepcopy(model), batch, strategy=strategy, cluster=cluster(gb_per_s))
    optimizers = [torch.optim.Adam(m.parameters(), 1e-2) for m in (model, step)]
    loss_error, gradients = 0.0, {}
    for number in range(3):
        batch = [t.roll(number, 0) for t in batch]
        expected, found = model(*batch), step(*batch)
        expected.backward()
        found.backward()
        loss_error = max(loss_error, distance(found, expected))
        gradients = gradients or gradient_errors(step, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = {n: whole(t) for n, t in step.state_dict().items()}
    assert state.keys() == model.state_dict().keys()
    return loss_error, gradients, {n: distance(state[n], t) for n, t in model.state_dict().items()}


WAYS = (*(("hidup", gb_per_s) for gb_per_s in GB_PER_S), *((baseline, 1.0) for baseline in BASELINES))
CASES = [
    ("bert-sgmoe", 1, "hidup", 1000.0, 2),
    # Each model in half of the ways, each way with half of the models; all of them on 2 and on 4 ranks.
    *(
        (name, 2, *way, (2, 4)[(i // 2 + j // 2) % 2])
        for i, name in enumerate(MODELS)
        for j, way in enumerate(WAYS)
        if (i + j) % 2 == 0
    ),
]


@pytest.mark.parametrize(("name", "layers", "strategy", "gb_per_s", "ranks"), few_of(CASES))
def test_ranks_train_as_one_device(pool, name, layers, strategy, gb_per_s, ranks):
    for loss, gradients, parameters in pool.run(
        errors_of, name, layers, strategy, gb_per_s, ranks=ranks, timeout_s=300
    ):
        assert loss < 1e-9
        assert max(gradients.values()) < 1e-9, gradients
        assert max(parameters.values()) < 1e-9, parameters


def made(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model and a batch."""
    return tiny(name, batch=8) if name in MODELS else (Perceptron(), (torch.randn(8, 8).double(),))


class Perceptron(nn.Module):
    """x[B, 8] -> loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(*sizes, dtype=torch.float64) for sizes in ((8, 32), (32, 8)))

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(torch.tanh(self.up(x))) - x).square().mean()


class Checkpointed(Perceptron):
    """Two blocks with one weight."""

    def forward(self, x: Tensor) -> Tensor:
        block = functools.partial(functional.linear, weight=self.down.weight @ self.up.weight)
        for _ in range(2):
            x = recomputed(block, torch.tanh(self.down(torch.tanh(self.up(x)))), use_reentrant=False)
        return x.square().mean()


def checkpointed_errors() -> dict[str, float]:
    torch.manual_seed(4)
    model, x = Checkpointed(), torch.randn(8, 8).double()
    with pytest.warns(UserWarning, match="activation checkpointing inside the model is ignored"):
        step = parallelize(copy.deepcopy(model), (x,), cluster=cluster(1.0))
    model(x).backward()
    step(x).backward()
    return gradient_errors(step, model)


@pytest.mark.long
def test_checkpointed_blocks_are_right_but_saved(pool):
    for errors in pool.run(checkpointed_errors, timeout_s=120):
        assert max(errors.values()) < 1e-12


def saved(folder: str, name: str, kind: type) -> None:
    """A checkpoint of a model that has trained for a step, from all ranks; and what is in it."""
    torch.manual_seed(4)
    model, batch = made(name)
    step = parallelize(model, batch, cluster=cluster(1.0))
    optimizer = kind(step.parameters(), 1e-2)
    step(*batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    state = {"model": step.state_dict(), "optimizer": get_optimizer_state_dict(step, optimizer)}
    checkpoint.save(state, checkpoint_id=f"{folder}/checkpoint")
    gathered = {n: whole(t) for n, t in state["model"].items()}
    loss = step(*batch)
    loss.backward()
    optimizer.step()
    after = {n: whole(t) for n, t in step.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save((gathered, loss.detach(), after), f"{folder}/expected")


def loaded(folder: str, name: str, kind: type, strategy: str) -> tuple[float, float, float, bool]:
    """Errors of the state, of the next loss, of the parameters behind that step; is anything sharded?"""
    torch.manual_seed(4)
    model, batch = made(name)
    for parameter in model.parameters():
        parameter.data.zero_()
    step = parallelize(model, batch, strategy=strategy, cluster=cluster(1.0))
    optimizer = kind(step.parameters(), 1e-2)
    state = {"model": step.state_dict(), "optimizer": step.optimizer_state_dict(optimizer)}
    checkpoint.load(state, checkpoint_id=f"{folder}/checkpoint")
    step.load_state_dict(state["model"])
    step.load_optimizer_state_dict(optimizer, state["optimizer"])
    expected, loss, after = torch.load(f"{folder}/expected")
    found = {n: whole(t) for n, t in step.state_dict().items()}
    state_error = max(distance(found[n], t) for n, t in expected.items())
    next_loss = step(*batch)
    next_loss.backward()
    optimizer.step()
    found = {n: whole(t) for n, t in step.state_dict().items()}
    step_error = max(distance(found[n], t) for n, t in after.items())
    return state_error, distance(next_loss, loss), step_error, any(f.is_cut for f in step.forms.values())


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kind", "ranks", "strategy"),
    few_of(
        [
            ("perceptron", torch.optim.Adagrad, 4, "hidup"),  # which has a state before its first step
            ("bert-sgmoe", torch.optim.Adam, 4, "hidup"),
            ("vit-switch", torch.optim.Adam, 2, "replicated"),
        ],
    ),
)
def test_a_checkpoint_loads_on_two_ranks(pool, tmp_path, name, kind, ranks, strategy):
    arguments = str(tmp_path), name, kind
    pool.run(saved, *arguments, ranks=ranks, timeout_s=300)
    for state, loss, step, is_sharded in pool.run(loaded, *arguments, strategy, timeout_s=300):
        assert state == 0.0
        assert max(loss, step) < 1e-9
        assert is_sharded == (strategy == "hidup")
