"""The training step of a model of transformers, captured on fake ranks by the code that `optimize` runs.

The model may have fewer layers than its config says (`config.depths`); `answer` extrapolates to all of them.

Process groups send nothing and tensors are fake, so a step can be captured for any number of ranks, also of
models larger than this machine's memory.

Tensor-parallel ranks have a slice of the model each (`slice_model`), as in Megatron-LM. Between layers a rank
has its share of the tokens (sequence parallelism); routed experts are not sliced, so each rank routes its own
tokens. Attention, dense layers and shared experts work on a slice of their heads or of their width, for the
tokens of all ranks; embedding and head on a slice of the vocabulary:

    tokens / T --all-gather--> q, k, v or gate, up --> o or down --reduce-scatter--> tokens / T

The backward has the inverse messages, and gathers inputs of weight gradients again (`recomputation`), so that
only shares of the tokens are kept. The sums of a cross entropy over slices of the vocabulary, three numbers a
token, are left out.

Korthikanti et al., Reducing activation recomputation in large transformer models (2205.05198), section 4.2.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from textwrap import shorten
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.capture import CaptureError
from lancet_kernels.graph.capture.captured_graph import garbage_collection
from lancet_kernels.graph.from_fx import is_functional_collective, op_name
from lancet_kernels.graph.meta import GROUP
from lancet_kernels.graph.ops import argument
from lancet_kernels.layer.data_parallel import fsdp
from lancet_kernels.ops.comm.collectives import all_gather, reduce_scatter
from lancet_kernels.ops.comm.groups import Groups
from lancet_kernels.ops.comm.link_group import link_group
from lancet_kernels.optimization.guards import example_arguments
from lancet_kernels.optimization.step import ModelStep, capture_step
from lancet_kernels.predict.attention import share_contexts
from lancet_kernels.predict.config import check_experts, decoder_layers, load_config, meta_model, shortened
from lancet_kernels.predict.own_step import fake_ranks, without_contents
from lancet_kernels.predict.question import Question
from lancet_kernels.predict.recomputation import recompute_as
from lancet_kernels.predict.recurrence import as_instructions
from lancet_kernels.transformers.convert import convert


class _Loss(nn.Module):
    """(ids[B, S], labels[B, S]) -> loss: cross entropy in float32 of a causal language model's logits.

    Args: shares_tokens: layers see a share of the tokens, and positions are those of all tokens.
    """

    def __init__(self, model: nn.Module, shares_tokens: bool) -> None:
        super().__init__()
        self.model, self.shares_tokens = model, shares_tokens

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0) if self.shares_tokens else None
        logits = self.model(input_ids=ids, position_ids=positions, use_cache=False).logits.flatten(0, 1)
        return nn.functional.cross_entropy(logits.float(), labels.flatten())


@garbage_collection(on=False)
def model_step(question: Question, layers: int) -> ModelStep:
    """The step of one microbatch of the first `layers` layers, without costs.

    Raises: UserError for experts that the ranks do not divide, and for a model that cannot be traced.
    """
    check_experts(question.experts, question.expert_ranks)
    config = shortened(load_config(question.hf), layers)
    with fake_ranks(question.gpus), mock.patch.dict(os.environ, HF_HUB_OFFLINE="1"):
        layout = question.gpus, question.expert_ranks, question.tensor_ranks
        groups = Groups.of_consecutive(*layout) if question.gpus > 1 else Groups()
        model = meta_model(config)
        convert(model, groups)
        sharing = {}
        with without_contents():
            model.to_empty(device="cpu")
            model.tie_weights()  # to_empty gives each name a tensor of its own
            if question.tensor_ranks > 1:
                sharing["tensor"] = slice_model(model, question.tensor_ranks, question.microbatch)
            ids = torch.zeros(
                question.microbatch, question.sequence // question.context_ranks, dtype=torch.int64
            )
        if question.context_ranks > 1:
            ranks = range(0, question.token_ranks, question.tensor_ranks)
            if question.cp_comm_type == "a2a":
                _check_heads(config, question.token_ranks, "--tensor times --context")
            sharing["context"] = share_contexts(model, ranks, question.cp_comm_type)
        step = _Loss(model, shares_tokens="tensor" in sharing)
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
            otherwise = "it without --tensor" if question.tensor_ranks > 1 else "your own step with --module"
            raise UserError(
                "--hf", got=f"{config.model_type}, which torch cannot trace: {reason}",
                expected="a model that torch.compile(fullgraph=True) accepts",
                do=f"plan {otherwise}",
            ) from error  # fmt: skip


def _name_groups(joint: fx.GraphModule, sharing: Mapping[str, str]) -> None:
    """Mark the collectives of ranks that share tokens in a captured graph, for their costs."""
    kinds = {name: kind for kind, group in sharing.items() for name in (group, link_group(group))}
    for node in joint.graph.nodes:
        if is_functional_collective(node) and (kind := kinds.get(str(argument(node, "group_name")))):
            GROUP.set(node, kind)


def weights_inside_experts(joint: fx.GraphModule) -> None:
    """Apply routing weights inside the experts, not to returned rows: their gradient reads rows that the
    backward sends anyway, so that returned rows are neither saved nor sent again in a recomputation."""
    for node in joint.graph.nodes:
        if op_name(node) == "lancet.combine_dweight":
            gradient, _, row = node.args
            sent = next(u for u in gradient.users if op_name(u) == "lancet.dispatch" and u.args[1] is row)
            if not sent < node:
                sent.append(node)
            node.args = (gradient, sent, row)
    joint.recompile()


_BY_OUTPUT = "q_proj k_proj v_proj q_b_proj kv_b_proj gate_proj up_proj".split()
_BY_INPUT = "o_proj down_proj".split()


class _OverTokens(nn.Module):
    """A sliced module; `gathers` tokens of all ranks before it, or `sums` results of all ranks after it."""

    def __init__(self, sliced: nn.Module, group: str, sequences: int, gathers: bool, sums: bool) -> None:
        super().__init__()
        self.sliced, self.group, self.sequences = sliced, group, sequences
        self.gathers, self.sums = gathers, sums

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.gathers and args:
            args = (self._gathered(args[0]), *args[1:])
        elif self.gathers:
            kwargs["hidden_states"] = self._gathered(kwargs["hidden_states"])
        result = self.sliced(*args, **kwargs)
        if not self.sums:
            return result
        return self._summed(result) if isinstance(result, Tensor) else (self._summed(result[0]), *result[1:])

    def _gathered(self, share: Tensor) -> Tensor:
        # Fake tokens may be in any order.
        return all_gather(share.flatten(0, -2), 0, self.group).unflatten(0, (self.sequences, -1))

    def _summed(self, summand: Tensor) -> Tensor:
        return reduce_scatter(summand.flatten(0, -2), 0, self.group).unflatten(0, (self.sequences, -1))


def slice_model(model: Any, ranks: int, sequences: int) -> str:
    """Slice a causal language model in place, for one of `ranks` ranks that are consecutive. -> the name of
    their group.

    Args: sequences: of a microbatch. Raises: UserError for heads and widths that the ranks do not divide, and
    for layers of another shape.
    """
    _check_heads(model.config, ranks)
    group = dist.new_group(list(range(ranks))).group_name
    for layer in decoder_layers(model):
        if any(isinstance(module, nn.Conv1d) for module in layer.modules()):
            raise UserError(
                "--tensor", got=f"{type(model).__name__}, whose convolutions need all ranks' tokens",
                expected="attention and dense layers", do="plan it without tensor parallelism",
            )  # fmt: skip
        before = sum(1 for _ in layer.named_modules())
        for parent in list(layer.modules()):
            for name, module in list(parent.named_children()):
                own = dict(module.named_children())
                if any(isinstance(own.get(linear), nn.Linear) for linear in _BY_INPUT):
                    _slice_linears(module, ranks)
                    setattr(parent, name, _OverTokens(module, group, sequences, gathers=True, sums=True))
        if sum(1 for _ in layer.named_modules()) == before:
            raise UserError(
                "--tensor", got=f"{type(model).__name__}, whose layers have no {' or '.join(_BY_INPUT)}",
                expected="attention and dense layers of these names", do="plan it without tensor parallelism",
            )  # fmt: skip
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head.weight is embedding.weight
    embedding.weight = _slice(embedding.weight, 0, ranks, "vocabulary")
    head.weight = embedding.weight if is_tied else _slice(head.weight, 0, ranks, "vocabulary")
    model.set_input_embeddings(_OverTokens(embedding, group, sequences, gathers=False, sums=True))
    model.set_output_embeddings(_OverTokens(head, group, sequences, gathers=True, sums=False))
    return group


def _slice_linears(module: nn.Module, ranks: int) -> None:
    for name, linear in module.named_children():
        if not isinstance(linear, nn.Linear):
            continue
        if name in _BY_OUTPUT:
            linear.weight = _slice(linear.weight, 0, ranks, name)
            if linear.bias is not None:
                linear.bias = _slice(linear.bias, 0, ranks, name)
        elif name in _BY_INPUT:
            linear.weight = _slice(linear.weight, 1, ranks, name)
    sinks = getattr(module, "sinks", None)
    if isinstance(sinks, nn.Parameter):
        module.sinks = _slice(sinks, 0, ranks, "sinks")  # one for each head


def _slice(parameter: Tensor, dim: int, ranks: int, what: str) -> nn.Parameter:
    size = parameter.shape[dim]
    _check_divides(size, ranks, what)
    return nn.Parameter(
        parameter.narrow(dim, 0, size // ranks).clone(), requires_grad=parameter.requires_grad
    )


def _check_heads(config: Any, ranks: int, option: str = "--tensor") -> None:
    for what in ("num_attention_heads", "num_key_value_heads"):
        _check_divides(getattr(config, what, None) or config.num_attention_heads, ranks, what, option)


def _check_divides(size: int, ranks: int, what: str, option: str = "--tensor") -> None:
    if size % ranks:
        raise UserError(
            option, got=f"{ranks} ranks for {what} of {size}", expected=f"a divisor of {size}",
            do="choose another number of ranks",
        )  # fmt: skip
