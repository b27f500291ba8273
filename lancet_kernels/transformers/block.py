"""The layer that replaces a transformers MoE block.

It keeps the block without its experts as a submodule: router, correction bias and shared experts keep their
names, their code and their hooks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lancet_kernels.layer.moe_layer import MoELayer
from lancet_kernels.ops.comm.groups import AnyGroups
from lancet_kernels.transformers.family import Family
from lancet_kernels.transformers.layouts import Block, Layout, take_experts


class ConvertedMoE(MoELayer):
    """An `MoELayer` with the experts of a block, routed by the block's router.

    `take_weights` moves the experts out of the block; until then the block is unchanged.

    Args: family: of the block. groups, backend, capacity_factor: as for `MoELayer`.
    Raises: UserError (sizes that do not fit the group), Unsupported.
    """

    equal_on_all_ranks = (*MoELayer.equal_on_all_ranks, "block")

    def __init__(
        self,
        block: Block,
        family: Family,
        *,
        groups: AnyGroups | None,
        backend: str,
        capacity_factor: float | None,
    ) -> None:
        family.check(block)
        layout = family.layout(block)
        # On the meta device: the experts are the block's, and nothing is drawn for them.
        super().__init__(
            *layout.sizes(block.experts),
            top_k=family.top_k(block),
            gate=family.gate(block),
            capacity_factor=capacity_factor,
            activation=family.activation,
            bias=family.bias,
            backend=backend,
            groups=groups,
            device="meta",
        )
        self.router = self.correction_bias = None
        self.family = family
        self.layout: Layout = layout

    def take_weights(self, block: Block) -> None:
        """Move this rank's experts out of the block, drop the others, and keep the rest of the block."""
        for name, parameter in take_experts(self.layout, block.experts, self.expert_ids()):
            setattr(self, name, parameter)
        del block.experts
        self.block = block
        self.train(block.training)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        token_ids: Tensor | None = None,
        return_sums: bool = False,
        logits_TE: Tensor | None = None,
    ) -> Any:
        """x [..., D] -> what the block returned: [..., D], in some families with a second tensor.

        `mask` (in a `CausalLMStep` that of the batch) and `return_sums`, which gives the output and the
        layer's RoutingSums, are as in `MoELayer`.
        """
        routed = self.family.route(self.block, x.reshape(-1, self.d_model))
        if logits_TE is None:
            result = self._forward(x, mask, token_ids, return_sums, routed.logits_TE, routed.choices)
        else:
            result = self._forward(x, mask, token_ids, return_sums, logits_TE)
        return result if routed.second is None or return_sums else (result, routed.second)

    def _selection_bias(self) -> Tensor | None:
        return self.family.selection_bias(self.block)

    def _shared_expert(self, x_TD: Tensor) -> Tensor | None:
        return self.family.shared(self.block, x_TD)
