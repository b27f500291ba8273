"""Converted models on two ranks, each with its own batch, against the originals with all experts on each."""

import copy
import io
import json
import pickle
from multiprocessing.reduction import ForkingPickler
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lancet_kernels import (
    CausalLMStep,
    Groups,
    convert,
    export_state_dict,
    fsdp,
    load_safetensors,
    moe_layers,
    save_safetensors,
)
from lancet_kernels.ops.moe import fused_experts
from tests.grids import few_of
from tests.optimized import optimized
from tests.planned_steps import gradients, sum_over_ranks
from tests.ranks import RankPool
from tests.refusals import refusal
from tests.setups import refused
from tests.transformers_models import (
    COMMON,
    FAMILIES,
    check_equal,
    check_gradients,
    distance,
    quantized_gpt_oss,
    tiny_batch,
    tiny_model,
    zero_,
)

pytest.importorskip("transformers", reason="transformers is not installed")
safetensors = pytest.importorskip("safetensors.torch")

PLANNED_BOUND = 2e-6
"""Some routers compute in float32, also in a float64 model: parts of a batch round otherwise than the whole
batch."""


def compare(model: nn.Module, loss: Tensor, original: nn.Module, bound: float) -> None:
    """The loss of this rank, and all gradients summed over the ranks, are those of the original."""
    theirs = CausalLMStep(original)(**tiny_batch(dist.get_rank()))
    theirs.backward()
    assert distance(loss, theirs) < bound
    for parameter in original.parameters():
        dist.all_reduce(parameter.grad)
    check_gradients(model, original, 100 * bound)


def sum_gradients(model: nn.Module) -> None:
    """Sum the gradients over the ranks that hold the same parameters. Collective."""
    summed = sum_over_ranks(model, gradients(model))
    for name, parameter in model.named_parameters():
        parameter.grad = summed.get(name)


def fused() -> int:
    """-> how many passes through experts were fused launches."""
    model = tiny_model("Mixtral", torch.float32)
    original = copy.deepcopy(model)
    convert(model, backend="fused", strict=True)
    with mock.patch.object(fused_experts, "fused_experts", wraps=fused_experts.fused_experts) as launched:
        loss = CausalLMStep(model)(**tiny_batch(dist.get_rank()))
    loss.backward()
    sum_gradients(model)
    compare(model, loss, original, 1e-6)
    return launched.call_count


@pytest.mark.parametrize(("ranks", "launches"), [(1, 0), (2, 2)])
def test_fused_layers_equal_the_original(pool: RankPool, ranks: int, launches: int) -> None:
    """One rank has nothing to overlap, and launches what backend="torch" does."""
    assert pool.run(fused, ranks=ranks, timeout_s=240) == [launches] * ranks


def saved_and_loaded(folder: str) -> None:
    """State dicts have the names and sizes of the original, load whole tensors, and go through a checkpoint
    that one rank alone reads. save_pretrained is refused."""
    model = tiny_model("GPT-OSS")
    before = copy.deepcopy(model.state_dict())
    convert(model, strict=True)
    state = model.state_dict()
    assert {name: value.shape for name, value in state.items()} == {n: v.shape for n, v in before.items()}
    checkpoint.save(state, checkpoint_id=folder)
    for whole in (before, None):
        zero_(model)
        if whole is None:
            checkpoint.load(model.state_dict(), checkpoint_id=folder)
        else:
            model.load_state_dict(whole)
        check_equal(export_state_dict(model), before)
    with refused("save_pretrained of a converted GptOssForCausalLM: got experts that are on several"):
        model.save_pretrained(folder)


def test_state_dicts_and_checkpoints(pool: RankPool, tmp_path) -> None:
    pool.run(saved_and_loaded, str(tmp_path))
    alone = tiny_model("GPT-OSS")
    before = copy.deepcopy(alone.state_dict())
    zero_(alone)
    checkpoint.load(state := alone.state_dict(), checkpoint_id=str(tmp_path), no_dist=True)
    check_equal(state, before)


def pickled(folder: str, is_sharded: bool) -> None:
    """A state dict of this rank's experts goes to processes and checkpoints; other ways are refused."""
    model = tiny_model("Mixtral")
    before = copy.deepcopy(model.state_dict())
    convert(model, strict=True)
    if is_sharded:
        fsdp(model)
    state, copied = model.state_dict(), copy.deepcopy(model.state_dict())
    told = "model.layers.0.mlp.experts.gate_up_proj to pickle: got a state dict of which each rank has a part"
    for given in (state, copied):
        with refused(told, "torch.distributed.checkpoint", "save_safetensors", "export_state_dict"):
            torch.save(given, io.BytesIO())
    with refused("MixtralForCausalLM: got experts that are on several ranks, expected a folder with"):
        model.push_to_hub("nobody/nothing")
    name = "model.layers.1.mlp.experts.down_proj"
    (sent,) = pickle.loads(ForkingPickler.dumps([state[name]]))  # to a process of this rank
    assert isinstance(sent, DTensor)
    assert torch.equal(sent.full_tensor(), before[name])
    whole = copy.deepcopy(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    torch.save(whole, io.BytesIO())
    checkpoint.async_save(state, checkpoint_id=folder).result()
    for given in (copied, whole, None):
        zero_(model)
        if given is None:
            given = get_model_state_dict(model)
            checkpoint.load(given, checkpoint_id=folder)
        set_model_state_dict(model, given, options=StateDictOptions(full_state_dict=given is whole))
        check_equal(export_state_dict(model), before)


@pytest.mark.parametrize("is_sharded", few_of([False, True]))
def test_a_part_of_the_experts_is_not_pickled(pool: RankPool, tmp_path, is_sharded: bool) -> None:
    pool.run(pickled, str(tmp_path), is_sharded)


def loaded_from_files(folder: str) -> None:
    """Each rank reads its own experts, into a model that had no memory before."""
    with torch.device("meta"):
        model = FAMILIES["Mixtral"]().double()
    convert(model, strict=True)
    load_safetensors(model, folder)
    assert all(layer.gate_up_proj.shape[0] == 4 for layer in moe_layers(model))
    check_equal(export_state_dict(model), tiny_model("Mixtral").state_dict())


@pytest.mark.parametrize("together", [False, True])
def test_ranks_load_their_own_experts(pool: RankPool, tmp_path, together: bool) -> None:
    """From files with each expert for itself, or those of a layer together."""
    model = tiny_model("Mixtral")
    if together:
        safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    else:
        model.save_pretrained(tmp_path)
    pool.run(loaded_from_files, str(tmp_path))


def dequantized(folder: str) -> dict[str, Tensor]:
    import transformers

    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    convert(model, strict=True)
    load_safetensors(model, folder)
    own = {name: value.detach() for name, value in model.named_parameters()}
    save_safetensors(model, f"{folder}/saved")
    return own


def test_ranks_dequantize_their_own_experts(pool: RankPool, tmp_path) -> None:
    pytest.importorskip("transformers.integrations.mxfp4")
    expected = quantized_gpt_oss(tmp_path)
    for rank, own in enumerate(pool.run(dequantized, str(tmp_path))):
        for name, value in own.items():
            whole = expected[name]
            assert torch.equal(value, whole.chunk(2)[rank] if ".experts." in name else whole), name
    saved = {}
    for file in (tmp_path / "saved").glob("*.safetensors"):
        saved |= safetensors.load_file(file)
    check_equal(saved, expected)


def saved_in_another_dtype(folder: str) -> tuple[str, Tensor, Tensor]:
    """-> what is refused where the first rank cannot write; a weight before and behind a save."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float()
    convert(model, strict=True)
    weight = next(model.parameters())
    with torch.no_grad():
        weight.mul_(1.001)
    told = refusal(lambda: save_safetensors(model, f"{folder}/config.json/below"))
    save_safetensors(model, f"{folder}/saved")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/saved")
    return told, weight.detach(), next(loaded.parameters()).detach()


def test_a_save_names_its_dtype_and_fails_on_all_ranks(pool: RankPool, tmp_path) -> None:
    tiny_model("Mixtral", torch.bfloat16).save_pretrained(tmp_path)
    for told, weight, loaded in pool.run(saved_in_another_dtype, str(tmp_path)):
        assert told.startswith(f"file to write: got {tmp_path}/config.json/below (Not a directory)")
        assert loaded.dtype == torch.float32
        assert torch.equal(loaded, weight)


def asked_for_shapes(folder: str) -> None:
    """Qwen3-VL's files have transposed experts or not, by whether the model's have the same shape."""
    import transformers

    text = COMMON | {"hidden_size": 16, "moe_intermediate_size": 16, "num_experts": 8, "head_dim": 8}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "hidden_size": 8, "num_heads": 2, "out_hidden_size": 16}
    config = transformers.Qwen3VLMoeConfig(
        text_config=text | {"rope_parameters": rope},
        vision_config=vision | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    )
    torch.manual_seed(0)
    model = transformers.Qwen3VLMoeForConditionalGeneration(config)
    before = copy.deepcopy(model.state_dict())
    convert(model, strict=True)
    save_safetensors(model, f"{folder}/layers")
    state = export_state_dict(model)
    if dist.get_rank() == 0:
        model.save_pretrained(f"{folder}/whole", state_dict=state)
    dist.barrier()
    for name in ("layers", "whole"):
        check_equal(type(model).from_pretrained(f"{folder}/{name}").state_dict(), before)


def test_conversions_that_ask_for_shapes(pool: RankPool, tmp_path) -> None:
    pool.run(asked_for_shapes, str(tmp_path))


class LiveMemory(TorchDispatchMode):
    """Sees how many bytes of tensors are alive at most, beside those of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.peak, self._live = 0, {}
        self._own = {self._storage(tensor) for tensor in (*model.parameters(), *model.buffers())}

    def _storage(self, tensor: Tensor) -> int:
        return StorageWeakRef(getattr(tensor.detach(), "_local_tensor", tensor).untyped_storage()).cdata

    def __torch_dispatch__(self, function, types, arguments=(), by_name=None):
        made = function(*arguments, **(by_name or {}))
        for tensor in tree_leaves(made):
            if type(tensor) in (Tensor, nn.Parameter):  # others have no memory of their own
                storage = StorageWeakRef(tensor.untyped_storage())
                if storage.cdata not in self._own:
                    self._live.setdefault(storage.cdata, (storage, tensor.untyped_storage().nbytes()))
        self._live = {key: kept for key, kept in self._live.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return made


def peak_of_saving(folder: str) -> float:
    """The largest memory while a model is saved, as a share of all experts of a layer."""
    model = tiny_model("Mixtral")
    convert(model, strict=True)
    with LiveMemory(model) as memory:
        save_safetensors(model, folder)
    return memory.peak / (dist.get_world_size() * sum(p.nbytes for p in moe_layers(model)[0].parameters()))


def test_saving_holds_the_experts_of_one_layer(pool: RankPool, tmp_path) -> None:
    """The first rank; others one parameter, beside the one before, which gloo may hold a little longer."""
    first, second = pool.run(peak_of_saving, str(tmp_path))
    assert 0.99 < first < 1.01
    assert second < 1.01


def sharded_and_saved(family: str, expert_ranks: int, replicated: bool, folder: str) -> None:
    """FSDP with experts in groups: exported and written, and loaded again, it is the original."""
    model, ranks = tiny_model(family), dist.get_world_size()
    kind, before = type(model), copy.deepcopy(model.state_dict())
    shape = (ranks // expert_ranks, expert_ranks)
    groups = Groups.from_mesh(
        init_device_mesh("cpu", shape, mesh_dim_names=("replica", "expert")), "expert", "replica"
    )
    convert(model, groups, strict=True)
    shape = (2, ranks // 2) if replicated else (ranks,)
    fsdp(model, init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :]), groups)
    assert type(model).__name__ == f"FSDP{kind.__name__}"
    if expert_ranks > 1:
        with refused(f"a converted {kind.__name__}: got"):
            model.save_pretrained(folder)
    after = export_state_dict(model)
    assert all(type(value) is Tensor for value in after.values())
    check_equal(after, before)
    del after
    with LiveMemory(model) as memory:
        save_safetensors(model, folder)
    layer = sum(value.nbytes for name, value in before.items() if ".layers.1." in name)
    # An expert more, of few in this model, where several ranks hold the same.
    assert memory.peak < (1.01 if expert_ranks == ranks else 1.3) * layer
    check_equal(kind.from_pretrained(folder, dtype=torch.float64).state_dict(), before)


@pytest.mark.parametrize(
    ("family", "ranks", "expert_ranks", "replicated"),
    few_of(
        [
            ("Mixtral", 2, 2, False),
            ("GPT-OSS", 4, 2, True),
            ("DeepSeek-V3", 4, 2, False),
            ("Qwen3-MoE", 4, 1, True),
            ("OLMoE", 2, 1, False),
            ("GPT-OSS", 1, 1, False),
        ]
    ),
)
def test_a_sharded_model_is_saved_as_the_original(
    pool: RankPool, tmp_path, family: str, ranks: int, expert_ranks: int, replicated: bool
) -> None:
    pool.run(sharded_and_saved, family, expert_ranks, replicated, str(tmp_path), ranks=ranks, timeout_s=120)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    layers = tiny_model(family).config.num_hidden_layers
    assert files == [f"model-{n:05d}-of-{layers + 1:05d}.safetensors" for n in range(1, layers + 2)]
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [
        type(tiny_model(family)).__name__
    ]


def planned() -> None:
    model = tiny_model("Qwen3-MoE")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.gradient_checkpointing_enable()
    model.train()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    original = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "expert"))
    convert(model, mesh, strict=True)
    batch = tiny_batch(dist.get_rank())
    step = optimized(CausalLMStep(model), batch)
    loss = step(**batch)
    loss.backward()
    compare(model, loss, original, PLANNED_BOUND)
    assert not step.fallbacks
    assert step.plan.ranges, "nothing is cut"
    assert step.plan.report.recomputation is not None


@pytest.mark.long
def test_tied_and_checkpointed(pool: RankPool) -> None:
    """Tied embeddings and `gradient_checkpointing_enable()`."""
    pool.run(planned, timeout_s=240)
