"""Families whose experts are one module, but not as `use_experts_implementation` of transformers has them.

    ADAPTERS    the class with their weights -> the same as a layer of this library, and the block around it

What is called there is the module of the weights, with `(hidden_states, top_k_index, top_k_weights)`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lancet_kernels.transformers.experts import ConvertedExperts, Derived


class Llama4Experts(ConvertedExperts):
    """Beside `Llama4TextExperts`."""

    is_transposed = True

    def _apply_gate(self: Any, hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        return self.act_fn(gate) * up


class Llama4Block(Derived):
    """Beside `Llama4TextMoe`.

    Its routers give a score [T, E], 0 where an expert is not chosen, and every expert gets every token times
    its score: E rows a token, of which all but K are zeros and come back as zeros. Here a token's K choices
    are rows, scaled before the experts, as there.
    """

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """hidden_states [B, S, D] -> [B * S, D] and the router's logits [B * S, E], as of the original."""
        x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
        score_TE, logits_TE = self.router(x_TD)
        expert_TK = logits_TE.topk(self.top_k, dim=1).indices
        score_TK = score_TE.gather(1, expert_TK)
        # Each choice is a token of its own, with one expert and weight 1.
        rows = (x_TD.unsqueeze(1) * score_TK.unsqueeze(2)).flatten(0, 1)
        y = self.experts(rows, expert_TK.view(-1, 1), torch.ones_like(score_TK).view(-1, 1))
        return self.shared_expert(x_TD) + y.view(*expert_TK.shape, -1).sum(1), logits_TE


class DbrxExperts(ConvertedExperts):
    """Beside `DbrxExpertGLU`: w1 (gates), v1 and w2 are [E * F, D], one expert below the other."""

    is_transposed = True

    def expert_names(self) -> list[str]:
        return ["w1", "v1", "w2"]

    def rows_per_expert(self: Any) -> int:
        return self.ffn_hidden_size

    def _of_each(self: Any, name: str) -> Tensor:
        """[L * F, D] -> [L, F, D]"""
        return self._present(name).view(-1, self.ffn_hidden_size, self.hidden_size)

    @property
    def gate_up_proj(self) -> Tensor:
        return torch.cat((self._of_each("w1"), self._of_each("v1")), 1).transpose(1, 2)

    @property
    def down_proj(self) -> Tensor:  # type: ignore[override]
        return self._of_each("w2")

    def _apply_gate(self: Any, hidden: Tensor) -> Tensor:
        gate, up = hidden.chunk(2, dim=-1)
        return self.activation_fn(gate) * up


class DbrxBlock(Derived):
    """Beside `DbrxExperts` of transformers, which calls its weights expert by expert."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return self.mlp(hidden_states, top_k_index, top_k_weights)


class Adapter(NamedTuple):
    experts: type[ConvertedExperts]
    block: type[Derived]


ADAPTERS = {
    "Llama4TextExperts": Adapter(Llama4Experts, Llama4Block),
    "DbrxExpertGLU": Adapter(DbrxExperts, DbrxBlock),
}
