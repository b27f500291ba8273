"""Parts of a model: kinds of layers, shapes on a rank, parameters, and errors in one line."""

import pytest

from lancet_kernels.errors import UserError
from lancet_kernels.graph.program.program import Kind, Phase
from lancet_kernels.predict.parts import load_config, model_parts, on_other_ranks
from lancet_kernels.predict.step import numbers, prepared
from tests.grids import few_of
from tests.lancet_kernels.predict.small_models import DEEPSEEK, DENSE, QWEN3, written

pytest.importorskip("transformers")


def parts_of(tmp_path, config, ranks, **changes):
    return model_parts(load_config(written(tmp_path, config, **changes)), ranks, 2, 32)


@pytest.mark.long
def test_layers_of_one_kind_are_captured_once(tmp_path):
    parts = parts_of(tmp_path, DEEPSEEK, 4)
    assert parts.layers == (0, 1, 1, 1)
    assert [part.name for part in parts.kinds] == ["layer0", "layer1"]
    assert [part.name for part in parts.chain] == ["embedding", "layer0", *["layer1"] * 3, "head"]
    messages = [[i.kind for i in part.program.instructions].count(Kind.ALL_TO_ALL) for part in parts.kinds]
    assert messages == [0, 4]  # dispatch and combine, forward and backward


@pytest.mark.long
def test_parameters_of_a_rank(tmp_path):
    parts = parts_of(tmp_path, QWEN3, 8)
    (layer,) = parts.kinds
    # 2 of 16 experts: gate, up and down.
    assert numbers(layer, is_expert=True) == 2 * 3 * 64 * 32
    attention = 64 * 64 * 2 + 64 * 32 * 2 + 2 * 16
    assert numbers(layer, is_expert=False) == attention + 16 * 64 + 2 * 64
    assert all(p.gradient in layer.program.tensors for p in layer.parameters.values())


@pytest.mark.parametrize("after", few_of([16, 1, 4]))
def test_other_ranks_are_as_if_captured(tmp_path, after):
    """Numbers, bytes, FLOPs and shapes of products as of a capture with so many ranks."""
    derived = prepared(on_other_ranks(parts_of(tmp_path, QWEN3, 2), 2, after), "none").kinds[0]
    captured = prepared(parts_of(tmp_path, QWEN3, after), "none").kinds[0]
    for is_expert in (False, True):
        assert numbers(derived, is_expert) == numbers(captured, is_expert)
    for one, other in zip(derived.program.instructions, captured.program.instructions, strict=True):
        assert (one.op, one.flops) == (other.op, other.flops)
        assert one.attributes.get("gemm") == other.attributes.get("gemm")
        # The tables of counts [ranks, experts per rank] stay as they are; exchanged, they are a few numbers.
        assert one.bytes == pytest.approx(other.bytes, abs=1024)


def test_flops_are_those_of_the_formula(tmp_path):
    """Six FLOPs per parameter and token, and causal attention: two products forward, five backward."""
    parts = parts_of(tmp_path, DENSE, 1)
    (layer,) = parts.kinds
    tokens, weights = 2 * 32, 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96
    attention = 7 * 2.0 * 2 * 4 * 32 * 32 * 16 / 2
    assert sum(i.flops for i in layer.program.instructions) == pytest.approx(6 * tokens * weights + attention)


def test_activations_and_gradients_connect(tmp_path):
    parts = parts_of(tmp_path, QWEN3, 1)
    shapes = [
        part.program.tensors[t].content_bytes
        for part in (*parts.kinds, parts.head)
        for t in (part.takes, part.returns)
    ]
    assert set(shapes) == {2 * 32 * 64 * 2}
    phases = [i.phase for i in parts.kinds[0].program.instructions]
    assert {Phase.FORWARD, Phase.BACKWARD} == set(phases)


@pytest.mark.parametrize(("ranks", "got"), [(3, "3 ranks for 16 experts"), (32, "32 ranks for 16 experts")])
def test_experts_that_do_not_divide(tmp_path, ranks, got):
    with pytest.raises(UserError, match=got):
        parts_of(tmp_path, QWEN3, ranks)


def test_no_such_config():
    with pytest.raises(UserError, match=r"--hf: got nothing\.json"):
        load_config("nothing.json")


def test_unknown_model(tmp_path):
    with pytest.raises(UserError, match=r"--hf: got .*config\.json"):
        load_config(written(tmp_path, {"model_type": "no-such-model"}))
