"""The nonlinearity inside the experts.

R  rows received      F  hidden width (gated: input is [gate | up], 2F wide; interleaved: gate, up, gate, ...)

    swiglu            silu(gate) * up
    clamped-swiglu    gate' * sigmoid(1.702 gate') * (up' + 1),  gate' = min(gate, 7), up' = clamp(up, -7, 7)
                      (GPT-OSS; in plain torch on every device)
    interleaved-clamped-swiglu    the same

Others are expressions: functions of rows, [R, H] -> [R, F], that a converted model brings along.
They are differentiated by autograd, in plain torch on every device.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lancet_kernels.kernels.config import ACTIVATIONS, GATED, INTERLEAVED
from lancet_kernels.ops.base import op
from lancet_kernels.ops.moe.dispatch import runs_in_kernels

SLOPE, CLAMP = 1.702, 7.0
"""Constants of the clamped ones."""
Expression = Callable[[Tensor], Tensor]
EXPRESSIONS: dict[str, Expression] = {}
"""Activations that are not built in. Equal names stand for equal functions, on all ranks."""


def input_width(kind: str, hidden_width: int) -> int:
    """How wide the input of the activation is, for F outputs."""
    return 2 * hidden_width if kind in GATED else hidden_width


def _gate_and_up(h: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Views of the input of a gated activation."""
    if kind == INTERLEAVED:
        return h[..., ::2], h[..., 1::2]
    gate, up = h.chunk(2, -1)
    return gate, up


def activate(h: Tensor, kind: str) -> Tensor:
    """The activation in plain torch, differentiable: gelu (exact, erf), silu, a gated one, an expression."""
    if kind in EXPRESSIONS:
        return EXPRESSIONS[kind](h)
    if kind == "gelu":
        return torch.nn.functional.gelu(h)
    if kind == "silu":
        return torch.nn.functional.silu(h)
    gate, up = _gate_and_up(h, kind)
    if kind == "swiglu":
        return torch.nn.functional.silu(gate) * up
    gate = gate.clamp(max=CLAMP)
    return gate * torch.sigmoid(SLOPE * gate) * (up.clamp(-CLAMP, CLAMP) + 1)


def _activate_backward_into(dh: Tensor, da: Tensor, h: Tensor, kind: str) -> None:
    """The gradient of the input, in the dtype of the operands, into memory that is there."""
    if kind == "gelu":
        torch.ops.aten.gelu_backward.grad_input(da, h, grad_input=dh)
    elif kind == "silu":
        torch.ops.aten.silu_backward.grad_input(da, h, grad_input=dh)
    else:
        (gate, up), (dgate, dup) = _gate_and_up(h, kind), _gate_and_up(dh, kind)
        if kind == "swiglu":
            torch.mul(da, torch.nn.functional.silu(gate), out=dup)
            torch.ops.aten.silu_backward.grad_input(da * up, gate, grad_input=dgate)
            return
        clamped = gate.clamp(max=CLAMP)
        open_share = torch.sigmoid(SLOPE * clamped)
        slope = open_share * (1 + SLOPE * clamped * (1 - open_share)) * (gate <= CLAMP)
        torch.mul(da * slope, up.clamp(-CLAMP, CLAMP) + 1, out=dgate)
        torch.mul(da * clamped * open_share, up.abs() <= CLAMP, out=dup)


def _activate_backward(da: Tensor, h: Tensor, kind: str) -> Tensor:
    dh = torch.empty_like(h)
    _activate_backward_into(dh, da, h, kind)
    return dh


@op("lancet::expert_activation")
def expert_activation(h_RF: Tensor, count_WL: Tensor, kind: str) -> Tensor:
    """-> [R, F]: the activation of all rows. kind: one of ALL_ACTIVATIONS.

    Args: count_WL: read where there may be more rows than real ones, on a GPU.
    """
    if runs_in_kernels(h_RF) and kind in ACTIVATIONS:
        from lancet_kernels.kernels.rows import activation

        return activation(h_RF.contiguous(), count_WL.sum().view(1), kind)
    h_RF = h_RF.contiguous()
    if kind not in GATED:
        return activate(h_RF, kind).contiguous()
    gate, up = h_RF.chunk(2, -1)
    dtype = torch.promote_types(h_RF.dtype, torch.float32)
    if dtype == h_RF.dtype:
        if kind != "swiglu":
            return activate(h_RF, kind)
        return torch.nn.functional.silu(gate).mul_(up)
    return _in_blocks(lambda h: activate(h.to(dtype), kind), h_RF.new_empty(len(h_RF), gate.shape[1]), h_RF)


@expert_activation.register_fake
def _(h_RF, count_WL, kind):
    width = h_RF.shape[1] // 2 if kind in GATED else h_RF.shape[1]
    if kind in EXPRESSIONS:
        width = EXPRESSIONS[kind](h_RF.new_empty(1, h_RF.shape[1])).shape[1]
    return h_RF.new_empty(h_RF.shape[0], width)


_BLOCK = 1024
"""Rows that are widened to float32 at a time."""


def _in_blocks(function: Callable[..., Tensor], out: Tensor, *operands: Tensor) -> Tensor:
    """out[r] = function(operands[r]), some rows at a time."""
    for begin in range(0, out.shape[0], _BLOCK):
        rows = slice(begin, begin + _BLOCK)
        out[rows] = function(*(operand[rows] for operand in operands))
    return out


def _differentiated(da_RF: Tensor, h_RF: Tensor, expression: Expression) -> Tensor:
    with _recording():
        h_RF = h_RF.detach().requires_grad_()
        (dh_RF,) = torch.autograd.grad(expression(h_RF), h_RF, da_RF)
    return dh_RF.contiguous()


@contextmanager
def _recording() -> Iterator[None]:
    """Let autograd record inside an op, which torch runs below it (private API, alike in 2.11 to 2.13)."""
    keys = torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView
    excluded = [torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in keys]
    try:
        for key in keys:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
        with torch.enable_grad():
            yield
    finally:
        for key, before in zip(keys, excluded, strict=True):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, before)


@op("lancet::expert_activation_backward", like="h_RF")
def expert_activation_backward(da_RF: Tensor, h_RF: Tensor, count_WL: Tensor, kind: str) -> Tensor:
    """-> gradient of h, shaped like h; computed in at least float32, rounded once."""
    if runs_in_kernels(h_RF) and kind in ACTIVATIONS:
        from lancet_kernels.kernels.rows import activation_backward

        return activation_backward(da_RF.contiguous(), h_RF.contiguous(), count_WL.sum().view(1), kind)
    if kind in EXPRESSIONS:
        return _differentiated(da_RF, h_RF, EXPRESSIONS[kind])
    dtype = torch.promote_types(h_RF.dtype, torch.float32)
    dh_RF = torch.empty_like(h_RF, memory_format=torch.contiguous_format)
    if dtype == h_RF.dtype:
        _activate_backward_into(dh_RF, da_RF, h_RF, kind)
        return dh_RF
    return _in_blocks(lambda da, h: _activate_backward(da.to(dtype), h.to(dtype), kind), dh_RF, da_RF, h_RF)


def _setup_context(ctx, inputs, output) -> None:
    h_RF, count_WL, ctx.kind = inputs
    ctx.save_for_backward(h_RF, count_WL)


def _backward(ctx, da_RF):
    h_RF, count_WL = ctx.saved_tensors
    return expert_activation_backward(da_RF, h_RF, count_WL, ctx.kind), None, None


expert_activation.register_autograd(_backward, setup_context=_setup_context)
