"""The made-up training steps against counts worked out by hand."""

import pytest

from lancet_kernels.errors import UserError
from lancet_kernels.graph.program import Kind, Phase
from lancet_kernels.graph.synthetic import MODELS, PAPER_BATCH, ModelShape, training_step

B, S, D, V, W, E_LOCAL = 4, 32, 64, 512, 2, 2
T = B * S


@pytest.fixture(scope="module")
def step():
    shape = ModelShape("tiny", layers=2, width=D, heads=4, vocabulary=V, sequence=S)
    return training_step(shape, gpus=W, batch=B)


def flops(program, phase):
    return sum(i.flops for i in program.instructions if i.phase is phase and i.op != "aten.sum")


def test_forward_work_by_hand(step):
    attention_layer = 2 * T * D * 3 * D + 2 * T * D * D + 2 * B * S * S * D
    feed_forward = 2 * 2 * T * D * 4 * D
    # Capacity 1.25 T / E for each of E experts: 1.25 T rows through the experts of all ranks.
    experts = 2 * 2 * (1.25 * T) * D * 4 * D + 2 * T * D * (W * E_LOCAL)
    head = 2 * T * D * V
    assert flops(step, Phase.FORWARD) == 2 * attention_layer + feed_forward + experts + head


def test_backward_is_twice_the_products_and_two_and_a_half_times_the_attention(step):
    attention = 2 * (2 * B * S * S * D)
    products = flops(step, Phase.FORWARD) - attention
    assert flops(step, Phase.BACKWARD) == 2 * products + 2.5 * attention


def test_every_moe_layer_has_four_all_to_alls_of_the_buffer(step):
    exchanges = [i for i in step.instructions if i.kind is Kind.ALL_TO_ALL]
    assert [i.phase for i in exchanges] == [Phase.FORWARD] * 2 + [Phase.BACKWARD] * 2
    assert {i.bytes for i in exchanges} == {1.25 * T * D * 4}
    counts = [i for i in step.instructions if i.kind is Kind.OTHER_COMMUNICATION]
    assert [i.bytes for i in counts] == [W * E_LOCAL * 4]


def test_every_parameter_is_updated_once_and_experts_are_not_reduced(step):
    updated = [i.mutates[0] for i in step.instructions if i.op == "lancet.sgd"]
    assert sorted(updated) == sorted(step.parameters)
    reduced = {t for i in step.instructions if i.kind is Kind.ALL_REDUCE for t in i.inputs}
    assert len(reduced) == len(step.parameters) - 2
    assert not any("expert_" in t for t in reduced)


def test_the_papers_settings():
    assert {c for c, _ in PAPER_BATCH} == {"p3dn", "p4de"}
    for (_, name), batch in PAPER_BATCH.items():
        step = training_step(name, gpus=16, batch=batch)
        gates = sum(i.op == "lancet.gate" for i in step.instructions)
        assert gates == MODELS[name].layers // 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "gpt5"}, "model: got gpt5"),
        ({"gate": "oracle"}, "gate: got oracle"),
        ({"gpus": 0}, "sizes"),
        ({"batch": 0}, "sizes"),
    ],
)
def test_unknown_settings_are_refused(arguments, message):
    settings = {"model": "gpt2-s-moe", "gpus": 2, "batch": 2, "gate": "switch", **arguments}
    with pytest.raises(UserError, match=message):
        training_step(settings.pop("model"), **settings)
