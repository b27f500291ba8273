"""A training step of a transformers causal language model, loss included, for `optimize`."""

from __future__ import annotations

from torch import Tensor, nn

from lancet_kernels.ops.comm.groups import AnyGroups, data_group_name, group_size
from lancet_kernels.ops.context import during


class CausalLMStep(nn.Module):
    """The inputs of the model by name, including `labels` -> its loss.

    `optimize(CausalLMStep(model), batch)` plans it for a dict batch. The loss is the model's own: with
    `output_router_logits` in its config or in the batch, the load-balance loss of its routers is part of it.

    Args:
        model: a causal language model of transformers.
        groups: with `num_items_in_batch`, the ranks with different tokens; None: all ranks.
    """

    def __init__(self, model: nn.Module, groups: AnyGroups | None = None) -> None:
        super().__init__()
        self.model = model
        self.ranks = group_size(data_group_name(groups))
        _record_outputs(model)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_router_logits: bool | None = None,
        num_items_in_batch: Tensor | float | None = None,
    ) -> Tensor:
        """-> the loss, a scalar to differentiate.

        Args:
            attention_mask: [B, S], 1 for a token and 0 for padding, which the `MoELayer`s of a converted
                model leave out, too (see there).
            num_items_in_batch: how many labels count (`labels[:, 1:] != -100`) in the batches of all ranks
                together, as transformers' Trainer has it; of several microbatches, their mean. A tensor,
                or a plan is for this number alone. The mean of the losses over the ranks is then that over
                all labels, wherever they are; None: the mean of the means of the ranks.
        """
        by_name = {
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "output_router_logits": output_router_logits,
            # The model divides the sum of its cross entropies by it; ranks take the mean of their losses.
            "num_items_in_batch": None if num_items_in_batch is None else num_items_in_batch / self.ranks,
        }
        given = {name: value for name, value in by_name.items() if value is not None}
        is_padding = attention_mask is not None and attention_mask.dim() == 2
        with during(padding_mask=attention_mask if is_padding else None):
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
