"""The router's GEMM in float32, whatever the dtype of the tokens, without a float32 copy of all of them.

    T  tokens      D  width      E  experts

A product of two 16-bit numbers is exact in float32, so what counts is that sums are float32. A few thousand
tokens are converted at a time, in the forward and again in the backward, which saves the tokens as they are:
2 T D bytes that other ops save anyway, where linear(x.float(), w.float()) saves 4 T D more.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

TOKENS_AT_ONCE = 4096


def router_logits(x_TD: Tensor, router_ED: Tensor) -> Tensor:
    """-> [T, E] in float32, in float64 for a float64 router; autocast does not apply.

    A captured graph shows linear on converted tokens, for which there are rules.
    """
    with torch.autocast(x_TD.device.type, enabled=False):
        is_16_bit = x_TD.dtype.itemsize == 2 and router_ED.dtype != torch.float64
        if is_16_bit and not torch.compiler.is_compiling():
            return _RouterLogits.apply(x_TD, router_ED)
        dtype = torch.promote_types(router_ED.dtype, torch.float32)
        return nn.functional.linear(x_TD.to(dtype), router_ED.to(dtype))


class _RouterLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD: Tensor, router_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, router_ED)
        w_ED = router_ED.float()
        logits_TE = w_ED.new_empty(x_TD.shape[0], w_ED.shape[0])
        pairs = zip(x_TD.split(TOKENS_AT_ONCE), logits_TE.split(TOKENS_AT_ONCE), strict=True)
        for x, logits in pairs:
            torch.mm(x.float(), w_ED.t(), out=logits)
        return logits_TE

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TD, router_ED = ctx.saved_tensors
        w_ED = router_ED.float()
        needs_x, needs_w = ctx.needs_input_grad
        dx_TD = torch.empty_like(x_TD) if needs_x else None
        dw_ED = torch.zeros_like(w_ED) if needs_w else None
        with torch.autocast(x_TD.device.type, enabled=False):
            for first in range(0, x_TD.shape[0], TOKENS_AT_ONCE):
                part = slice(first, first + TOKENS_AT_ONCE)
                if dx_TD is not None:
                    dx_TD[part] = grad_TE[part] @ w_ED
                if dw_ED is not None:
                    dw_ED += grad_TE[part].t() @ x_TD[part].float()
        return dx_TD, None if dw_ED is None else dw_ED.to(router_ED.dtype)
