"""A model of transformers of which each rank of a tensor-parallel group has a slice, as in Megatron-LM.

Between layers a rank has its share of the tokens (sequence parallelism); routed experts are not sliced, so
each rank routes its own tokens. Attention, dense layers and shared experts work on a slice of their heads or
of their width, for the tokens of all ranks; embedding and head on a slice of the vocabulary:

    tokens / T --all-gather--> q, k, v or gate, up --> o or down --reduce-scatter--> tokens / T

The backward has the same messages the other way round, and gathers inputs of weight gradients again
(`recomputation`), so that only shares of the tokens are kept. What a cross entropy over slices of the
vocabulary sums over the ranks, three numbers a token, is left out.

Korthikanti et al., Reducing activation recomputation in large transformer models (2205.05198), section 4.2.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lancet_kernels.errors import UserError
from lancet_kernels.ops.comm.collectives import all_gather, reduce_scatter
from lancet_kernels.predict.config import decoder_layers

_BY_OUTPUT = "q_proj k_proj v_proj q_b_proj kv_b_proj gate_proj up_proj".split()
_BY_INPUT = "o_proj down_proj".split()


class _OverTokens(nn.Module):
    """A sliced module behind a gather of tokens, if it needs those of all ranks, and before a sum of results,
    if they are summands."""

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
        # Tokens have no contents here: in which order they lie does not matter.
        return all_gather(share.flatten(0, -2), 0, self.group).unflatten(0, (self.sequences, -1))

    def _summed(self, summand: Tensor) -> Tensor:
        return reduce_scatter(summand.flatten(0, -2), 0, self.group).unflatten(0, (self.sequences, -1))


def slice_model(model: Any, ranks: int, sequences: int) -> str:
    """Slice a causal language model on the meta device in place, for one of `ranks` ranks that are
    consecutive. -> the name of their group.

    Args: sequences: of a microbatch. Raises: UserError for heads and widths that the ranks do not divide, and
    for layers of another shape.
    """
    config = model.config
    for what in ("num_attention_heads", "num_key_value_heads"):
        _check_divides(getattr(config, what, None) or config.num_attention_heads, ranks, what)
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


def _check_divides(size: int, ranks: int, what: str) -> None:
    if size % ranks:
        raise UserError(
            "--tensor", got=f"{ranks} ranks for {what} of {size}", expected=f"a divisor of {size}",
            do="choose another number of ranks",
        )  # fmt: skip
