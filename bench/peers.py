"""MoE layers to compare with, each behind a small adapter: `make_layer(name, ...)` or the reason why not.

Ours, fused and unfused (`backend="torch"`: op by op, on a GPU by our kernels too); what torch alone gives,
which is always at hand; other libraries, of which none has been run by us yet: whoever has a GPU and
installs one gets it in the same table.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lancet_kernels import MoELayer
from lancet_kernels.ops.expert_activation import activate
from lancet_kernels.workloads import Workload

OURS = {"ours, fused": "fused", "ours, unfused": "torch"}


class Absent(Exception):
    """This peer cannot take part; the message says why."""


class TorchGrouped(nn.Module):
    """Rows sorted by expert through torch._grouped_mm, as torchtitan's experts do it; nothing is dropped."""

    def __init__(self, w: Workload, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        make = {"device": device, "dtype": dtype}
        self.w = w
        self.router = nn.Linear(w.width, w.experts, bias=False, **make)
        self.w1 = nn.Parameter(torch.randn(w.experts, w.width, w.wide, **make) * 0.02)
        self.w2 = nn.Parameter(torch.randn(w.experts, w.hidden, w.width, **make) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        w = self.w
        weight_TK, expert_TK = self.router(x).float().softmax(-1).topk(w.choices)
        expert, order = expert_TK.flatten().sort(stable=True)
        count = torch.zeros(w.experts, dtype=torch.int64, device=x.device)
        ends = count.scatter_add_(0, expert, torch.ones_like(expert)).cumsum(0).to(torch.int32)
        token = order // w.choices
        # index_select and index_add are each other's backward; that of x[token] sorts.
        hidden = activate(torch._grouped_mm(x.index_select(0, token), self.w1, offs=ends), w.activation)
        y = torch._grouped_mm(hidden, self.w2, offs=ends)
        weight = weight_TK.flatten().index_select(0, order)
        return torch.zeros_like(x).index_add(0, token, (y * weight[:, None]).to(x.dtype))


class _Called(nn.Module):
    """A function of x as a module, with the parameters that it uses."""

    def __init__(self, function: Callable[[Tensor], Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.modules_used = function, nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _scattermoe(w: Workload, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """github.com/shawntan/scattermoe: takes the router's choice."""
    mlp = importlib.import_module("scattermoe.mlp")
    kind, activation = (mlp.GLUMLP, nn.SiLU()) if w.activation == "swiglu" else (mlp.MLP, nn.GELU())
    experts = kind(w.width, w.hidden, w.experts, w.choices, activation=activation).to(device, dtype)
    router = nn.Linear(w.width, w.experts, bias=False, device=device, dtype=dtype)

    def layer(x: Tensor) -> Tensor:
        weight, expert = router(x).softmax(-1).topk(w.choices)
        return experts(x, weight, expert)

    return _Called(layer, router, experts)


def _megablocks(w: Workload, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """github.com/databricks/megablocks: dropless MoE, grouped GEMMs."""
    arguments = importlib.import_module("megablocks.layers.arguments")
    dmoe = importlib.import_module("megablocks.layers.dmoe")
    layer = dmoe.dMoE(
        arguments.Arguments(
            hidden_size=w.width,
            ffn_hidden_size=w.hidden,
            moe_num_experts=w.experts,
            moe_top_k=w.choices,
            mlp_type="glu" if w.activation == "swiglu" else "mlp",
            mlp_impl="grouped",
            fp16=dtype == torch.float16,
            bf16=dtype == torch.bfloat16,
        )
    ).to(device, dtype)
    # It takes [sequence, batch, width].
    return _Called(lambda x: layer(x[:, None])[0], layer)


PEERS = {"torch grouped_mm": TorchGrouped, "scattermoe": _scattermoe, "megablocks": _megablocks}


def make_layer(name: str, w: Workload, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """-> what takes x [T, D]: of OURS or of PEERS. Raises Absent if it cannot be had here."""
    if name not in OURS:
        return make_peer(name, w, dtype, device)
    return MoELayer(
        w.width, w.hidden, w.experts, top_k=w.choices, gate="topk", capacity_factor=1.25,
        activation=w.activation, backend=OURS[name], device=device, dtype=dtype,
    )  # fmt: skip


def make_peer(name: str, w: Workload, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The layer of another library. Raises Absent if it is not installed, or does not take this."""
    if device.type != "cuda":
        raise Absent(f"{name} needs a GPU")
    try:
        return PEERS[name](w, dtype, device)
    except ImportError as error:
        raise Absent(f"{name} is not installed ({error})") from error
    except Exception as error:
        raise Absent(f"{name} does not take {w}: {error}") from error
