"""Llama 4's blocks, with experts that take choices as those of other families do.

Its routers give a score [T, E], 0 where an expert is not chosen, and every expert gets every token times its
score: E rows a token, of which all but K are zeros and come back as zeros. Here a token's K choices are rows,
scaled before the experts, as there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe


class Llama4Experts(Llama4TextExperts):
    """With what `use_experts_implementation` of transformers gives experts."""

    is_transposed = True

    def _apply_gate(self, hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        return self.act_fn(gate) * up


class Llama4Block(Llama4TextMoe):
    """With experts that were converted."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """hidden_states [B, S, D] -> [B * S, D] and the router's logits [B * S, E], as of the original."""
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        score_TE, logits_TE = self.router(x_TD)
        expert_TK = logits_TE.topk(self.top_k, dim=1).indices
        score_TK = score_TE.gather(1, expert_TK)
        # Each choice is a token of its own, with one expert and weight 1.
        rows = (x_TD.unsqueeze(1) * score_TK.unsqueeze(2)).flatten(0, 1)
        y = self.experts(rows, expert_TK.view(-1, 1), torch.ones_like(score_TK).view(-1, 1))
        return self.shared_expert(x_TD) + y.view(*expert_TK.shape, -1).sum(1), logits_TE


def with_interface(experts: nn.Module) -> nn.Module:
    """The same experts, changed in place: what they compute is for `expert_parallel` to say."""
    experts.__class__ = Llama4Experts
    return experts
