"""A training step of a transformers causal language model, loss included, for `optimize`."""

from __future__ import annotations

from torch import Tensor, nn


class CausalLMStep(nn.Module):
    """The inputs of the model by name, including `labels` -> its loss.

    `optimize(CausalLMStep(model), batch)` plans it for a dict batch. The loss is the model's own: with
    `output_router_logits` in its config or in the batch, the load-balance loss of its routers is part of it.

    Args: model: a causal language model of transformers.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        _record_outputs(model)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_router_logits: bool | None = None,
    ) -> Tensor:
        """-> the loss, a scalar to differentiate."""
        by_name = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "output_router_logits": output_router_logits,
        }
        given = {name: value for name, value in by_name.items() if value is not None}
        return self.model(input_ids=input_ids, labels=labels, use_cache=False, **given).loss


def _record_outputs(model: nn.Module) -> None:
    """Let transformers 5 set its hooks that collect router logits, as it would at the first forward.

    It does so under a lock, which cannot be traced.
    """
    try:
        from transformers import PreTrainedModel
        from transformers.utils.output_capturing import maybe_install_capturing_hooks
    except ImportError:  # transformers 4.5x, or none: nothing to set
        return
    if isinstance(model, PreTrainedModel):
        maybe_install_capturing_hooks(model)
