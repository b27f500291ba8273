"""Checkpoints: bit-identical at another number of ranks, complete or absent."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lancet_kernels import MoELayer, set_routing_step
from lancet_kernels.cli.trainer import find_checkpoint, load_checkpoint, save_checkpoint
from lancet_kernels.errors import UserError
from lancet_kernels.layer.gpt2_moe import GPT2MoE, ModelConfig

SHAPE = {
    "d_model": 4,
    "d_ff": 6,
    "num_experts": 8,
    "bias": True,
    "shared_expert_d_ff": 5,
    "gate": "sigmoid",
    "top_k": 2,
}


def whole_state(seed: int) -> dict[str, Tensor]:
    """The state of a layer with all experts, from the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"router": (8, 4), "correction_bias": (8,)}
    shapes |= {"shared_up.weight": (5, 4), "shared_up.bias": (5,)}
    shapes |= {"shared_down.weight": (4, 5), "shared_down.bias": (4,)}
    for e in range(8):
        shapes |= {f"experts.{e}.w1": (4, 6), f"experts.{e}.w2": (6, 4)}
        shapes |= {f"experts.{e}.b1": (6,), f"experts.{e}.b2": (4,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_whole_state_dict_loads_strictly():
    """One rank's, as from torch.save; a checkpoint of another layer does not."""
    layer = MoELayer(**SHAPE)
    layer.load_state_dict(whole_state(seed=1))
    assert torch.equal(layer.w2[5], whole_state(seed=1)["experts.5.w2"])
    small = MoELayer(**SHAPE | {"num_experts": 4})
    with pytest.raises(RuntimeError, match=r"(?s)experts\.4\.b1"):
        small.load_state_dict(whole_state(seed=1))
    missing = whole_state(seed=1)
    del missing["experts.3.w1"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "experts.3.w1"\. *$') as caught:
        layer.load_state_dict(missing)
    assert "Unexpected" not in str(caught.value)


def test_missing_and_unexpected_experts_go_by_their_global_names():
    layer = torch.nn.Sequential(MoELayer(**SHAPE))
    state = {f"0.{name}": tensor for name, tensor in whole_state(seed=1).items()}
    for name in ("experts.3.w1", "experts.5.w1", "experts.5.b2", "router"):
        del state[f"0.{name}"]
    before = layer[0].w1.detach().clone()
    found = layer.load_state_dict(state | {"0.experts.8.w1": torch.zeros(4, 6)}, strict=False)
    assert sorted(found.missing_keys) == ["0.experts.3.w1", "0.experts.5.b2", "0.experts.5.w1", "0.router"]
    assert found.unexpected_keys == ["0.experts.8.w1"]
    assert torch.equal(layer[0].w1, before)
    assert torch.equal(layer[0].w2[5], state["0.experts.5.w2"])


# ---- model and optimizer


def small_model(seed: int = 0) -> GPT2MoE:
    torch.manual_seed(seed)
    shape = {"layers": 2, "width": 8, "heads": 2, "sequence": 8, "vocab": 11}
    return GPT2MoE(ModelConfig("small", **shape, num_experts=4, top_k=2, gate="sigmoid"))


def make_optimizer(kind: str, model: GPT2MoE) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def take_steps(model: GPT2MoE, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Something like training, the same on any number of ranks: gradients from names and steps alone."""
    for step in steps:
        for name, parameter in model.named_parameters():
            owner = model.get_submodule(name.rpartition(".")[0])
            # Rank r's experts are rows of one whole [E, ...] gradient.
            experts = isinstance(owner, MoELayer) and name.rpartition(".")[2] in owner.expert_names()
            shape = (4, *parameter.shape[1:]) if experts else parameter.shape
            generator = torch.Generator().manual_seed(step * 1000 + sum(map(ord, name)))
            whole = torch.randn(shape, generator=generator)
            ids = owner.expert_ids() if experts else range(0)
            parameter.grad = whole[ids.start : ids.stop].clone() if experts else whole
        optimizer.step()
        for module in model.modules():
            if isinstance(module, MoELayer):
                module.update_correction_bias(torch.tensor([step, 1, 2, 3]), 0.5)


def trained(kind: str, steps: int) -> tuple[GPT2MoE, torch.optim.Optimizer]:
    """A model after so many steps from the start."""
    model = small_model()
    optimizer = make_optimizer(kind, model)
    take_steps(model, optimizer, range(1, steps + 1))
    return model, optimizer


def save_on_rank(kind: str, folder: str) -> dict[str, Tensor]:
    model, optimizer = trained(kind, 3)
    save_checkpoint(Path(folder), 3, model, optimizer)
    return state_of(model, optimizer)


def load_on_rank(kind: str, folder: str) -> tuple[dict, dict, float]:
    """-> the state as loaded, and after two more steps; the learning rate."""
    model = small_model(seed=9)
    optimizer = make_optimizer(kind, model)
    found = find_checkpoint(Path(folder))
    assert load_checkpoint(found, model, optimizer) == 3
    assert all(p.grad is None for p in model.parameters())
    loaded = state_of(model, optimizer)
    take_steps(model, optimizer, range(4, 6))
    return loaded, state_of(model, optimizer), optimizer.param_groups[0]["lr"]


def state_of(model: GPT2MoE, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What this rank has of the state of both, experts one by one under their global ids."""
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for path, parameter in model.named_parameters():
        owner, (_, _, name) = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")
        experts = isinstance(owner, MoELayer) and name in owner.expert_names()
        for key, value in optimizer.state[parameter].items():
            if experts and value.shape == parameter.shape:
                ids = owner.expert_ids()
                state |= {f"optimizer.{path}.{e}.{key}": value[i] for i, e in enumerate(ids)}
            else:
                state[f"optimizer.{path}.{key}"] = value
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def assert_same(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert actual.keys() == wanted.keys()
    for name, tensor in actual.items():
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_training_state_saved_on_two_ranks_loads_on_any(pool, tmp_path, kind):
    saved = pool.run(save_on_rank, kind, str(tmp_path), ranks=2)
    whole = saved[0] | saved[1]
    per_parameter = {"sgd": {"momentum_buffer"}, "adamw": {"exp_avg", "exp_avg_sq", "step"}}[kind]
    assert {name.rpartition(".")[2] for name in whole if name.startswith("optimizer.")} == per_parameter
    assert_same(state_of(*trained(kind, 3)), whole)
    further = state_of(*trained(kind, 5))
    for ranks in (1, 2, 4):
        union: dict[str, Tensor] = {}
        after: dict[str, Tensor] = {}
        for loaded, stepped, rate in pool.run(load_on_rank, kind, str(tmp_path), ranks=ranks):
            assert rate == {"sgd": 0.1, "adamw": 0.01}[kind]
            assert_same(loaded, {name: whole[name] for name in loaded})
            union |= loaded
            after |= stepped
        assert_same(union, whole)
        assert_same(after, further)


def test_routing_step_is_part_of_the_state():
    layer = MoELayer(4, 4, 4, gate="random")
    set_routing_step(layer, 12)
    assert layer.state_dict()["routing_step"].item() == 12


# ---- complete or absent


@pytest.fixture
def two_checkpoints(tmp_path) -> Path:
    """Steps 3 and 5 of a run of one rank."""
    folder = tmp_path / "checkpoints"
    for steps in (3, 5):
        save_checkpoint(folder, steps, *trained("sgd", steps))
    return folder


def test_a_save_that_was_killed_counts_as_absent_and_is_replaced(two_checkpoints, tmp_path):
    """A killed save leaves data without an index."""
    leftover = two_checkpoints / "step-00000007"
    shutil.copytree(two_checkpoints / "step-00000005", leftover)
    (leftover / ".metadata").unlink()
    (two_checkpoints / "step-notes.txt").write_text("mine")
    assert find_checkpoint(two_checkpoints) == two_checkpoints / "step-00000005"
    assert find_checkpoint(tmp_path / "nowhere") is None
    model, optimizer = trained("sgd", 7)
    assert save_checkpoint(two_checkpoints, 7, model, optimizer) == leftover
    names = sorted(path.name for path in two_checkpoints.iterdir())
    assert names == ["step-00000005", "step-00000007", "step-notes.txt"], "two are kept, and the notes"
    assert find_checkpoint(two_checkpoints) == leftover
    other = small_model(seed=9)
    assert load_checkpoint(leftover, other, make_optimizer("sgd", other)) == 7
    assert_same(other.state_dict(), model.state_dict())


def test_a_checkpoint_of_another_optimizer_is_one_line(two_checkpoints):
    path, model = two_checkpoints / "step-00000005", small_model()
    message = r"^checkpoint: got \S+ \(Missing key in checkpoint state_dict: optimizer\.\S+\).*; train anew"
    with pytest.raises(UserError, match=message):
        load_checkpoint(path, model, make_optimizer("adam", model))


def test_of_a_damaged_checkpoint_the_one_before_is_named(two_checkpoints):
    path, model = two_checkpoints / "step-00000005", small_model()
    optimizer = make_optimizer("sgd", model)
    os.truncate(path / "__0_0.distcp", 1000)
    reason = r"\(PytorchStreamReader failed reading zip archive: failed finding central directory\)"
    with pytest.raises(
        UserError, match=rf"step-00000005 {reason}.*; move it away to resume from step-00000003"
    ):
        load_checkpoint(path, model, optimizer)
    shutil.move(path, two_checkpoints / "moved")
    assert load_checkpoint(find_checkpoint(two_checkpoints), model, optimizer) == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line_and_loses_no_checkpoint(two_checkpoints):
    model = small_model()
    full = two_checkpoints / "step-00000007"
    full.mkdir()
    (full / "__0_0.distcp").symlink_to("/dev/full")
    message = (
        r"^checkpoint: got \S+step-00000007 that rank 0 cannot write \(.*No space left on device.*\), exp"
    )
    with pytest.raises(UserError, match=message):
        save_checkpoint(two_checkpoints, 7, model, make_optimizer("sgd", model))
    assert find_checkpoint(two_checkpoints) == two_checkpoints / "step-00000005"


def find_on_rank(folder: str) -> str:
    return find_checkpoint(Path(folder)).name


def test_all_ranks_find_the_same_checkpoint(pool, two_checkpoints):
    assert pool.run(find_on_rank, str(two_checkpoints)) == ["step-00000005"] * 2
