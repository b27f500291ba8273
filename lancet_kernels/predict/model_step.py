"""The training step of a model of transformers, captured on fake ranks by the code that `optimize` runs.

The model may have fewer layers than its config says (`config.depths`); `answer` extends what it says of them.

Process groups send nothing and tensors have no contents, so a step can be captured for any number of ranks,
also of models larger than this machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from textwrap import shorten
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.capture import CaptureError
from lancet_kernels.graph.capture.captured_graph import without_garbage_collection
from lancet_kernels.graph.from_fx import is_functional_collective, op_name
from lancet_kernels.graph.meta import GROUP
from lancet_kernels.graph.ops import argument
from lancet_kernels.layer.data_parallel import fsdp
from lancet_kernels.ops.comm.groups import Groups
from lancet_kernels.ops.comm.link_group import link_group
from lancet_kernels.optimization.guards import example_arguments
from lancet_kernels.optimization.step import ModelStep, capture_step
from lancet_kernels.predict.attention import share_contexts
from lancet_kernels.predict.config import check_experts, load_config, meta_model, shortened
from lancet_kernels.predict.own_step import fake_ranks, without_contents
from lancet_kernels.predict.question import Question
from lancet_kernels.predict.recomputation import recompute_as
from lancet_kernels.predict.recurrence import as_instructions
from lancet_kernels.predict.tensor_parallel import slice_model
from lancet_kernels.transformers.convert import convert


class _Loss(nn.Module):
    """(ids[B, S], labels[B, S]) -> loss: cross entropy in float32 of a causal language model's logits.

    Args: shares_tokens: layers see a share of the tokens, whose positions are those of all.
    """

    def __init__(self, model: nn.Module, shares_tokens: bool) -> None:
        super().__init__()
        self.model, self.shares_tokens = model, shares_tokens

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0) if self.shares_tokens else None
        logits = self.model(input_ids=ids, position_ids=positions, use_cache=False).logits.flatten(0, 1)
        return nn.functional.cross_entropy(logits.float(), labels.flatten())


@without_garbage_collection()
def model_step(question: Question, layers: int) -> ModelStep:
    """The step of one microbatch of the first `layers` layers, without costs.

    Raises: UserError for experts that the ranks do not divide, and for what cannot be traced.
    """
    check_experts(question.experts, question.expert_ranks)
    config = shortened(load_config(question.hf), layers)  # a configuration of its own
    # transformers asks no server, whatever the environment says.
    with fake_ranks(question.gpus), mock.patch.dict(os.environ, HF_HUB_OFFLINE="1"):
        layout = question.gpus, question.expert_ranks, question.tensor_ranks
        groups = Groups.of_consecutive(*layout) if question.gpus > 1 else Groups()
        model = meta_model(config)
        convert(model, groups)
        sharing = {}
        if question.tensor_ranks > 1:
            sharing["tensor"] = slice_model(model, question.tensor_ranks, question.microbatch)
        if question.context_ranks > 1:
            ranks = range(0, question.token_ranks, question.tensor_ranks)
            sharing["context"] = share_contexts(model, ranks)
        step = _Loss(model, shares_tokens="tensor" in sharing)
        with without_contents():
            step.to_empty(device="cpu")
            model.tie_weights()  # to_empty gives each name a tensor of its own
            ids = torch.zeros(
                question.microbatch, question.sequence // question.context_ranks, dtype=torch.int64
            )
        if question.sharding != "none" and question.gpus > 1:
            policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
            fsdp(
                step,
                groups=groups,
                mp_policy=policy,
                reshard_after_forward=question.sharding == "full",
            )

        def rewrite(joint: fx.GraphModule) -> None:
            weights_inside_experts(joint)
            _name_groups(joint, sharing)
            recompute_as(joint, question.policy, question.eager)

        try:
            with as_instructions(model):
                return capture_step(
                    step, example_arguments(step, (ids, ids)), "mean", groups=groups, rewrite=rewrite
                )
        except CaptureError as error:
            reason = shorten(str(error.got), 140, placeholder=" ...")
            raise UserError(
                "--hf", got=f"{config.model_type}, which torch cannot trace: {reason}",
                expected="a model that torch.compile(fullgraph=True) accepts",
                do="plan your own step with --module",
            ) from error  # fmt: skip


def _name_groups(joint: fx.GraphModule, sharing: Mapping[str, str]) -> None:
    """Mark the collectives of ranks that share tokens in a captured graph, for their costs."""
    names = {name: of for of, group in sharing.items() for name in (group, link_group(group))}
    for node in joint.graph.nodes:
        if is_functional_collective(node) and (of := names.get(str(argument(node, "group_name")))):
            GROUP.set(node, of)


def weights_inside_experts(joint: fx.GraphModule) -> None:
    """Routing weights are applied inside the experts, not to the rows that come back: their gradient reads
    rows that the backward sends, so that no others are kept, or sent again where the forward is
    recomputed."""
    for node in joint.graph.nodes:
        if op_name(node) == "lancet.combine_dweight":
            gradient, _, row = node.args
            sent = next(u for u in gradient.users if op_name(u) == "lancet.dispatch" and u.args[1] is row)
            if not sent < node:
                sent.append(node)
            node.args = (gradient, sent, row)
    joint.recompile()
