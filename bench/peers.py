"""MoE layers to compare with, each behind a small adapter: `make_layer(name, ...)` or the reason why not.

Ours, fused and unfused (`backend="torch"`: op by op); what torch alone gives,
which is always at hand; other libraries, of which none has been run by us yet: a reader who has a GPU and
installs one gets it in the same table. None drops a token.

To bring them to a machine without a network, where there is one

    pip download -d wheels --no-deps liger-cute-kernels quack-kernels

and there `pip install --no-index --no-deps --target peers wheels/*.whl`, then PEERS=peers make gpu.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lancet_kernels import MoELayer
from lancet_kernels.conversion.family import layout_of
from lancet_kernels.ops.moe.expert_activation import activate
from lancet_kernels.tuning.workloads import Workload

OURS = {"ours, fused": "fused", "ours, unfused": "torch"}


class Absent(Exception):
    """This peer cannot take part; the message says why."""


class TorchGrouped(nn.Module):
    """Rows sorted by expert through torch's grouped_mm, as torchtitan's experts do it; nothing is dropped."""

    def __init__(self, w: Workload, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        make: dict[str, Any] = {"device": device, "dtype": dtype}
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
        hidden = activate(
            torch.nn.functional.grouped_mm(x.index_select(0, token), self.w1, offs=ends), w.activation
        )
        y = torch.nn.functional.grouped_mm(hidden, self.w2, offs=ends)
        weight = weight_TK.flatten().index_select(0, order)
        return torch.zeros_like(x).index_add(0, token, (y * weight[:, None]).to(x.dtype))


class _Called(nn.Module):
    """A function of x as a module, with the parameters that it uses."""

    def __init__(self, function: Callable[[Tensor], Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.modules_used = function, nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class _LigerCuteExperts(torch.autograd.Function):
    """The fused pass of liger-cute-kernels: gate and up [E, F, D], down [E, D, F], choices int32 [T, K]."""

    @staticmethod
    def forward(ctx, x, weight_TK, expert_TK, gate, up, down, library, team, keeps):
        shape = {"num_experts": len(gate), "top_k": expert_TK.shape[1], "team_handle": team}
        operands = expert_TK, weight_TK, gate, up, down
        made = library.moe_fused_fwd_bf16(x, *operands, **shape)
        ctx.library, ctx.shape, ctx.operands, ctx.made = library, shape, operands, made
        if not keeps:
            library.moe_pop_fwd()
        return made[0]

    @staticmethod
    def backward(ctx, dy):
        _, rows, results, offsets, slots, tiles, tile_rows = ctx.made
        dx, dgate, dup, ddown, dweight = ctx.library.moe_fused_bwd_bf16(
            dy.contiguous(), results, rows, slots, tiles, offsets, *ctx.operands, **ctx.shape,
            fwd_tile_m=tile_rows,
        )  # fmt: skip
        ctx.library.moe_pop_fwd()
        return dx, dweight, None, dgate, dup, ddown, None, None, None


def _liger_cute(w: Workload, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """github.com/linkedin/Liger-Kernel: fused expert-parallel kernels, here on one rank."""
    library = importlib.import_module("liger_cute_kernels.tvm_ffi")
    nvshmem = importlib.import_module("liger_cute_kernels.nvshmem")
    if w.activation != "swiglu" or dtype != torch.bfloat16:
        raise ValueError(f"{w.activation} in {dtype}: only swiglu in bfloat16")
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    nvshmem.init_from_pg()
    library.moe_configure_symmetric(
        max_tokens=w.tokens, hidden_dim=w.width, max_num_experts=w.experts, max_top_k=w.choices, num_pes=1,
        num_hosts=1, gpus_per_host=1,
    )  # fmt: skip
    make: dict[str, Any] = {"device": device, "dtype": dtype}
    layer = nn.Module()
    router = layer.router = nn.Linear(w.width, w.experts, bias=False, **make)
    for name, shape in (
        ("gate", (w.hidden, w.width)),
        ("up", (w.hidden, w.width)),
        ("down", (w.width, w.hidden)),
    ):
        setattr(layer, name, nn.Parameter(torch.randn(w.experts, *shape, **make) * 0.02))

    def run(x: Tensor) -> Tensor:
        weight_TK, expert_TK = router(x).float().softmax(-1).topk(w.choices)
        return _LigerCuteExperts.apply(
            x, weight_TK.to(dtype).contiguous(), expert_TK.int().contiguous(), layer.gate, layer.up,
            layer.down, library, nvshmem.team_world(), torch.is_grad_enabled(),
        )  # fmt: skip

    return _Called(run, layer)


def quack_gemm(device: torch.device) -> Callable[..., Tensor]:
    """quack's `gemm(A, B, out, cu_seqlens_m= or cu_seqlens_k=)`, not tuned. Raises Absent."""
    if device.type != "cuda":
        raise Absent("quack needs a GPU")
    try:
        gemm = importlib.import_module("quack.gemm_interface").gemm
    except ImportError as error:
        raise Absent(f"quack is not installed ({error})") from error
    return partial(gemm, tuned=False)


PEERS = {"torch grouped_mm": TorchGrouped, "liger-cute-kernels": _liger_cute}


class Dense(nn.Module):
    """A SwiGLU layer with the FLOPs of K experts per token."""

    def __init__(self, w: Workload, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        make: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.up = nn.Linear(w.width, w.choices * w.wide, **make)
        self.down = nn.Linear(w.choices * w.hidden, w.width, **make)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(activate(self.up(x), "swiglu"))


def _mixtral(w: Workload, implementation: str) -> nn.Module:
    """The MoE block of transformers' Mixtral, which takes [batch, sequence, width]."""
    try:
        import transformers
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    except ImportError as error:
        raise Absent(f"transformers is not installed ({error})") from error
    config = transformers.MixtralConfig(
        hidden_size=w.width, intermediate_size=w.hidden, num_local_experts=w.experts,
        num_experts_per_tok=w.choices,
    )  # fmt: skip
    config._experts_implementation = implementation
    return MixtralSparseMoeBlock(config)


SAME_WEIGHTS = (
    "ours, dropless", "ours, capacity 1.25", "transformers grouped_mm", "transformers eager", "dense",
)  # fmt: skip


def same_weights(
    w: Workload, dtype: torch.dtype, device: torch.device, names: Sequence[str] = SAME_WEIGHTS
) -> dict[str, nn.Module]:
    """Layers by name that take x [T, D]; those that are dropless are checked to give the same.

    Raises: Absent without transformers.
    """
    router = 0.05 * torch.randn(w.experts, w.width, dtype=dtype, device=device)
    w1 = 0.05 * torch.randn(w.experts, w.width, w.wide, dtype=dtype, device=device)
    w2 = 0.05 * torch.randn(w.experts, w.hidden, w.width, dtype=dtype, device=device)

    @torch.no_grad()
    def make(name: str) -> nn.Module:
        if name == "dense":
            return Dense(w, dtype, device)
        if name.startswith("ours"):
            layer = MoELayer(
                w.width, w.hidden, w.experts, top_k=w.choices, gate="topk(renormalize=True)",
                capacity_factor=1.25 if "1.25" in name else None, activation="swiglu",
                device=device, dtype=dtype,
            )  # fmt: skip
            for name, value in (("router", router), ("w1", w1), ("w2", w2)):
                layer.get_parameter(name).copy_(value)
            return layer
        block = _mixtral(w, name.removeprefix("transformers ")).to(device, dtype)
        block.get_parameter("gate.weight").copy_(router)
        experts = block.get_submodule("experts")
        layout = layout_of(experts)
        for weight, value in (("w1", w1), ("w2", w2)):
            experts.load_state_dict(dict(layout.restore(weight, value)), strict=False)
        return _Called(lambda x: block(x[None])[0], block)

    layers = {name: make(name) for name in names}
    alike = [layer for name, layer in layers.items() if name.startswith(("ours, dropless", "transformers"))]
    x = torch.randn(64, w.width, dtype=dtype, device=device)
    with torch.no_grad():
        for layer in alike[1:]:
            torch.testing.assert_close(layer(x), alike[0](x), rtol=1e-3, atol=1e-4)
    return layers


def make_layer(name: str, w: Workload, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """-> what takes x [T, D]: of OURS or of PEERS. Raises Absent if it cannot be had here."""
    if name not in OURS:
        return make_peer(name, w, dtype, device)
    return MoELayer(
        w.width, w.hidden, w.experts, top_k=w.choices, gate="topk", capacity_factor=None,
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
