"""The models: shapes, where the experts are, causality, and the paper's sizes."""

import math

import pytest
import torch

from lancet_kernels import MoELayer, UserError
from lancet_kernels.layer.gpt2_moe import MODELS, FeedForward, GPT2MoE, model_config
from tests.grids import few_of

TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))


def tiny(**changes) -> GPT2MoE:
    torch.manual_seed(0)
    return GPT2MoE(model_config("gpt2-tiny-moe", vocab=64, num_experts=4, **changes))


def test_shapes():
    logits, sums = tiny()(TOKENS)
    assert logits.shape == (2, 16, 64)
    assert len(sums) == 2
    assert all(s.tokens == 32 and s.assigned_E.sum() == 32 for s in sums)


@pytest.mark.parametrize("name", MODELS)
def test_every_other_block_has_experts(name):
    with torch.device("meta"):
        model = GPT2MoE(model_config(name))
    kinds = [type(block.feed_forward) for block in model.blocks]
    assert kinds == [FeedForward, MoELayer] * (model.config.layers // 2)


# As in GPT-2 (Radford et al. 2019): two norms, attention 4 d^2 + 4 d, feed-forward 8 d^2 + 5 d. The
# experts have no biases. Sizes of the paper: 12 layers of 768, 24 of 1024, sequence 512; GPT-2's vocabulary.
@pytest.mark.parametrize(
    ("name", "layers", "width", "heads", "by_hand"),
    [
        # embeddings 38,990,592, last norm 1,536; 6 times two blocks: attention and norms 4,730,880, dense
        # 4,722,432, router 1,536, two experts 9,437,184
        ("gpt2-s-moe", 12, 768, 12, 152_344_320),
        # 51,987,456 + 2,048 + 12 * (8,404,992 + 8,393,728 + 2,048 + 16,777,216)
        ("gpt2-l-moe", 24, 1024, 16, 454_925_312),
    ],
)
def test_sizes_of_the_paper(name, layers, width, heads, by_hand):
    with torch.device("meta"):
        model = GPT2MoE(model_config(name, num_experts=2))
    assert (model.config.layers, model.config.width, model.config.heads) == (layers, width, heads)
    assert model.config.sequence == 512
    assert sum(p.numel() for p in model.parameters()) == by_hand
    assert all(block.feed_forward.d_ff == 4 * width for block in model.blocks if block.moe)


DROPLESS = {"top_k": 2, "capacity_factor": None}


@pytest.mark.parametrize(
    "changes",
    few_of(
        [*({"gate": gate} | DROPLESS for gate in ("topk", "hash", "sigmoid")), {"capacity_factor": 0.5}], 0, 3
    ),
    ids=str,
)
def test_later_tokens_do_not_reach_earlier_ones(changes):
    """With a capacity, if slots go in token order: a later token cannot push an earlier one out."""
    model, tokens = tiny(**changes), TOKENS[:1]
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 64
    before, after = model(tokens)[0], model(changed)[0]
    torch.testing.assert_close(after[:, :9], before[:, :9], rtol=1e-5, atol=1e-6)
    assert (after[:, 9] - before[:, 9]).abs().max() > 1e-3
    # And every earlier token reaches the last one.
    changed = tokens.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 64
    assert (model(changed)[0][:, -1] - before[:, -1]).abs().max() > 1e-5


def test_untrained_model_knows_nothing():
    logits, _ = tiny()(TOKENS)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    assert abs(loss.item() - math.log(64)) < 0.3


def test_output_projection_is_the_embedding():
    model = tiny()
    names = [name for name, p in model.named_parameters() if p.shape == (64, 128)]
    assert names == ["token_embedding.weight"]
    logits, _ = model(TOKENS)
    logits.sum().backward()
    # Ids that are not in the input get their gradient through the output alone.
    absent = [i for i in range(64) if i not in TOKENS]
    assert absent
    assert model.token_embedding.weight.grad[absent].abs().min(1).values.max() > 0


def test_bad_input():
    with pytest.raises(
        UserError, match="model: got 'gpt5', expected one of gpt2-tiny-moe, gpt2-bench-moe, gpt2-s-moe"
    ):
        model_config("gpt5")
    with pytest.raises(UserError, match="sequence length: got 129, expected at most 128 for gpt2-tiny-moe"):
        tiny()(torch.zeros(1, 129, dtype=torch.int64))
