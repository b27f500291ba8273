"""Converted models of transformers on one process against the originals: outputs, gradients, weights."""

import copy
import weakref

import pytest
import torch
from torch import Tensor, nn

from lancet_kernels import MoELayer, UserError, convert, export_state_dict, load_safetensors, moe_layers
from lancet_kernels.transformers.layouts import Stacked, take_experts
from tests.grids import few_of
from tests.transformers_models import BOUND, FAMILIES, distance, exported_gradients, tiny_batch, tiny_model

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

FEW = few_of(FAMILIES, *map([*FAMILIES].index, ("Mixtral", "DeepSeek-V3", "GPT-OSS")))
"""Those with the least in common by default."""


@pytest.mark.parametrize("family", FEW)
def test_like_the_original(family: str) -> None:
    model = tiny_model(family)
    original = copy.deepcopy(model)
    report = convert(model, strict=True)
    assert len(report.converted) == len(moe_layers(model)) > 0
    assert all(family in what for what in report.converted.values())

    theirs, ours = original(**tiny_batch()), model(**tiny_batch())
    assert distance(ours.logits, theirs.logits) < BOUND
    assert distance(ours.loss, theirs.loss) < BOUND
    logits = theirs.get("router_logits")
    assert (logits is None) == family.startswith("DeepSeek")
    for own, other in zip(ours.get("router_logits") or (), logits or (), strict=True):
        assert distance(own, other) < BOUND
    theirs.loss.backward()
    ours.loss.backward()
    gradients = exported_gradients(model)
    for name, parameter in original.named_parameters():
        assert parameter.grad is not None, name
        assert distance(gradients[name], parameter.grad) < 10 * BOUND, name


@pytest.mark.parametrize("family", FEW)
def test_round_trip(family: str, tmp_path) -> None:
    """Names, layouts and bits of the original; what save_pretrained writes loads into the original class."""
    model = tiny_model(family, torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    convert(model)
    after = export_state_dict(model)
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    model.save_pretrained(tmp_path, state_dict=after)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    convert(loaded)
    for name, value in export_state_dict(loaded).items():
        assert torch.equal(value, before[name].to(value.dtype)), name


def test_experts_are_not_kept_twice() -> None:
    model = tiny_model("Mixtral")
    originals = [weakref.ref(p) for name, p in model.named_parameters() if ".experts." in name]
    convert(model)
    assert len(originals) == 4
    assert all(one() is None for one in originals)


def test_each_weight_is_freed_before_the_next_is_read() -> None:
    experts = tiny_model("Mixtral").model.layers[0].mlp.experts
    gate_up, down = weakref.ref(experts.gate_up_proj), weakref.ref(experts.down_proj)
    taken = take_experts(Stacked(), experts, range(2, 4))
    name, parameter = next(taken)
    assert name == "w1"
    assert parameter.shape == (2, 16, 24)
    assert gate_up() is None
    assert down() is not None


def test_the_correction_bias_is_the_routers_own() -> None:
    model = tiny_model("DeepSeek-V3")
    convert(model)
    (layer,) = moe_layers(model)
    before = layer.block.gate.e_score_correction_bias.clone()
    layer.update_correction_bias(torch.arange(8), 0.5)
    change = torch.tensor([0.5] * 4 + [-0.5] * 4, dtype=before.dtype)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    torch.testing.assert_close(export_state_dict(model)[name], before + change)


def test_fused_layers_refuse_the_activation_of_gpt_oss() -> None:
    with pytest.raises(UserError, match=r"activation of a fused layer: got 'clamped-swiglu'.*use backend="):
        convert(tiny_model("GPT-OSS"), backend="fused")


def test_meta_device() -> None:
    with torch.device("meta"):
        model = FAMILIES["OLMoE"]()
    convert(model)
    assert all(p.is_meta for p in model.parameters())
    assert moe_layers(model)[0].w1.shape == (8, 16, 24)


def test_unknown_blocks_are_named_and_left_alone() -> None:
    class SomeMoE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(4, 4)])

    model = nn.ModuleDict({"known": tiny_model("Mixtral"), "other": SomeMoE()})
    with pytest.raises(UserError, match=r"model to convert: got other \(SomeMoE is not a block of Mixtral"):
        convert(model, strict=True)
    assert not moe_layers(model)
    report = convert(model)
    assert "2 MoE blocks converted, 1 left alone" in str(report)
    assert list(report.left_alone) == ["other"]
    assert isinstance(model["other"], SomeMoE)
    assert len(moe_layers(model)) == 2


def test_settings_that_change_results_are_refused() -> None:
    model = tiny_model("Mixtral")
    model.model.layers[0].mlp.jitter_noise = 0.1
    model.model.layers[1].mlp.experts.act_fn = nn.GELU()
    report = convert(model)
    assert not report.converted
    assert "router_jitter_noise=0.1" in report.left_alone["model.layers.0.mlp"]
    assert "activation GELU" in report.left_alone["model.layers.1.mlp"]


def test_bad_input_is_refused() -> None:
    block = tiny_model("Mixtral").model.layers[0].mlp
    with pytest.raises(UserError, match="which is an MoE block itself"):
        convert(block)
    with pytest.raises(UserError, match="without MoE blocks"):
        convert(nn.Linear(2, 2), strict=True)
    with pytest.raises(UserError, match="backend"):
        convert(nn.Sequential(block), backend="other")
    assert not isinstance(block, MoELayer)


class ExpertMLP(nn.Module):
    """One expert as transformers 4.5x has it."""

    def __init__(self, width: int, hidden: int, names: tuple[str, str, str]) -> None:
        super().__init__()
        for name, shape in zip(names, ((width, hidden), (width, hidden), (hidden, width)), strict=True):
            setattr(self, name, nn.Linear(*shape, bias=False))
        self.names, self.act_fn = names, nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(self.act_fn(gate(x)) * up(x))


class ListedBlock(nn.Module):
    """A block as transformers 4.5x has it: a list of experts, settings on the block, logits returned."""

    renormalize = True
    names = ("w1", "w3", "w2")

    def __init__(self) -> None:
        super().__init__()
        self.top_k, self.norm_topk_prob = 2, self.renormalize
        self.gate = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(ExpertMLP(16, 12, self.names) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.reshape(-1, x.shape[-1])
        logits = self.gate(rows)
        weight, chosen = logits.softmax(-1).topk(self.top_k)
        weight = weight / weight.sum(-1, keepdim=True) if self.renormalize else weight
        every = torch.stack([expert(rows) for expert in self.experts], 1)
        own = every.gather(1, chosen[..., None].expand(-1, -1, rows.shape[-1]))
        return (own * weight[..., None]).sum(1).view(x.shape), logits


class MixtralSparseMoeBlock(ListedBlock):
    """Found by its class name."""


class OlmoeSparseMoeBlock(ListedBlock):
    """Found by its class name."""

    renormalize = False
    names = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("kind", [MixtralSparseMoeBlock, OlmoeSparseMoeBlock])
def test_listed_experts(kind: type[ListedBlock]) -> None:
    """Blocks in the layout of transformers 4.5x, as a model of their own."""
    torch.manual_seed(0)
    model = nn.Sequential(kind()).double()
    original = copy.deepcopy(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    convert(model, strict=True)
    after = export_state_dict(model)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    (y, logits), (y_original, logits_original) = model(x), original(x)
    torch.testing.assert_close(y, y_original)
    torch.testing.assert_close(logits, logits_original)
    (y.square().sum() + logits.square().sum()).backward()
    (y_original.square().sum() + logits_original.square().sum()).backward()
    gradients = exported_gradients(model)
    for name, parameter in original.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


@pytest.mark.parametrize("family", FEW)
def test_load_on_the_meta_device(family: str, tmp_path) -> None:
    """A model that is built and converted without memory, and read from the shards of the original."""
    original = tiny_model(family)
    original.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with torch.device("meta"):
        model = FAMILIES[family]().double()
    convert(model, strict=True)
    load_safetensors(model, tmp_path)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    exported = export_state_dict(model)
    for name, value in original.state_dict().items():
        assert torch.equal(exported[name], value), name
    assert distance(model.eval()(**tiny_batch()).loss, original.eval()(**tiny_batch()).loss) < BOUND


def test_checkpoints_that_do_not_fit_are_refused(tmp_path) -> None:
    model = tiny_model("OLMoE")
    convert(model)
    with pytest.raises(UserError, match=r"checkpoint: got .*without model\.safetensors"):
        load_safetensors(model, tmp_path)
    tiny_model("GPT-OSS").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"got no tensor model\.layers\.0\.self_attn\.q_norm\.weight, exp"):
        load_safetensors(model, tmp_path)
