"""The expert part of an MoE layer, dispatch to combine, forward and backward, in fused launches.

Forward: put rows -> act(x @ w1 + b1) -> @ w2 + b2, put back -> weighted sum. Backward: put dy and weights
-> dh = weight (dy @ w2^T) act' -> dx = dh @ w1^T, put back with the weights' gradients -> sum; dW2, dW1 and
their biases fill the way back. Each direction is one launch, and one that adds up what comes back.
Independent GEMMs (dW of another layer, say) can ride along: `DenseGemm`. Before the forward two small
launches exchange counts and find where all rows lie (`schedule.py`); the backward's lie where the forward's
did. Letters: `protocol`.

The launchers do not synchronise with the device. A wait that ran out of time is in the exchange's report;
`Exchange.check()` raises it. Whether a pass can run is checked before anything is sent: no peer waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.kernels import runtime
from lancet_kernels.kernels.config import GemmConfig, OverlapConfig, check_activation, most_registers
from lancet_kernels.kernels.hopper.kernel import gluon_overlap_kernel, launch_gluon
from lancet_kernels.kernels.portable.kernel import overlap_kernel
from lancet_kernels.kernels.protocol import Gemms, Gradients, Sending, Stages, combine
from lancet_kernels.kernels.protocol.combine import combine_results_kernel
from lancet_kernels.kernels.protocol.exchange import Exchange, OpenPass
from lancet_kernels.kernels.protocol.schedule import exchange_counts_kernel, schedule_kernel
from lancet_kernels.kernels.protocol.tasks import DENSE_WORDS, write_dense_row_kernel
from lancet_kernels.kernels.runtime import check_tensor, compile_together, launch, recorded


@dataclass(frozen=True)
class Routing:
    """Where the tokens of this PE go (a gate's decision, as rows to send; `schedule.py`).

    Attributes:
        expert, row: int64 [T, K]; row: which row to send the choice is; negative: dropped.
        weight: float32 [T, K].
        choice: int32 [S], the choice t * K + k that each row to send is; beyond the last row anything.
        count: int64 [E], how many rows go to each expert.
    """

    expert: Tensor
    row: Tensor
    weight: Tensor
    choice: Tensor
    count: Tensor

    @classmethod
    def of(cls, expert: Tensor, row: Tensor, weight: Tensor, count: Tensor) -> Routing:
        """`choice` is the inverse of `row`."""
        row_N = row.reshape(-1)
        size = row_N.numel()
        choice = torch.zeros(size + 1, dtype=torch.int32, device=row.device)
        # Dropped choices all go behind the last row.
        place = torch.where(row_N < 0, size, row_N)
        choice.scatter_(0, place, torch.arange(size, dtype=torch.int32, device=row.device))
        return cls(expert, row.contiguous(), weight, choice, count)

    def token_of_row(self) -> Tensor:
        """int32 [S]: the token that each row to send is of."""
        return self.choice // self.expert.shape[1]

    def weight_of_row(self) -> Tensor:
        """float32 [S]: the weight of each row to send."""
        if self.weight.numel() == 0:
            return self.weight.new_zeros(self.choice.shape)
        return self.weight.reshape(-1)[self.choice.clamp(0, self.weight.numel() - 1)]


@dataclass(frozen=True)
class Experts:
    """The experts of this PE: w1 [L, D, H], b1 [L, H] or None, w2 [L, F, D], b2 [L, D] or None."""

    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None
    activation: str

    @property
    def hidden(self) -> int:
        return self.w2.shape[1]


@dataclass(frozen=True)
class DenseGemm:
    """c [A, B] = a^T @ b of a [N, A] and b [N, B]; contiguous, of the launch's dtype."""

    a: Tensor
    b: Tensor
    c: Tensor


@dataclass
class SavedPass:
    """Saved by a forward pass for its backward: the pass of the exchange, which locates its rows, and [A, H],
    where `pre` has the values before the activation of these rows; those after it are recomputed."""

    opened: OpenPass
    pre: Tensor


@dataclass(frozen=True)
class ExpertGradients:
    """dx [T, D], of this PE's tokens; dweight float32 [T, K]; the others like the experts' parameters."""

    dx: Tensor
    dweight: Tensor
    dw1: Tensor
    db1: Tensor | None
    dw2: Tensor
    db2: Tensor | None


def check_pass(exchange: Exchange, x: Tensor, routing: Routing, experts: Experts) -> None:
    """Raise UserError unless a pass with these can run: before anything is sent."""
    num_tokens, num_choices = x.shape[0], routing.expert.shape[-1]
    local, width, hidden = exchange.local_experts, exchange.width, experts.hidden
    width_in = 2 * hidden if experts.activation == "swiglu" else hidden
    runtime.check_runs_on("input of the fused experts", x.device)
    check_activation(experts.activation)
    checks = (
        ("x", x, (num_tokens, width), exchange.dtype),
        ("expert", routing.expert, (num_tokens, num_choices), torch.int64),
        ("row", routing.row, (num_tokens, num_choices), torch.int64),
        ("weight", routing.weight, (num_tokens, num_choices), torch.float32),
        ("choice", routing.choice, (num_tokens * num_choices + 1,), torch.int32),
        ("count", routing.count, (exchange.world * local,), torch.int64),
        ("w1", experts.w1, (local, width, width_in), exchange.dtype),
        ("w2", experts.w2, (local, hidden, width), exchange.dtype),
        ("b1", experts.b1, (local, width_in), exchange.dtype),
        ("b2", experts.b2, (local, width), exchange.dtype),
    )
    for name, tensor, shape, dtype in checks:
        if tensor is not None:
            check_tensor(f"{name} of the fused experts", tensor, shape=shape, dtype=dtype, device=x.device)
    check_routing(routing)
    if (experts.b1 is None) != (experts.b2 is None):
        raise UserError("biases", got="one of b1 and b2", expected="both or neither", do="give zeros")


def check_routing(routing: Routing) -> None:
    """Raise UserError unless the tables of a routing on the CPU are each other's inverse. On a GPU nothing is
    looked at, since that would wait for the device."""
    if routing.expert.device.type != "cpu":
        return
    count, kept = routing.count, routing.row >= 0
    row, choice = routing.row[kept], kept.view(-1).nonzero().view(-1)
    # Rows lie by expert; each one is a choice's, and the choice is the row's.
    num_rows = int(count.clamp(min=0).sum())
    sound = bool((count >= 0).all()) and torch.equal(row.sort()[0], torch.arange(num_rows))
    sound = sound and torch.equal(
        torch.arange(len(count)).repeat_interleave(count)[row], routing.expert[kept]
    )
    if not (sound and torch.equal(routing.choice[row], choice.int())):
        raise UserError(
            "routing",
            got=f"{len(row)} choices with a row and counts of {int(count.sum())} rows, not the same ones",
            expected="rows by expert, as the counts say, and choice to be the inverse of row",
            do="make the tables from one call of a gate",
        )


# No limit: more than any launch has.
ALL_TASKS = 2**31 - 1
# Kernels of a pass that wait for peers, or for each other.
WAITING = (
    overlap_kernel, gluon_overlap_kernel, combine_results_kernel, exchange_counts_kernel, schedule_kernel,
)  # fmt: skip


def moe_forward(
    exchange: Exchange,
    x: Tensor,
    routing: Routing,
    experts: Experts,
    config: OverlapConfig,
    *,
    dense: Sequence[DenseGemm] = (),
) -> tuple[Tensor, SavedPass]:
    """x [T, D] -> out [T, D] and what the backward needs. Release `saved.opened` if no backward follows.

    Raises UserError for wrong dtype, layout, device or size, before anything is sent.
    """
    check_pass(exchange, x, routing, experts)
    opened = exchange.begin()
    exchange.schedule(opened, routing.count)
    pre = exchange.kept(experts.w1.shape[2])
    hidden = x.new_empty(exchange.receive_rows, experts.hidden)
    out = torch.empty_like(x)
    gemms = Gemms(experts.w1, experts.b1, pre, hidden, experts.w2, experts.b2)
    # Weights that a forward never looks at.
    sending = Sending(x, routing.token_of_row(), routing.weight)
    _launch(exchange, opened, experts, config, dense, sending, gemms, None, out)
    _combine(exchange, opened, routing, config, out, None)
    return out, SavedPass(opened, pre)


def moe_backward(
    forward: Exchange,
    saved: SavedPass,
    backward: Exchange,
    dy: Tensor,
    routing: Routing,
    experts: Experts,
    config: OverlapConfig,
    *,
    dense: Sequence[DenseGemm] = (),
) -> ExpertGradients:
    """Gradients of `moe_forward`; dy [T, D]. Opens and releases a pass of `backward`, none of `forward`.

    Raises UserError as moe_forward.
    """
    check_pass(backward, dy, routing, experts)
    if not saved.opened.open:
        raise UserError(
            f"backward of a pass of {forward.name}",
            got="one that was released: its rows may be overwritten",
            expected="one that is open",
            do="release a pass after its only backward",
        )
    opened = backward.begin(saved.opened.state.table)
    # Scratch until the launch ends, and launches are in one stream: so all layers take the same memory.
    dh = saved.pre.new_empty(forward.receive_rows, saved.pre.shape[1])
    activated = saved.pre.new_empty(forward.receive_rows, experts.hidden)
    dx, dweight, dw1, dw2 = map(torch.empty_like, (dy, routing.weight, experts.w1, experts.w2))
    db1, db2 = (None if b is None else torch.empty_like(b) for b in (experts.b1, experts.b2))
    results = ExpertGradients(dx, dweight, dw1, db1, dw2, db2)
    gemms = Gemms(experts.w2, experts.b2, saved.pre, dh, experts.w1, experts.b1, activated)
    gradients = Gradients(forward.rows.local, results.dw2, results.db2, results.dw1, results.db1)
    sending = Sending(dy, routing.token_of_row(), _weights_to_send(backward, routing))
    _launch(backward, opened, experts, config, dense, sending, gemms, gradients, results.dx)
    _combine(backward, opened, routing, config, results.dx, results.dweight)
    backward.release(opened)
    return results


def aligned(
    exchange: Exchange, experts: Experts, dense: Sequence[DenseGemm], tensors: Iterable[Tensor | None]
) -> bool:
    """Are bases and row distances of all operands multiples of 16 bytes, as tensor descriptors need them?
    Stores rely on it, too."""
    operands = [t for t in tensors if t is not None]
    widths = [exchange.width, experts.hidden]
    for problem in dense:
        operands += problem.a, problem.b, problem.c
        widths += problem.a.shape[1], problem.b.shape[1]
    bytes_each = exchange.dtype.itemsize
    return all(t.data_ptr() % 16 == 0 for t in operands) and all(w * bytes_each % 16 == 0 for w in widths)


def _weights_to_send(exchange: Exchange, routing: Routing) -> Tensor:
    """float32 [S], in symmetric memory where NVSHMEM sends them."""
    weights, stage = routing.weight_of_row(), exchange.buffers.stage
    if stage is None:
        return weights
    rows = min(len(stage.weights.local), len(weights))
    stage.weights.local[:rows] = weights[:rows]
    return stage.weights.local


def _launch(
    exchange: Exchange,
    opened: OpenPass,
    experts: Experts,
    config: OverlapConfig,
    dense: Sequence[DenseGemm],
    sending: Sending,
    gemms: Gemms,
    gradients: Gradients | None,
    out: Tensor,
) -> None:
    """The overlap kernel of one direction: a backward with `gradients`. out: what `_combine` will write."""
    fits = aligned(exchange, experts, dense, [sending.rows, out, *gemms, *(gradients or ())])
    cut = config.cut(exchange.dtype, experts.activation, aligned=fits, backward=gradients is not None)
    gemm, stage = cut.gemm, exchange.buffers.stage
    if gradients is not None:
        columns = triton.cdiv(experts.hidden, cut.columns_in)
        gemms = gemms._replace(row_dots=sending.weights.new_empty(columns, exchange.receive_rows))
    problems, dense_tiles = dense_table(dense, gemm, exchange.memory.device)
    arguments: dict[str, Any] = {
        "of_pass": opened.state, "arrivals": exchange.arrivals, "returns": exchange.returns,
        "stages": None if stage is None else Stages(stage.rows.local, stage.results.local, stage.dots.local),
        "sending": sending, "gemms": gemms, "gradients": gradients, "problems_ptr": problems,
        "rank": exchange.rank, "W": exchange.world, "L": exchange.local_experts, "D": exchange.width,
        "F": experts.hidden, "R": exchange.receive_rows, "tiles": exchange.tiles, "chunks": exchange.chunks,
        "timeout_us": exchange.timeout_us, "num_problems": len(dense), "dense_tiles": dense_tiles,
        "limit": ALL_TASKS, "BACKWARD": gradients is not None, "ACT": experts.activation,
        "NVSHMEM": exchange.nvshmem, "TMA": cut.tma,
        "BM": gemm.block_m, "BN": gemm.block_n, "BN_IN": cut.columns_in, "BK": gemm.block_k,
        "BW": triton.next_power_of_2(exchange.world), "PUT_ROWS": config.put_rows,
        "PUT_BLOCK": config.put_block,
    }  # fmt: skip
    if cut.tma:
        runtime.provide_scratch()
    if cut.gluon:
        launch_gluon((config.programs,), gemm, arguments)
    else:
        options = {"num_warps": gemm.num_warps, "num_stages": gemm.num_stages}
        launch(overlap_kernel, (config.programs,), **arguments, **options, maxnreg=most_registers(gemm))


def _combine(
    exchange: Exchange,
    opened: OpenPass,
    routing: Routing,
    config: OverlapConfig,
    out: Tensor,
    dweight: Tensor | None,
) -> None:
    """Add up what comes back. dweight: of a backward, whose sums are without weights."""
    tokens, choices = routing.expert.shape
    on_each = 1 if exchange.memory.shares_device else combine.PROGRAMS
    launch(
        combine_results_kernel, (on_each * config.programs,),
        of_pass=opened.state, returns=exchange.returns, expert_ptr=routing.expert,
        row_ptr=routing.row, weight_ptr=routing.weight if dweight is None else None, out_ptr=out,
        dweight_ptr=dweight,
        rank=exchange.rank, W=exchange.world, L=exchange.local_experts, D=exchange.width, T=tokens,
        timeout_us=exchange.timeout_us, limit=ALL_TASKS, K=choices,
        NVSHMEM=exchange.nvshmem, BM=exchange.chunk_rows,
        BK=triton.next_power_of_2(choices), BT=config.reduce_tokens, BD=config.reduce_block,
        num_warps=combine.WARPS, maxnreg=combine.REGISTERS,
    )  # fmt: skip


def dense_table(
    problems: Sequence[DenseGemm], tile: GemmConfig, device: torch.device
) -> tuple[Tensor | None, int]:
    """-> int64 [problems, 8], the rows of the kernel's table, and the number of tiles; None and 0 for none.
    Written by a kernel: CUDA graphs cannot capture a copy from memory that may be gone when they run."""
    if not problems:
        return None, 0
    table = torch.empty(len(problems), DENSE_WORDS.value, dtype=torch.int64, device=device)
    tiles = 0
    for i, problem in enumerate(problems):
        a, b, c = problem.a, problem.b, problem.c
        launch(
            write_dense_row_kernel, (1,), row_ptr=table[i], a=a.data_ptr(), b=b.data_ptr(), c=c.data_ptr(),
            M=c.shape[0], N=c.shape[1], K=a.shape[0], first=tiles, num_warps=1,
        )  # fmt: skip
        tiles += triton.cdiv(c.shape[0], tile.block_m) * triton.cdiv(c.shape[1], tile.block_n)
    return table, tiles


@contextmanager
def warming_up(*others: Any) -> Iterator[None]:
    """Inside, launches of a pass (and of `others`) that wait are recorded, and do not run; all others do. On
    leaving, their kernels are compiled side by side, and loaded.
    """
    if runtime.INTERPRETED:
        yield
        return
    with recorded(*WAITING, *others) as launches:
        yield
    compile_together(launches)


def variants() -> dict[str, int]:
    """The number of compiled variants of each of `WAITING`; none in the interpreter."""
    caches = {kernel.fn.__name__: getattr(kernel, "device_caches", {}) for kernel in WAITING}
    return {name: sum(len(of_device[0]) for of_device in cache.values()) for name, cache in caches.items()}


def warm_up(
    forward: Exchange,
    backward: Exchange,
    x: Tensor,
    routing: Routing,
    experts: Experts,
    config: OverlapConfig,
) -> None:
    """Compile what a pass through new exchanges needs, on all PEs at once, and meet. Collective.

    A wait for a peer is bounded from the launch on: without this, a PE that compiles longer than its peers
    would be taken for a dead one. To the exchanges this is a pass that all PEs skip.
    """
    if runtime.INTERPRETED:
        return
    with warming_up():
        out, saved = moe_forward(forward, x, routing, experts, config)
        moe_backward(forward, saved, backward, out, routing, experts, config)
    forward.release(saved.opened)
    forward.memory.barrier()
