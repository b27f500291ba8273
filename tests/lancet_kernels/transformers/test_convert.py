"""Converted models of transformers on one process against the originals: outputs, gradients, weights."""

import copy
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lancet_kernels import (
    UserError,
    convert,
    export_state_dict,
    load_safetensors,
    moe_layers,
    save_safetensors,
)
from lancet_kernels.transformers.convert import experts_of
from tests.grids import few_of
from tests.transformers_models import (
    BOUND,
    FAMILIES,
    check_equal,
    check_gradients,
    distance,
    quantized_gpt_oss,
    tiny_batch,
    tiny_model,
    zero_,
)

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
safetensors = pytest.importorskip("safetensors.torch")

FEW = few_of(FAMILIES, *map([*FAMILIES].index, ("Mixtral", "DeepSeek-V3", "GPT-OSS", "DBRX")))
"""Those with the least in common by default."""


def check_loss_and_gradients(model: nn.Module, original: nn.Module) -> tuple[Any, Any]:
    """-> what both give."""
    ours, theirs = model(**tiny_batch()), original(**tiny_batch())
    assert distance(ours.loss, theirs.loss) < BOUND
    theirs.loss.backward()
    ours.loss.backward()
    check_gradients(model, original, 100 * BOUND)
    return ours, theirs


@pytest.mark.parametrize("family", FEW)
def test_like_the_original(family: str) -> None:
    model = tiny_model(family)
    original = copy.deepcopy(model)
    report = convert(model, strict=True)
    assert len(report.converted) == len(moe_layers(model)) > 0
    assert all("Expert" in what and ", 8 of 8 experts here" in what for what in report.converted.values())

    ours, theirs = check_loss_and_gradients(model, original)
    assert distance(ours.logits, theirs.logits) < BOUND
    logits = theirs.get("router_logits")
    assert (logits is None) == family.startswith("DeepSeek")
    for own, other in zip(ours.get("router_logits") or (), logits or (), strict=True):
        assert distance(own, other) < BOUND


@pytest.mark.parametrize("family", FEW)
def test_round_trip(family: str, tmp_path) -> None:
    """Names, layouts and bits of the original; what save_pretrained writes loads into the original class, and
    one rank needs no `state_dict=`."""
    model = tiny_model(family, torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    convert(model)
    after = export_state_dict(model)
    check_equal(after, before)
    for state in (after, None):
        model.save_pretrained(tmp_path, state_dict=state)
        loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
        convert(loaded)
        check_equal(export_state_dict(loaded), before, check_dtype=False)  # a correction bias is float32


def test_the_module_stays_what_it_was(tmp_path) -> None:
    """Its class is still the model's, and one rank has the same parameters; copies and pickles compute the
    same."""
    model = tiny_model("Mixtral")
    experts = model.model.layers[0].mlp.experts
    own, before = type(experts), dict(model.named_parameters())
    convert(model)
    assert model.model.layers[0].mlp.experts is experts
    assert isinstance(experts, own)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    torch.save(model, tmp_path / "model.pt")
    expected = model(**tiny_batch()).loss
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert type(other.model.layers[0].mlp.experts) is type(experts)
        assert torch.equal(other(**tiny_batch()).loss, expected)


def test_other_experts_are_named_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    old = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(4, 4)])})  # as transformers 4.5x has it
    other = nn.ModuleDict({"experts": nn.Linear(4, 4)})
    model = nn.ModuleDict({"known": tiny_model("Mixtral"), "old": old, "other": other})
    with pytest.raises(UserError, match=r"got ModuleList: .*not one module with .*; Linear: its cl"):
        convert(model, strict=True)
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
    with pytest.raises(UserError, match=r"got ModuleList: .*transformers>=5; Linear: its cl"):
        convert(model, strict=True)
    assert not moe_layers(model)
    report = convert(model)
    assert "2 MoE blocks converted, 2 left alone" in str(report)
    assert list(report.left_alone) == ["old.experts", "other.experts"]
    assert len(moe_layers(model)) == 2


def test_quantized_experts_are_named() -> None:
    model = tiny_model("Mixtral").to(torch.float8_e4m3fn)
    assert "quantized (float8_e4m3fn)" in str(convert(model))


def test_a_forward_of_one_module_is_refused() -> None:
    model = tiny_model("Mixtral")
    experts = model.model.layers[1].mlp.experts
    experts.forward = experts.forward  # as accelerate keeps it for its hooks
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.experts: got a forward .* without device_map"):
        convert(model)
    assert not moe_layers(model), "something was changed"


@pytest.mark.parametrize(
    ("act_fn", "activation"),
    [(nn.functional.silu, "swiglu"), (nn.SiLU(), "swiglu"), (nn.GELU(), "MixtralExperts(")],
)
def test_activations_are_told_by_what_they_compute(act_fn, activation) -> None:
    model = tiny_model("Mixtral")
    for layer in model.model.layers:
        del layer.mlp.experts.act_fn
        layer.mlp.experts.act_fn = act_fn
    original = copy.deepcopy(model)
    convert(model, strict=True)
    assert all(layer.activation.startswith(activation) for layer in moe_layers(model))
    check_loss_and_gradients(model, original)


def test_fused_layers_refuse_other_activations_by_name() -> None:
    model = tiny_model("Mixtral")
    model.model.layers[1].mlp.experts.act_fn = nn.GELU()
    with pytest.raises(UserError, match=r"activation of a fused layer: got 'MixtralExperts\(.*use backend="):
        convert(model, backend="fused")
    assert not moe_layers(model), "something was changed"


def without_slots(forward: Callable[..., Tensor], kept: list[float], x: Tensor, *routing: Tensor) -> Tensor:
    """Experts in which a choice without a slot has no weight. Appends the share of those that have one."""
    expert_TK, weight_TK = routing
    kept_TK, used = torch.zeros_like(weight_TK), [0] * 8
    for t, choices in enumerate(expert_TK.tolist()):
        for k, expert in enumerate(choices):
            kept_TK[t, k], used[expert] = used[expert] < 3, used[expert] + 1  # ceil(0.5 * 14 * 3 / 8)
    kept.append(float(kept_TK.mean()))
    return forward(x, expert_TK, weight_TK * kept_TK)


@pytest.mark.parametrize("family", ["Mixtral", "GPT-OSS", "DeepSeek-V3"])
def test_capacity(family: str) -> None:
    """Choices that find no slot contribute nothing, neither rows nor biases: those of the last tokens."""
    model = tiny_model(family)
    original, kept = copy.deepcopy(model), []
    convert(model, capacity_factor=0.5, strict=True)
    for _, experts in experts_of(original):
        experts.forward = partial(without_slots, experts.forward, kept)
    check_loss_and_gradients(model, original)
    assert len(kept) == len(moe_layers(model))
    assert all(0 < share < 1 for share in kept)


def test_bad_input_is_refused() -> None:
    block = tiny_model("Mixtral").model.layers[0].mlp
    with pytest.raises(UserError, match="without MoE blocks"):
        convert(nn.Linear(2, 2), strict=True)
    with pytest.raises(UserError, match="backend"):
        convert(nn.Sequential(block), backend="other")
    with pytest.raises(UserError, match="capacity_factor"):
        convert(nn.Sequential(block), capacity_factor=0)
    assert not moe_layers(block)


@pytest.mark.parametrize("family", FEW)
def test_load_on_the_meta_device(family: str, tmp_path) -> None:
    """A model that is built and converted without memory, and read from the shards of the original."""
    original = tiny_model(family)
    original.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with torch.device("meta"):
        model = FAMILIES[family]().double()
        convert(model, strict=True)
    assert all(p.is_meta for p in model.parameters())
    load_safetensors(model, tmp_path)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    check_equal(export_state_dict(model), original.state_dict())
    assert distance(model.eval()(**tiny_batch()).loss, original.eval()(**tiny_batch()).loss) < BOUND


def test_loading_fills_the_parameters_that_are_there(tmp_path) -> None:
    model = tiny_model("Mixtral")
    model.save_pretrained(tmp_path)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    convert(model)
    model.model.norm.weight.requires_grad_(False)
    before = dict(model.named_parameters())
    zero_(model)
    load_safetensors(model, tmp_path)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    check_equal(model.state_dict(), expected)
    assert not model.model.norm.weight.requires_grad


def test_a_checkpoint_is_written_over_the_one_that_was_read(tmp_path) -> None:
    """One file in other names' place, then files of the same names, in which parameters lie."""
    model = tiny_model("Mixtral", torch.float32)
    model.save_pretrained(tmp_path)
    expected = 4 * model.lm_head.weight.detach()
    for _ in range(2):
        model = type(model).from_pretrained(tmp_path)
        convert(model)
        model.lm_head.weight.data.mul_(2)
        save_safetensors(model, tmp_path)
    check_equal(type(model).from_pretrained(tmp_path).lm_head.weight.data, expected)


def test_another_head_loads_what_is_common(tmp_path) -> None:
    model = tiny_model("Qwen3-MoE")
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        classifier = transformers.Qwen3MoeForSequenceClassification(model.config).double()
    convert(classifier, strict=True)
    report = load_safetensors(classifier, tmp_path)
    assert str(report) == "initialized anew: score.weight\nleft in the checkpoint: lm_head.weight"
    exported = export_state_dict(classifier)
    assert exported.pop("score.weight").isfinite().all()
    check_equal(exported, {f"model.{name}": value for name, value in model.model.state_dict().items()})


def test_checkpoints_that_do_not_fit_are_refused(tmp_path) -> None:
    model = tiny_model("OLMoE")
    convert(model)
    with pytest.raises(UserError, match=r"model to load: got Sequential, .* give the model inside"):
        load_safetensors(nn.Sequential(model), tmp_path)
    with pytest.raises(UserError, match=r"checkpoint: got .*without model\.safetensors"):
        load_safetensors(model, tmp_path)
    tiny_model("GPT-OSS").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"checkpoint .*: got .*, expected the weights of a OlmoeForCausalLM"):
        load_safetensors(model, tmp_path)
    state = {"model.layers.0.mlp.experts.gate_up_proj_blocks": torch.zeros(2, dtype=torch.uint8)}
    safetensors.save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"gate_up_proj_blocks in the checkpoint: got U8, quantized, exp"):
        load_safetensors(model, tmp_path)


@pytest.mark.parametrize(
    ("name", "config", "told"),
    [
        (
            "experts.0.down_proj.weight_packed",
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            r"got I32, quantized by compressed-tensors, pack-quantized, expected unq.*; .* and dequantize it",
        ),
        ("experts.0.down_proj.weight_packed", {}, "got I32, quantized by compressed-tensors, expected"),
        ("experts.0.down_proj.qweight", {"quant_method": "gptq"}, "got I32, quantized by gptq, expected"),
    ],
)
def test_weights_of_four_bits_are_named(name: str, config: dict, told: str, tmp_path) -> None:
    state = {f"model.layers.0.mlp.{name}": torch.zeros(2, dtype=torch.int32)}
    safetensors.save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    model = tiny_model("OLMoE")
    convert(model)
    with pytest.raises(UserError, match=told):
        load_safetensors(model, tmp_path)


def test_gpt_oss_is_loaded_as_it_is_published(tmp_path) -> None:
    pytest.importorskip("transformers.integrations.mxfp4")
    expected = quantized_gpt_oss(tmp_path)
    for dtype in (torch.bfloat16, torch.float32):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.from_pretrained(tmp_path), dtype=dtype
            )
        convert(model, strict=True)
        assert str(load_safetensors(model, tmp_path)) == "all weights loaded"
        check_equal(model.state_dict(), expected, check_dtype=False)
        assert model.lm_head.weight.dtype == dtype
    # Saved, it is no quantized model.
    save_safetensors(model, tmp_path / "saved")
    loaded = type(model).from_pretrained(tmp_path / "saved", dtype=dtype)
    check_equal(loaded.state_dict(), expected, check_dtype=False)
    assert not hasattr(loaded.config, "quantization_config")


def test_quantized_gpt_oss_is_refused_where_transformers_cannot_dequantize_it(tmp_path, monkeypatch) -> None:
    quantized_gpt_oss(tmp_path)
    model = tiny_model("GPT-OSS")
    convert(model)
    monkeypatch.setitem(sys.modules, "transformers.integrations.mxfp4", None)
    with pytest.raises(
        UserError, match=r"down_proj_blocks in the checkpoint: got U8, quantized by mxfp4, exp"
    ):
        load_safetensors(model, tmp_path)
