"""The library's models captured for ranks that are not there, against counts worked out by hand."""

import pytest
import torch
import torch.distributed as dist

from lancet_kernels.errors import UserError
from lancet_kernels.graph.program import Kind, Phase
from lancet_kernels.layer.gpt2_moe import ModelConfig
from lancet_kernels.predict.own_step import fake_ranks, without_contents
from lancet_kernels.predict.simulate import Setting, captured_program
from tests.grids import few_of

B, S, D, V, W, E_LOCAL = 4, 32, 64, 512, 2, 2
T = B * S
CONFIG = ModelConfig("tiny", 2, D, 4, S, vocab=V, num_experts=W * E_LOCAL)


@pytest.fixture(scope="module")
def padded():
    return captured_program(CONFIG, W, B, padded=True)[1]


def flops(program, phase):
    return sum(i.flops for i in program.instructions if i.phase is phase)


def test_forward_work_by_hand(padded):
    attention_layer = 2 * T * D * 3 * D + 2 * T * D * D + 2 * B * S * S * D
    feed_forward = 2 * 2 * T * D * 4 * D
    # Capacity 1.25 T / E for each of E experts: 1.25 T rows through the experts of all ranks.
    experts = 2 * 2 * (1.25 * T) * D * 4 * D + 2 * T * D * (W * E_LOCAL)
    head = 2 * T * D * V
    assert flops(padded, Phase.FORWARD) == 2 * attention_layer + feed_forward + experts + head


def test_backward_is_twice_the_products_and_two_and_a_half_times_the_attention(padded):
    attention = 2 * (2 * B * S * S * D)
    products = flops(padded, Phase.FORWARD) - attention
    assert flops(padded, Phase.BACKWARD) == 2 * products + 2.5 * attention


@pytest.mark.parametrize("share", few_of([1.25, 1.0]))
def test_every_moe_layer_has_four_all_to_alls_of_its_rows(padded, share):
    step = padded if share > 1 else captured_program(CONFIG, W, B)[1]
    exchanges = [i for i in step.instructions if i.kind is Kind.ALL_TO_ALL]
    assert [i.phase for i in exchanges] == [Phase.FORWARD] * 2 + [Phase.BACKWARD] * 2
    assert {i.bytes for i in exchanges} == {share * T * D * 4}


def test_every_parameter_is_updated_once_by_its_gradient_and_experts_are_not_reduced(padded):
    steps = [i for i in padded.instructions if i.op == "lancet.sgd"]
    assert sorted(i.mutates[0] for i in steps) == sorted(padded.parameters)
    assert {i.phase for i in steps} == {Phase.OPTIMIZER}
    specs = padded.tensors
    for gradient, weight, momentum in (i.inputs for i in steps):
        assert specs[gradient].shape == specs[weight].shape == specs[momentum].shape
        maker = padded.instructions[padded.producer[gradient]]
        is_expert = specs[weight].shape in ((E_LOCAL, D, 4 * D), (E_LOCAL, 4 * D, D))
        assert maker.op == (
            "lancet.grouped_gemm_dw" if is_expert else "_c10d_functional.all_reduce_coalesced"
        )
    embedding = next(i for i in steps if specs[i.inputs[1]].shape == (V, D))
    assert embedding.bytes == 5 * V * D * 4


def test_no_memory_is_needed_and_no_group_is_left():
    """Two experts of this model on a rank have 2.1 TB."""
    huge = ModelConfig("huge", 2, 1 << 18, 1024, 8, vocab=16, num_experts=128)
    _, step = captured_program(huge, 64, 1, dtype=torch.bfloat16)
    assert sum(step.tensors[p].content_bytes for p in step.parameters) > 4e12
    assert not dist.is_initialized()


def test_modules_of_fake_tensors_change_their_dtype():
    with without_contents():
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)).to(torch.bfloat16)
        assert module(torch.zeros(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_fake_ranks_are_refused_where_there_are_some():
    with fake_ranks(4):
        assert dist.get_world_size() == 4
        with pytest.raises(UserError, match="process group: got a job of 4 ranks"), fake_ranks(2):
            pass
    assert not dist.is_initialized()


def test_a_wrong_capacity_factor_is_refused():
    with pytest.raises(UserError, match=r"capacity_factor: got -1\.0"):
        Setting("gpt2-tiny-moe", "p4de", 8, capacity_factor=-1.0).priced  # noqa: B018
