"""`lancet selftest`: do the backends of this machine compute correctly?

The ranks of a small job run a layer on every backend, and a planned step, and compare with references.

W  ranks      T  tokens on each      E  experts, L = E / W on each      K  experts per token
D  width      F  hidden width of an expert

All ranks take part in each comparison, so that all report a difference; it ends the job, as any error does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lancet_kernels.cli.environment import backends
from lancet_kernels.cli.options import positive_int
from lancet_kernels.errors import UserError
from lancet_kernels.layer.model_layers import expert_parameters
from lancet_kernels.layer.moe_layer import MoELayer
from lancet_kernels.measure.launch import LANCET, Rank, launch, start_ranks, under_launcher
from lancet_kernels.ops.comm.groups import group_name, over_ranks

T, D, F, K, LOCAL_EXPERTS = 24, 16, 32, 2, 2
# How long a rank waits for another one.
TIMEOUT_S = 45.0


def add_parser(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "selftest",
        help="check that layers, plans and communication give right results here",
        description="Run a small layer forward and backward on every backend that this machine has, and a "
        "planned step, and compare each with a reference. A line for each; the exit code is not 0 if one "
        "fails. It takes less than a minute.",
    )
    command.add_argument("--ranks", type=positive_int, default=2, help="ranks on the CPU (default: 2)")
    command.add_argument(
        "--gpu",
        action="store_true",
        help="fail if there is no GPU to check (one that is there is always checked, with a rank for each "
        "of at most --ranks GPUs)",
    )
    # Only for the ranks that this command starts.
    command.add_argument("--device", choices=("cpu", "cuda"), help=argparse.SUPPRESS)
    command.set_defaults(run=run)


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Start the ranks on each device, or be one. -> exit code. Raises: UserError for a wrong result."""
    if arguments.device:
        run_checks(start_ranks(arguments.device, TIMEOUT_S))
        return 0
    if under_launcher():
        what, do = "a call that starts its own ranks", "call it without torchrun"
        raise UserError("selftest", got="a rank of another launcher", expected=what, do=do)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if arguments.gpu and not gpus:
        do = "see `lancet env` for what torch finds, or leave --gpu out"
        raise UserError("--gpu", got="no GPU that torch can use", expected="at least one", do=do)
    for device, ranks in (("cpu", arguments.ranks), ("cuda", min(arguments.ranks, gpus))):
        if ranks:
            command = [*LANCET, "selftest", "--device", device]
            environment = {"TRITON_INTERPRET": "1" if device == "cpu" else "0"}
            launch(ranks, command, device=device, environment=environment)
    return 0


def run_checks(rank: Rank) -> None:
    """Run every check that this device can run, on all ranks together. Raises: UserError for a difference."""
    for name, check, lack in _checks(rank):
        result = f"skipped  {lack}"
        if check is not None:
            difference, tolerance = check(rank)
            own = torch.tensor(difference, dtype=torch.float64).nan_to_num(float("inf"))
            largest = float(over_ranks(own, group_name(None), "max", "largest difference"))
            if largest > tolerance:
                expected = f"at most {tolerance:.0e}, relative to the largest value"
                raise UserError(name, got=f"a difference of {largest:.1e}", expected=expected, do="report it")
            result = f"ok       difference {largest:.1e}"
        if rank.rank == 0:
            print(f"{rank.device.type}: {name:<58}{result}", flush=True)


def _checks(rank: Rank) -> Iterator[tuple[str, Callable[[Rank], tuple[float, float]] | None, str]]:
    """(name, check or None, reason for None); a check gives the relative difference from a reference and the
    tolerance."""
    usable = backends()
    if rank.device.type == "cpu":
        fused, where = usable["fused, Triton's interpreter on the CPU"], "in Triton's interpreter"
    else:
        fused = usable["fused, one GPU" if rank.world == 1 else "fused, several GPUs"]
        where = "on the GPU"
    alone = f"{rank.world} rank{'s' * (rank.world != 1)}"
    yield f"MoELayer, backend torch, {alone}", lambda r: _layer(r, "torch"), ""
    yield f"a plan applied, {alone}", _plan, ""
    check = (lambda r: _layer(r, "fused")) if fused.works else None
    yield f"MoELayer, backend fused, {where}, {alone}", check, fused.reason


def _relative(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The largest difference between actual and expected; NaN if one is, which Python's max would ignore."""
    each = [(y - expected).abs().max() / expected.abs().max().clamp_min(1e-3) for y, expected in pairs]
    return float(torch.stack(each).max())


def _tolerance(dtype: torch.dtype, device: torch.device) -> float:
    """float32 products on a GPU may be rounded as TF32."""
    if dtype == torch.float64:
        return 1e-10
    return 2e-5 if device.type == "cpu" else 5e-3


def _layer(rank: Rank, backend: str) -> tuple[float, float]:
    """Forward and backward of a dropless top-2 layer, beside every expert applied to all tokens."""
    dtype = torch.float64 if backend == "torch" and rank.device.type == "cpu" else torch.float32
    E = rank.world * LOCAL_EXPERTS
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-2] ** 0.5
        return values.to(rank.device, dtype)

    # The weights of all experts and the tokens of all ranks, the same on every rank.
    whole = {"router": draw(E, D), "w1": draw(E, D, F), "w2": draw(E, F, D)}
    x_WTD, dy_WTD = draw(rank.world, T, D) * T**0.5, draw(rank.world, T, D)

    def own(name: str, tensor: Tensor) -> Tensor:
        first = LOCAL_EXPERTS * rank.rank
        return tensor if name == "router" else tensor[first : first + LOCAL_EXPERTS]

    layer = MoELayer(
        D, F, E, top_k=K, gate="topk", capacity_factor=None, backend=backend, device=rank.device, dtype=dtype
    )
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(own(name, whole[name]))
    y_TD = layer(x_WTD[rank.rank])
    (y_TD * dy_WTD[rank.rank]).sum().backward()
    if rank.world > 1:
        # Each rank has the router's gradient for its own tokens only.
        dist.all_reduce(layer.get_parameter("router").grad)
    expected_WTD = _reference(whole, x_WTD, dy_WTD)
    pairs = [(y_TD.detach(), expected_WTD[rank.rank])]
    for name, parameter in layer.named_parameters():
        actual, expected = parameter.grad, whole[name].grad
        assert actual is not None
        assert expected is not None
        pairs.append((actual, own(name, expected)))
    return _relative(pairs), _tolerance(dtype, rank.device)


def _reference(weights: dict[str, Tensor], x_WTD: Tensor, dy_WTD: Tensor) -> Tensor:
    """-> y [W, T, D], in plain torch; the weights have their gradients then."""
    router, w1, w2 = (weight.requires_grad_() for weight in weights.values())
    x_ND = x_WTD.flatten(0, 1)
    probability_NE = (x_ND @ router.T).softmax(-1)
    chosen_NK = probability_NE.topk(K).indices
    weight_NE = torch.zeros_like(probability_NE).scatter(1, chosen_NK, 1.0) * probability_NE
    y_ND = torch.einsum("ne,end->nd", weight_NE, nn.functional.gelu(x_ND @ w1) @ w2)
    (y_ND * dy_WTD.flatten(0, 1)).sum().backward()
    return y_ND.detach().view_as(x_WTD)


class _Step(nn.Module):
    """x[B, S, D], target[B, S, D] -> loss divided by the number of ranks."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.ranks = rank.world
        experts = rank.world * LOCAL_EXPERTS
        layers = [nn.Sequential(nn.Linear(D, D), MoELayer(D, F, experts), nn.LayerNorm(D)) for _ in range(2)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (self.layers(x) - target).square().mean() / self.ranks


def _plan(rank: Rank) -> tuple[float, float]:
    """A step planned for a slow link, so that ranges are cut: the same loss and gradients as the plain
    module."""
    # Imported here, because these import torch's tracer.
    from lancet_kernels.graph.costs.clusters import load_cluster
    from lancet_kernels.optimization.optimize import optimize

    slow = replace(
        load_cluster("local"), intra_node_gb_per_s=1e-3, inter_node_gb_per_s=1e-3, launch_us=0.1,
        intra_node_latency_us=1.0, inter_node_latency_us=1.0, per_peer_us=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = _Step(rank).to(rank.device)
    generator = torch.Generator().manual_seed(1 + rank.rank)
    x, target = (torch.randn(4, 8, D, generator=generator).to(rank.device) for _ in range(2))
    planned = optimize(model, (x, target), strategy="lancet", cluster=slow, reduce_gradients="sum")
    planned_loss = planned(x, target)
    planned_loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    loss = model(x, target)
    loss.backward()
    experts = set(expert_parameters(model))
    pairs = [(planned_loss.detach(), loss.detach())]
    for name, parameter in model.named_parameters():
        if rank.world > 1 and parameter not in experts:
            dist.all_reduce(parameter.grad)
        pairs.append((gradients[name], parameter.grad))
    return _relative(pairs), _tolerance(x.dtype, rank.device)
