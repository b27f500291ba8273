"""Tensor and context parallelism in predictions: work and messages of a rank, against the whole model's."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs.clusters import CommunicationModel, load_cluster
from lancet_kernels.graph.costs.costs import collective_of
from lancet_kernels.graph.program import Kind
from lancet_kernels.predict.answer import Captured
from lancet_kernels.predict.attention import share_contexts
from lancet_kernels.predict.question import Question
from tests.lancet_kernels.predict.small_models import DEEPSEEK, QWEN3, written
from tests.transformers_families import tiny_config

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    hf = written(tmp_path_factory.mktemp("qwen3"), QWEN3)
    return Question(hf, "dgx-h100", 16, 16, sequence=64, microbatch=2)


def alone(question):
    return Captured.of(question).microbatches[1]


def tensor_messages(program, group="tensor"):
    """By collective and phase, how many of the group."""
    own = [i for i in program.instructions if i.attributes.get("group") == group]
    return Counter((collective_of(i), i.phase.value) for i in own)


def test_two_slices_have_the_work_and_the_parameters_of_the_whole(whole):
    one, slices = alone(whole), alone(replace(whole, tensor_ranks=2))
    assert slices.flops * 2 == pytest.approx(one.flops)
    (experts, others), (own_experts, own_others) = one.numbers, slices.numbers
    assert own_experts == experts
    norms_and_routers = 64 + 3 * (2 * 64 + 2 * 16 + 16 * 64)
    assert own_others - norms_and_routers == (others - norms_and_routers) / 2


def test_a_tied_embedding_is_sliced_once(whole, tmp_path):
    tied = replace(whole, hf=written(tmp_path, QWEN3, tie_word_embeddings=True), tensor_ranks=2)
    numbers = [alone(question).numbers[1] for question in (tied, replace(whole, tensor_ranks=2))]
    assert numbers[1] - numbers[0] == 512 * 64 / 2


def test_a_model_whose_slices_cannot_be_traced_is_one_line(whole, tmp_path):
    """Its norms are those of all heads."""
    tiny_config("olmoe").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"got olmoe, which torch cannot trace.*; plan it without --tensor"):
        alone(replace(whole, hf=str(tmp_path), expert_ranks=8, tensor_ranks=2))


def test_tokens_are_gathered_before_slices_and_summed_behind_them(whole):
    program = alone(replace(whole, tensor_ranks=2)).program
    # Three layers of attention, and the head, which needs all tokens, or the embedding, which has summands.
    assert tensor_messages(program) == {
        ("all_gather", "forward"): 4,
        ("reduce_scatter", "forward"): 4,
        # For what was summed, and again for weight gradients.
        ("all_gather", "backward"): 4 + 4,
        ("reduce_scatter", "backward"): 4,
    }
    assert not tensor_messages(alone(whole).program)


def test_a_rank_sends_its_own_tokens_to_experts(whole):
    sent = [
        sum(i.bytes for i in alone(q).program.instructions if i.kind is Kind.ALL_TO_ALL)
        for q in (whole, replace(whole, tensor_ranks=2))
    ]
    assert sent[1] == sent[0] / 2
    assert replace(whole, tensor_ranks=2).tokens == whole.tokens / 2


def test_parts_of_a_sequence_have_their_share_of_the_work(whole):
    """Attention too, whose queries are a part and whose keys are all of it: half of them count."""
    one, part = alone(whole), alone(replace(whole, context_ranks=2))
    assert part.flops * 2 == pytest.approx(one.flops)
    assert part.numbers == one.numbers
    sent = [sum(i.bytes for i in of.program.instructions if i.kind is Kind.ALL_TO_ALL) for of in (one, part)]
    assert sent[1] == sent[0] / 2
    assert part.question.tokens == whole.tokens / 2


@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_keys_and_values_are_gathered_and_gathered_again(whole, tensor_ranks):
    program = alone(replace(whole, tensor_ranks=tensor_ranks, context_ranks=2)).program
    messages = {
        ("all_gather", "forward"): 6,
        ("all_gather", "backward"): 6,
        ("reduce_scatter", "backward"): 6,
    }
    assert tensor_messages(program, "context") == messages
    # 2 sequences of 64 tokens, a head of 16 numbers in a slice: 2 heads in all.
    gathers = {i.bytes for i in program.instructions if i.attributes.get("group") == "context"}
    assert gathers == {2 * 64 * (2 // tensor_ranks) * 16 * 2}


@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_tokens_are_exchanged_for_heads_and_back(whole, tensor_ranks, tmp_path):
    heads = 4
    whole = replace(whole, hf=written(tmp_path, QWEN3, num_key_value_heads=heads))
    of = alone(replace(whole, tensor_ranks=tensor_ranks, context_ranks=2, cp_comm_type="a2a"))
    assert of.flops * 2 * tensor_ranks == pytest.approx(alone(whole).flops)
    # Queries, keys, values and results of three layers, and their gradients.
    messages = {("all_to_all", "forward"): 4 * 3, ("all_to_all", "backward"): 4 * 3}
    assert tensor_messages(of.program, "context") == messages
    exchanged = {i.bytes for i in of.program.instructions if i.attributes.get("group") == "context"}
    assert exchanged == {2 * 64 // 2 * (heads // tensor_ranks) * 16 * 2}
    # No exchange of experts: no routing stretches it, and no dispatcher sorts its rows.
    assert len(of.program.positions(Kind.ALL_TO_ALL)) == len(alone(whole).program.positions(Kind.ALL_TO_ALL))


def test_shared_experts_and_latent_attention_are_sliced(tmp_path):
    asked = Question(written(tmp_path, DEEPSEEK), "dgx-h100", 8, 8, sequence=64, tensor_ranks=2)
    # Four layers of attention, one dense one, three shared experts, the head or the embedding.
    assert tensor_messages(alone(asked).program)["all_gather", "forward"] == 4 + 1 + 3 + 1


def test_slices_talk_inside_a_node_and_sums_skip_them():
    cluster = load_cluster("dgx-h100")
    model = CommunicationModel.from_cluster(cluster, 64, 8, tensor_ranks=8)
    size = 2.0**26
    inside_gb = cluster.intra_node_gb_per_s * cluster.link_efficiency
    inside = size * 7 / 8 / (inside_gb * 1e6)
    assert model.milliseconds("all_gather", size, "tensor") == pytest.approx(0.015 + inside)
    parts = CommunicationModel.from_cluster(cluster, 64, 8, tensor_ranks=2, context_ranks=4)
    gather = size * 3 / 4 / (inside_gb * 1e6)  # between every second GPU of a node
    assert parts.milliseconds("all_gather", size, "context") == pytest.approx(0.015 + gather)
    exchange = size / 4 * 3 / 4 / (inside_gb * 1e6)
    peers = 3 * cluster.per_peer_us * 1e-3
    latency = cluster.intra_node_latency_us * 1e-3 + peers
    assert parts.milliseconds("all_to_all", size / 4, "context") == pytest.approx(latency + exchange)
    # One rank of each node has the same slice, and eight sums share the network.
    outside = 8 * size * 7 / 8 / (cluster.inter_node_gb_per_s * cluster.link_efficiency * 1e6)
    assert model.milliseconds("all_gather", size, "world") == pytest.approx(0.030 + outside)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_ranks": 3}, "--tensor: got 3 of 16 GPUs"),
        ({"tensor_ranks": 4}, "4 ranks for num_key_value_heads of 2"),
        ({"context_ranks": 3}, "--tensor times --context: got 3 of 16 GPUs"),
        ({"tensor_ranks": 2, "context_ranks": 8, "sequence": 72}, "got 16 ranks for 72 tokens"),
        (
            {"tensor_ranks": 2, "context_ranks": 2, "cp_comm_type": "a2a"},
            "--tensor times --context: got 4 ranks for num_key_value_heads of 2",
        ),
    ],
)
def test_what_cannot_be_sliced_is_one_line(whole, changes, message):
    with pytest.raises(UserError, match=message):
        Captured.of(replace(whole, **changes))


def test_recurrent_layers_and_indexers_are_refused(tmp_path):
    tiny_config("jamba").save_pretrained(tmp_path)
    asked = Question(str(tmp_path), "dgx-h100", 8, 4, sequence=64)
    with pytest.raises(UserError, match="got JambaForCausalLM, whose convolutions need all ranks' tokens"):
        Captured.of(replace(asked, tensor_ranks=2))
    with pytest.raises(UserError, match="--context: got JambaForCausalLM, whose layers need all tokens"):
        Captured.of(replace(asked, context_ranks=2))
    for config in ({"layer_types": ["linear_attention"]}, {"index_topk": 4}):
        with pytest.raises(UserError, match="expected attention without an indexer, no recurrent layers"):
            share_contexts(
                SimpleNamespace(config=SimpleNamespace(**config), modules=lambda: ()), [0, 1], "a2a"
            )
