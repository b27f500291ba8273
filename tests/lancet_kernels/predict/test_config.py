"""Configurations: which layers are captured, and errors in one line."""

import sys

import pytest

from lancet_kernels.errors import UserError
from lancet_kernels.predict.config import (
    Depths,
    depths,
    kinds_of_layers,
    layers_and_experts,
    load_config,
    meta_model,
)
from tests.lancet_kernels.predict.small_models import DEEPSEEK, DENSE, QWEN3, written
from tests.transformers_families import tiny_config

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("kinds", "captured"),
    [
        ([0] * 48, Depths(3, 6, 14)),
        ([0] * 3 + [1] * 58, Depths(6, 9, 52 / 3)),  # DeepSeek-V3: three dense layers
        ([0, 1] * 18, Depths(4, 8, 7)),  # GPT-OSS: attention with and without a window
        ([0, 0, 0, 1] * 12, Depths(4, 8, 10)),  # Qwen3-Next: every fourth attends
        ([0, 0, 0, 1] * 12 + [0, 0], Depths(6, 10, 10)),
        ([0] * 6, Depths(6, 6, 0)),
        ([0, 1, 2, 3, 4, 5], Depths(6, 6, 0)),
        ([0], Depths(1, 1, 0)),
    ],
)
def test_depths_by_hand(kinds, captured):
    chosen = depths(kinds)
    assert chosen == captured
    # A layer each: all layers are counted, those of every kind.
    for kind in set(kinds):
        fewer, more = (kinds[:n].count(kind) for n in (chosen.fewer, chosen.more))
        assert chosen.at_full_depth(fewer, more) == kinds.count(kind)


def test_layers_alike_are_of_one_kind(tmp_path):
    assert kinds_of_layers(meta_model(load_config(written(tmp_path, DEEPSEEK)))) == [0, 1, 1, 1]


def test_a_decoder_without_layers_is_one_line(tmp_path):
    config = written(tmp_path, {"model_type": "gpt2", "n_layer": 1, "n_embd": 64, "n_head": 4})
    with pytest.raises(UserError, match="got gpt2, whose decoder has no `layers` or `blocks`"):
        kinds_of_layers(meta_model(load_config(config)))


def test_no_such_config():
    with pytest.raises(UserError, match=r"--hf: got nothing\.json"):
        load_config("nothing.json")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "no-such-model"}, "its model_type 'no-such-m"),
        ({"model_type": "granitemoehybrid", "num_hidden_layers": "four"}, ".*'num_hidden_layers'"),
    ],
)
def test_what_transformers_refuses_is_one_line(tmp_path, config, why):
    with pytest.raises(UserError, match=rf"--hf: got .*config\.json \({why}") as error:
        load_config(written(tmp_path, config))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


WRONG = [{"hidden_act": "none"}, {"vocab_size": -1}, {"num_hidden_layers": 0}]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_model_that_cannot_be_built_is_one_line(tmp_path, wrong):
    with pytest.raises(UserError, match=r"--hf: got llama (that cannot be built |without layers)") as error:
        layers_and_experts(written(tmp_path, DENSE, **wrong))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_of_the_length_of_a_batch_are_fixed(tmp_path, kind):
    rope = {"rope_type": kind, "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
    model = meta_model(load_config(written(tmp_path, QWEN3, rope_scaling=rope)))
    assert model.model.rotary_emb.rope_type == "default"


def test_a_model_with_code_of_its_own_is_the_class_that_it_names(tmp_path):
    config = load_config(
        written(tmp_path, DEEPSEEK, model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"])
    )
    assert (config.model_type, config.n_routed_experts) == ("deepseek_v3", DEEPSEEK["n_routed_experts"])


def test_numbers_that_json_has_not(tmp_path):
    """As transformers writes them."""
    config = {"model_type": "granitemoehybrid", "time_step_limit": [0.5, {"__float__": "Infinity"}]}
    assert load_config(written(tmp_path, config)).time_step_limit == (0.5, float("inf"))


def test_a_text_model_without_an_auto_class_gets_a_head(tmp_path):
    model = meta_model(load_config(written(tmp_path, {"model_type": "ernie4_5_vl_moe"})))
    assert type(model.model).__name__ == "Ernie4_5_VLMoeTextModel"
    assert model.lm_head.out_features == model.config.vocab_size


@pytest.mark.parametrize("family", ["dbrx", "deepseek_v3", "gemma4", "llama4", "qwen3_vl_moe"])
def test_experts_are_those_of_the_model(tmp_path, family):
    """Whatever its configuration calls their number."""
    tiny_config(family).save_pretrained(tmp_path)
    assert layers_and_experts(str(tmp_path))[1] == 8


def test_a_dense_model_has_no_experts_whatever_its_configuration_says(tmp_path):
    assert layers_and_experts(written(tmp_path, DENSE, num_experts=8))[1] == 0
    config = tiny_config("gemma4")
    config.enable_moe_block = False
    config.save_pretrained(tmp_path / "gemma4")
    assert layers_and_experts(str(tmp_path / "gemma4"))[1] == 0


def test_experts_that_cannot_be_converted_are_refused(tmp_path):
    tiny_config("jetmoe").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="--hf: got jetmoe, which cannot be converted: JetMoeMoA: ") as error:
        layers_and_experts(str(tmp_path))
    assert len(str(error.value)) < 300


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        UserError, match=r"got no transformers.* pip install 'lancet-kernels\[transformers\]'"
    ):
        load_config("config.json")
