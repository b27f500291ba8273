"""MoE layers of other libraries, each behind a small adapter: `make_peer(name, ...)` or the reason why not.

None of them has been run by us yet: whoever has a GPU and installs one gets it in the same table.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lancet_kernels.workloads import Workload

Layer = Callable[[Tensor], Tensor]


class Absent(Exception):
    """This peer cannot take part; the message says why."""


def _scattermoe(w: Workload, dtype: torch.dtype, device: torch.device) -> Layer:
    """github.com/shawntan/scattermoe: takes the router's choice."""
    mlp = importlib.import_module("scattermoe.mlp")
    kind, activation = (mlp.GLUMLP, nn.SiLU()) if w.activation == "swiglu" else (mlp.MLP, nn.GELU())
    experts = kind(w.width, w.hidden, w.experts, w.choices, activation=activation).to(device, dtype)
    router = nn.Linear(w.width, w.experts, bias=False, device=device, dtype=dtype)

    def layer(x: Tensor) -> Tensor:
        weight, expert = router(x).softmax(-1).topk(w.choices)
        return experts(x, weight, expert)

    return layer


def _megablocks(w: Workload, dtype: torch.dtype, device: torch.device) -> Layer:
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
    return lambda x: layer(x[:, None])[0]


PEERS = {"scattermoe": _scattermoe, "megablocks": _megablocks}


def make_peer(name: str, w: Workload, dtype: torch.dtype, device: torch.device) -> Layer:
    """The layer of another library. Raises Absent if it is not installed, or does not take this."""
    if device.type != "cuda":
        raise Absent(f"{name} needs a GPU")
    try:
        return PEERS[name](w, dtype, device)
    except ImportError as error:
        raise Absent(f"{name} is not installed ({error})") from error
    except Exception as error:
        raise Absent(f"{name} does not take {w}: {error}") from error
