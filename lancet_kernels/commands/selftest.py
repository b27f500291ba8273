"""`lancet selftest`: does what this machine has give right results?

All ranks of a small job run checks, which compare results with references.

W  ranks      T  tokens on each      E  experts, L = E / W on each      K  experts per token
D  width      F  hidden width of an expert

A check first communicates and then compares, so that all ranks take part in reporting a difference. Any other
error ends the job, with one line that names the rank and the error.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lancet_kernels import ops
from lancet_kernels.atomic import json_text, write_json_atomically
from lancet_kernels.commands.environment import backends
from lancet_kernels.commands.options import positive_int
from lancet_kernels.errors import RankFailed, UserError
from lancet_kernels.layer.model_layers import expert_parameters
from lancet_kernels.layer.moe_layer import MoELayer
from lancet_kernels.ops.comm.groups import group_name
from lancet_kernels.training.launch import launch
from lancet_kernels.training.ranks import Rank, start_ranks, under_launcher

T, D, F, K, LOCAL_EXPERTS = 24, 16, 32, 2, 2
# How long a rank waits for another one.
TIMEOUT_S = 45.0


def add_parser(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "selftest",
        help="check that layers, kernels, plans and communication give right results here",
        description="Run a small layer forward and backward on every backend that this machine has, a "
        "planned step, a kernel, and an all-to-all between ranks, and compare each with a reference. A line "
        "for each; the exit code is not 0 if one fails. It takes less than a minute.",
    )
    command.add_argument("--ranks", type=positive_int, default=2, help="ranks on the CPU (default: 2)")
    command.add_argument(
        "--gpu",
        action="store_true",
        help="fail if there is no GPU to check (one that is there is always checked, with a rank for each "
        "of at most --ranks GPUs)",
    )
    command.add_argument("--json", action="store_true", help="print the results as JSON")
    # For ourselves: what the ranks are told.
    command.add_argument("--device", choices=("cpu", "cuda"), help=argparse.SUPPRESS)
    command.add_argument("--results", help=argparse.SUPPRESS)
    command.set_defaults(run=run)


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Start the ranks on each device, or be one. -> 1 if a check failed, else 0."""
    if arguments.results:
        out = sys.stderr if arguments.json else sys.stdout
        rank = start_ranks(arguments.device, TIMEOUT_S)
        run_checks(rank, Path(arguments.results), lambda line: print(line, file=out, flush=True))
        return 0
    if under_launcher():
        raise UserError(
            "selftest",
            got="a rank of another launcher",
            expected="a call that starts its own ranks",
            do="call it without torchrun",
        )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if arguments.gpu and not gpus:
        raise UserError(
            "--gpu",
            got="no GPU that torch can use",
            expected="at least one",
            do="see `lancet env` for what torch finds, or leave --gpu out",
        )
    results = _on_ranks(arguments.ranks, "cpu", arguments.json)
    if gpus:
        results += _on_ranks(min(arguments.ranks, gpus), "cuda", arguments.json)
    failed = sum(result.status == "failed" for result in results)
    skipped = sum(result.status == "skipped" for result in results)
    if arguments.json:
        print(json_text({"checks": [vars(result) for result in results], "failed": failed}))
    else:
        print(f"{len(results) - failed - skipped} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


def _on_ranks(ranks: int, device: str, quiet: bool) -> list[Result]:
    """The results of all checks on one kind of device. A rank that fails makes its check fail."""
    with tempfile.TemporaryDirectory(prefix="lancet-selftest-") as folder:
        file = Path(folder, "results.json")
        command = ["-m", "lancet_kernels.cli", "selftest", "--device", device, "--results", str(file)]
        environment = {"TRITON_INTERPRET": "1" if device == "cpu" else "0"}
        failure = ""
        try:
            launch(ranks, command + ["--json"] * quiet, device=device, environment=environment)
        except RankFailed as error:
            failure = str(error)
        written = json.loads(file.read_text()) if file.exists() else []
    results = [Result(**fields) for fields in written]
    if failure:
        if not results or results[-1].status != "running":
            results.append(Result("start of the ranks", device))
        results[-1].status, results[-1].detail = "failed", failure
        if not quiet:
            print(results[-1].line(), flush=True)
    return results


@dataclass
class Result:
    """A line of the report. status: "running", "ok", "failed" or "skipped"."""

    name: str
    device: str
    status: str = "running"
    detail: str = ""
    seconds: float = 0.0

    def line(self) -> str:
        """The result as text for people."""
        time_s = f"{self.seconds:5.1f} s" if self.status in ("ok", "failed") else " " * 7
        return (
            f"{self.status:<7}  {time_s}  {self.device}: {self.name}{': ' * bool(self.detail)}{self.detail}"
        )


@dataclass(frozen=True)
class Difference:
    """The difference of a result from its reference, relative to the largest value. tolerance 0: bitwise."""

    value: float
    tolerance: float
    detail: str


def run_checks(rank: Rank, results_file: Path, show: Callable[[str], None]) -> None:
    """Run every check that this device can run, on all ranks together; rank 0 writes and shows the results.

    Raises: what a check raises, which ends the job; its result is then still "running" in the file.
    """
    results: list[Result] = []

    def write() -> None:
        if rank.rank == 0:
            write_json_atomically(results_file, [asdict(result) for result in results])

    for name, check, lack in _checks(rank):
        result = Result(name, rank.device.type)
        results.append(result)
        if check is None:
            result.status, result.detail = "skipped", lack
        else:
            write()
            start = time.perf_counter()
            outcome = check(rank)
            value = _largest(outcome.value, rank)
            result.status = "ok" if value <= outcome.tolerance else "failed"
            result.detail = (
                f"{outcome.detail}, difference {value:.1e}"
                if outcome.tolerance
                else f"{outcome.detail}, {'bitwise equal' if value == 0 else f'{value:.0f} values are wrong'}"
            )
            result.seconds = time.perf_counter() - start
        write()
        if rank.rank == 0:
            show(result.line())


def _checks(rank: Rank) -> Iterator[tuple[str, Callable[[Rank], Difference] | None, str]]:
    """Name, check or None, and why there is none."""
    usable = backends()
    if rank.device.type == "cpu":
        kernels = fused = usable["fused, Triton's interpreter on the CPU"]
        where = "in Triton's interpreter"
    else:
        kernels, where = usable["fused, one GPU"], "on the GPU"
        fused = kernels if rank.world == 1 else usable["fused, several GPUs"]
    alone = f"{rank.world} rank{'s' * (rank.world != 1)}"
    if rank.world > 1:
        yield f"all-to-all between {alone}", _all_to_all, ""
    else:
        yield "all-to-all between ranks", None, "needs two ranks: --ranks 2"
    yield f"MoELayer, backend torch, {alone}", lambda r: _layer(r, "torch"), ""
    yield f"a plan applied, {alone}", _plan, ""
    yield f"kernel of rows {where}", _kernel if kernels.works else None, kernels.reason
    check = (lambda r: _layer(r, "fused")) if fused.works else None
    yield f"MoELayer, backend fused, {where}, {alone}", check, fused.reason


def _largest(value: float, rank: Rank) -> float:
    """The largest of all ranks; NaN counts as infinite."""
    tensor = torch.tensor(value, dtype=torch.float64, device=rank.device).nan_to_num(float("inf"))
    if rank.world > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def _relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-3))


def _tolerance(dtype: torch.dtype, device: torch.device) -> float:
    """float32 products on a GPU may be rounded as TF32."""
    if dtype == torch.float64:
        return 1e-10
    return 2e-5 if device.type == "cpu" else 5e-3


def _all_to_all(rank: Rank) -> Difference:
    """Rank s sends 1 + (s + e) % 3 rows to expert e; the value of a row encodes source, expert and row
    number."""
    W = rank.world
    E = W * LOCAL_EXPERTS

    def rows(source: int, expert: int) -> Tensor:
        number = torch.arange(1 + (source + expert) % 3, device=rank.device)
        return (100 * (E * source + expert) + number).float()[:, None].expand(-1, D)

    group = group_name(None)
    sent = torch.cat([rows(rank.rank, e) for e in range(E)])
    count_E = torch.tensor([1 + (rank.rank + e) % 3 for e in range(E)], device=rank.device)
    count_WL = count_E.view(W, LOCAL_EXPERTS)
    received_WL = ops.exchange_counts(count_WL, D, sent.dtype, group)
    received = ops.all_to_all(sent, count_WL, received_WL, group, True)
    back = ops.all_to_all(received, received_WL, count_WL, group, False, sent.shape[0])
    own = range(LOCAL_EXPERTS * rank.rank, LOCAL_EXPERTS * (rank.rank + 1))
    expected = torch.cat([rows(source, e) for e in own for source in range(W)])
    wrong = received.shape != expected.shape or int((received != expected).sum()) + int((back != sent).sum())
    return Difference(float(wrong), 0.0, f"{sent.shape[0]} rows to {E} experts and back")


class _Weights:
    """The weights of all experts and of the router, and the tokens of all ranks: the same on every rank."""

    def __init__(self, rank: Rank, dtype: torch.dtype) -> None:
        E = rank.world * LOCAL_EXPERTS
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            values = torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-2] ** 0.5
            return values.to(rank.device, dtype)

        self.router, self.w1, self.w2 = draw(E, D), draw(E, D, F), draw(E, F, D)
        self.x_WTD, self.dy_WTD = draw(rank.world, T, D) * T**0.5, draw(rank.world, T, D)

    def reference(self) -> tuple[Tensor, dict[str, Tensor]]:
        """-> y [W, T, D] and the gradients, with every expert applied to all tokens, in plain torch."""
        tensors = {name: getattr(self, name).clone().requires_grad_() for name in ("router", "w1", "w2")}
        x_ND = self.x_WTD.flatten(0, 1)
        probability_NE = (x_ND @ tensors["router"].T).softmax(-1)
        chosen_NK = probability_NE.topk(K).indices
        weight_NE = torch.zeros_like(probability_NE).scatter(1, chosen_NK, 1.0) * probability_NE
        hidden_ENF = nn.functional.gelu(x_ND @ tensors["w1"])
        y_ND = torch.einsum("ne,end->nd", weight_NE, hidden_ENF @ tensors["w2"])
        (y_ND * self.dy_WTD.flatten(0, 1)).sum().backward()
        return y_ND.detach().view_as(self.x_WTD), {name: t.grad for name, t in tensors.items()}


def _layer(rank: Rank, backend: str) -> Difference:
    """Forward and backward of a dropless top-2 layer."""
    dtype = torch.float64 if backend == "torch" and rank.device.type == "cpu" else torch.float32
    weights = _Weights(rank, dtype)
    layer = MoELayer(
        D, F, rank.world * LOCAL_EXPERTS, top_k=K, gate="topk", capacity_factor=None, backend=backend,
        device=rank.device, dtype=dtype,
    )  # fmt: skip
    own = slice(LOCAL_EXPERTS * rank.rank, LOCAL_EXPERTS * (rank.rank + 1))
    assert layer.router is not None
    with torch.no_grad():
        layer.router.copy_(weights.router)
        layer.w1.copy_(weights.w1[own])
        layer.w2.copy_(weights.w2[own])
    y_TD = layer(weights.x_WTD[rank.rank])
    (y_TD * weights.dy_WTD[rank.rank]).sum().backward()
    got = {name: parameter.grad for name, parameter in layer.named_parameters()}
    if rank.world > 1:
        # Each rank has the router's gradient for its own tokens only.
        dist.all_reduce(got["router"])
    expected_WTD, gradients = weights.reference()
    pairs = [(y_TD.detach(), expected_WTD[rank.rank]), (got["router"], gradients["router"])]
    pairs += [(got[name], gradients[name][own]) for name in ("w1", "w2")]
    what = f"forward and backward in {str(dtype).removeprefix('torch.')}"
    return Difference(max(_relative(*pair) for pair in pairs), _tolerance(dtype, rank.device), what)


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


def _plan(rank: Rank) -> Difference:
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
    got = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    loss = model(x, target)
    loss.backward()
    experts = set(expert_parameters(model))
    pairs = [(planned_loss.detach(), loss.detach())]
    for name, parameter in model.named_parameters():
        if rank.world > 1 and parameter not in experts:
            dist.all_reduce(parameter.grad)
        pairs.append((got[name], parameter.grad))
    plan = planned.plan
    what = f"ranges in parts: {len(plan.ranges)}, loss and gradients"
    return Difference(max(_relative(*pair) for pair in pairs), _tolerance(x.dtype, rank.device), what)


def _kernel(rank: Rank) -> Difference:
    """The kernel that copies tokens to the rows of their choices; one of these is dropped."""
    # Imported here, because it imports Triton.
    from lancet_kernels.kernels.moe.permute import permute

    x_TD = torch.randn(T, D, generator=torch.Generator().manual_seed(rank.rank))
    row_TK = torch.arange(T * K).flip(0).view(T, K) - 1
    rows_SD = permute(x_TD.to(rank.device), row_TK.to(rank.device), None, T * K - 1).cpu()
    expected = x_TD.repeat_interleave(K, 0).flip(0)[1:]
    return Difference(float((rows_SD != expected).sum()), 0.0, f"{T * K - 1} rows, float32")
