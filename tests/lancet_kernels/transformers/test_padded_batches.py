"""`CausalLMStep` of converted models on padded batches: against the originals, and ranks with other numbers
of labels against one process with all of them."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lancet_kernels import CausalLMStep, convert, moe_layers, ops
from lancet_kernels.ops.base import now
from tests.optimized import optimized
from tests.planned_steps import gradients, sum_over_ranks
from tests.ranks import RankPool
from tests.transformers_models import FAMILIES, VOCABULARY, K, check_gradients, distance, tiny_model

pytest.importorskip("transformers", reason="transformers is not installed")

BOUND = 2e-6
"""transformers computes cross entropy in float32, of as many labels as a call has."""
LENGTHS = ((7, 2, 4), (1, 3, 2))
"""Lengths of the sequences of two ranks."""


def padded(rank: int, number: int = 0) -> dict[str, Tensor]:
    """Token ids, labels and mask [3, 7]; padding is id 0, on the right and in one sequence on the left."""
    generator = torch.Generator().manual_seed(10 * number + rank)
    ids = torch.randint(1, VOCABULARY, (3, 7), generator=generator)
    mask = (torch.arange(7) < torch.tensor(LENGTHS[(rank + number) % 2])[:, None]).long()
    mask[1] = mask[1].flip(0)
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, mask[1].argmax()] = -100  # it would be predicted from padding
    return {"input_ids": ids * mask, "labels": labels, "attention_mask": mask}


def count(*batches: dict[str, Tensor]) -> Tensor:
    return sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)


def check(model: nn.Module, original: nn.Module, loss: Tensor, batches: list[dict[str, Tensor]]) -> None:
    """The loss and gradients of a model are those of the original for all these batches as one."""
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    original.zero_grad()
    expected = CausalLMStep(original)(**whole)
    expected.backward()
    assert distance(loss, expected) < BOUND
    check_gradients(model, original, 10 * BOUND)


@pytest.mark.parametrize("family", FAMILIES)
def test_as_the_original(family: str) -> None:
    """Also its own loss of the router, which leaves out padding, too."""
    model = tiny_model(family)
    original = copy.deepcopy(model)
    convert(model, strict=True)
    with mock.patch.object(ops, "dispatch", wraps=ops.dispatch) as dispatch:
        loss = CausalLMStep(model)(**padded(0))
    assert now.padding_mask is None
    rows = [int((call.args[1] >= 0).sum()) for call in dispatch.call_args_list]
    assert rows == [sum(LENGTHS[0]) * K] * len(moe_layers(model)), "padding travels"
    loss.backward()
    check(model, original, loss, [padded(0)])


def build() -> tuple[nn.Module, nn.Module]:
    model = tiny_model("OLMoE")
    model.config.output_router_logits = False  # the product of two means of a rank's tokens
    original = copy.deepcopy(model)
    convert(model, strict=True)
    return model, original


def mean_over_ranks(model: nn.Module, loss: Tensor, is_summed: bool) -> Tensor:
    """Sets the mean of the gradients, unless a plan has, and gives that of the loss."""
    summed = gradients(model) if is_summed else sum_over_ranks(model, gradients(model))
    for name, parameter in model.named_parameters():
        parameter.grad = summed[name] if is_summed else summed[name] / dist.get_world_size()
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def of_all_labels(checkpointed: bool | None) -> None:
    """Args: checkpointed: with use_reentrant, or without; None: not."""
    model, original = build()
    if checkpointed is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointed})
        model.train()
    batches = [padded(rank) for rank in range(2)]
    assert count(batches[0]) != count(batches[1])
    mine = {**batches[dist.get_rank()], "num_items_in_batch": count(*batches)}
    loss = CausalLMStep(model)(**mine)
    loss.backward()
    check(model, original, mean_over_ranks(model, loss, False), batches)


@pytest.mark.parametrize("checkpointed", [None, False, True])
def test_loss_of_all_labels(pool: RankPool, checkpointed: bool | None) -> None:
    pool.run(of_all_labels, checkpointed, ranks=2, timeout_s=120)


def planned() -> None:
    model, original = build()
    model.gradient_checkpointing_enable()
    model.train()
    step = None
    for number in range(2):
        batches = [padded(rank, number) for rank in range(2)]
        mine = {**batches[dist.get_rank()], "num_items_in_batch": count(*batches) + 0.0 * number}
        if step is None:
            step = optimized(CausalLMStep(model), mine, reduce_gradients="mean")
            assert step.plan.ranges, "nothing is cut"
        before = copy.deepcopy(model.state_dict())
        loss = step(**mine)
        loss.backward()
        check(model, original, mean_over_ranks(model, loss, True), batches)
        model.load_state_dict(before)
        model.zero_grad()
    assert not step.fallbacks


@pytest.mark.long
def test_loss_of_all_labels_with_a_plan(pool: RankPool) -> None:
    pool.run(planned, ranks=2, timeout_s=240)


def in_microbatches(strategy: str) -> None:
    """The count is the mean of those of the microbatches."""
    model, original = build()
    batches = [[padded(rank, number) for number in range(3)] for rank in range(2)]
    every = [batch for of_rank in batches for batch in of_rank]
    mine = [{**batch, "num_items_in_batch": count(*every) / 3} for batch in batches[dist.get_rank()]]
    step = optimized(CausalLMStep(model), mine[0], strategy, reduce_gradients="mean", accumulate=3)
    losses = step.microbatches(mine)
    check(model, original, mean_over_ranks(model, torch.stack(losses).mean(), True), every)
    assert not step.fallbacks


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["none", "microbatches"])
def test_loss_of_all_labels_in_microbatches(pool: RankPool, strategy: str) -> None:
    pool.run(in_microbatches, strategy, ranks=2, timeout_s=240)
