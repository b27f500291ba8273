"""The nonlinearity inside the experts, on real rows only.

W  ranks, L experts here      C  capacity      F  hidden width (swiglu: input is [gate | up], 2F wide)
R  real rows
"""

import math

import torch
from torch import Tensor

from lancet_kernels.ops.kernel_path import runs_in_kernels
from lancet_kernels.ops.rows import blocks, clear_padding, compact, expand, real_rows_by_expert


def input_width(kind: str, hidden_width: int) -> int:
    """How wide the input of the activation is, for F outputs."""
    return 2 * hidden_width if kind == "swiglu" else hidden_width


def activate(h: Tensor, kind: str) -> Tensor:
    """The activation in plain torch, differentiable: gelu (exact, erf), silu, or silu(gate) * up."""
    if kind == "gelu":
        return torch.nn.functional.gelu(h)
    if kind == "silu":
        return torch.nn.functional.silu(h)
    gate, up = h.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def _activate_into(a: Tensor, h: Tensor, kind: str) -> None:
    """`activate` into memory that is there."""
    if kind == "gelu":
        torch.ops.aten.gelu.out(h, out=a)
    elif kind == "silu":
        torch.ops.aten.silu.out(h, out=a)
    else:
        gate, up = h.chunk(2, -1)
        torch.mul(torch.nn.functional.silu(gate), up, out=a)


def _activate_backward(da: Tensor, h: Tensor, kind: str) -> Tensor:
    if kind == "gelu":
        # gelu(h) = h * Phi(h), so its derivative is Phi(h) + h * phi(h)
        cdf = 0.5 * (1 + torch.erf(h * math.sqrt(0.5)))
        pdf = torch.exp(-0.5 * h * h) / math.sqrt(2 * math.pi)
        return da * (cdf + h * pdf)
    if kind == "silu":
        return da * _dsilu(h)
    gate, up = h.chunk(2, -1)
    return torch.cat([da * up * _dsilu(gate), da * torch.nn.functional.silu(gate)], -1)


def _dsilu(h: Tensor) -> Tensor:
    s = torch.sigmoid(h)
    return s * (1 + h * (1 - s))


def naive_expert_activation(h_WLCF: Tensor, count_WL: Tensor, kind: str) -> Tensor:
    """Reference, one buffer after the other; differentiable."""
    ranks, local_experts, capacity, _ = h_WLCF.shape
    out = [
        torch.nn.functional.pad(activate(h_WLCF[w, e, :n], kind), (0, 0, 0, capacity - n))
        for w in range(ranks)
        for e in range(local_experts)
        for n in [int(count_WL[w, e])]
    ]
    return torch.stack(out).unflatten(0, (ranks, local_experts))


@torch.library.custom_op("lancet::expert_activation", mutates_args=())
def expert_activation(h_WLCF: Tensor, count_WL: Tensor, kind: str) -> Tensor:
    """-> [W, L, C, F]: the activation of the real rows. kind: one of ACTIVATIONS."""
    if runs_in_kernels(h_WLCF):
        from lancet_kernels.kernels.activation import activation

        h_GCF = h_WLCF.contiguous().flatten(0, 1)
        return activation(h_GCF, count_WL.reshape(-1), kind).unflatten(0, h_WLCF.shape[:2])
    if h_WLCF.device.type == "cpu":
        found = blocks(count_WL)
        width = h_WLCF.shape[3] // 2 if kind == "swiglu" else h_WLCF.shape[3]
        a_WLCF = h_WLCF.new_empty(*h_WLCF.shape[:3], width)
        for w, e, n in found:
            _activate_into(a_WLCF[w, e, :n], h_WLCF[w, e, :n], kind)
        return clear_padding(a_WLCF, found)
    row_R = real_rows_by_expert(count_WL, h_WLCF.shape[2])
    return expand(activate(compact(h_WLCF, row_R), kind), row_R, h_WLCF.shape[:3])


@expert_activation.register_fake
def _(h_WLCF, count_WL, kind):
    width = h_WLCF.shape[3] // 2 if kind == "swiglu" else h_WLCF.shape[3]
    return h_WLCF.new_empty(*h_WLCF.shape[:3], width)


@torch.library.custom_op("lancet::expert_activation_backward", mutates_args=())
def expert_activation_backward(da_WLCF: Tensor, h_WLCF: Tensor, count_WL: Tensor, kind: str) -> Tensor:
    """-> gradient of h, shaped like h; computed in at least float32, rounded once."""
    if runs_in_kernels(h_WLCF):
        from lancet_kernels.kernels.activation import activation_backward

        da_GCF, h_GCF = (t.contiguous().flatten(0, 1) for t in (da_WLCF, h_WLCF))
        dh_GCF = activation_backward(da_GCF, h_GCF, count_WL.reshape(-1), kind)
        return dh_GCF.unflatten(0, h_WLCF.shape[:2])
    dtype = torch.promote_types(h_WLCF.dtype, torch.float32)
    if h_WLCF.device.type == "cpu" and dtype == h_WLCF.dtype:
        found = blocks(count_WL)
        dh_WLCF = torch.empty_like(h_WLCF, memory_format=torch.contiguous_format)
        for w, e, n in found:
            da_NF, h_NF, dh_NF = da_WLCF[w, e, :n], h_WLCF[w, e, :n], dh_WLCF[w, e, :n]
            if kind == "gelu":
                torch.ops.aten.gelu_backward.grad_input(da_NF, h_NF, grad_input=dh_NF)
            else:
                dh_NF.copy_(_activate_backward(da_NF, h_NF, kind))
        return clear_padding(dh_WLCF, found)
    row_R = real_rows_by_expert(count_WL, h_WLCF.shape[2])
    dh_RF = _activate_backward(compact(da_WLCF, row_R).to(dtype), compact(h_WLCF, row_R).to(dtype), kind)
    return expand(dh_RF.to(h_WLCF.dtype), row_R, h_WLCF.shape[:3])


@expert_activation_backward.register_fake
def _(da_WLCF, h_WLCF, count_WL, kind):
    return h_WLCF.new_empty(h_WLCF.shape)


def _setup_context(ctx, inputs, output) -> None:
    h_WLCF, count_WL, ctx.kind = inputs
    ctx.save_for_backward(h_WLCF, count_WL)


def _backward(ctx, da_WLCF):
    h_WLCF, count_WL = ctx.saved_tensors
    return torch.ops.lancet.expert_activation_backward(da_WLCF, h_WLCF, count_WL, ctx.kind), None, None


expert_activation.register_autograd(_backward, setup_context=_setup_context)
