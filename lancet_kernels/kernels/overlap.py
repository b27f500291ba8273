"""The expert part of an MoE layer, dispatch to combine, forward and backward, in fused launches.

    T  tokens here     E  experts in all, W PEs with L = E / W each    K  choices per token
    D  model width     F  hidden width    H  F, or 2F for swiglu       R  most rows received

Forward: put rows -> act(x @ w1 + b1) -> @ w2 + b2, put back -> weighted sum. Backward: put dy and weights
-> dh = weight (dy @ w2^T) act' -> dx = dh @ w1^T, put back with the weights' gradients -> sum; dW2, dW1 and
their biases fill the way back. By default each direction is one
launch; `split` makes it two (dispatch+GEMM, GEMM+combine). Independent GEMMs (dW of another layer, say) can
ride along in any of them: `DenseGemm`. Before the forward two small launches exchange counts and find where
all rows lie (`schedule.py`); the backward's rows lie where the forward's did.

The launchers do not synchronise with the device. A wait that ran out of time is in the exchange's report;
`Exchange.check()` raises it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.kernels import runtime
from lancet_kernels.kernels.gemm_config import GemmConfig
from lancet_kernels.kernels.hopper.config import hopper_config, refusals
from lancet_kernels.kernels.hopper.launch import launch_gluon
from lancet_kernels.kernels.kernel_launch import launch, on_device
from lancet_kernels.kernels.overlap_checks import check_pass, check_same_exchange
from lancet_kernels.kernels.overlap_config import (
    OverlapConfig,
    first_columns,
    launch_tile,
    most_registers,
    plain_tile,
)
from lancet_kernels.kernels.overlap_data import (
    DenseGemm,
    ExpertGradients,
    Experts,
    Routing,
    SavedPass,
)
from lancet_kernels.kernels.protocol.exchange import Exchange, Stage, Use
from lancet_kernels.kernels.protocol.tasks import DENSE_WORDS, LaunchShape
from lancet_kernels.kernels.reference.gemm import KINDS
from lancet_kernels.kernels.reference.kernel import overlap_kernel
from lancet_kernels.kernels.reference.tiles import write_dense_row_kernel
from lancet_kernels.kernels.tuning import tuned

# More than any launch has: a limit that is none.
ALL_TASKS = 2**31 - 1
SMS_VARIABLE = "LANCET_FUSED_SMS"


def default_overlap_config(
    width: int,
    hidden: int,
    activation: str,
    dtype: torch.dtype,
    device: torch.device,
    pes_here: int = 1,
    far: bool = False,
) -> OverlapConfig:
    """What was tuned for the device, else a sensible choice.

    Args: pes_here: PEs that share the device. far: some peers are reached by NVSHMEM only.
    Raises: UserError for a wrong LANCET_FUSED_SMS.

    In the interpreter small sizes get small tiles, so that they still have several; large ones get large
    tiles, because there a tile costs the same milliseconds whatever its size.
    """
    if device.type != "cuda" and max(width, hidden) <= 64:
        tile = GemmConfig(16, 32, 16, 1, 1)
        return OverlapConfig(tile, put_rows=4, put_block=32, reduce_tokens=4, reduce_block=32)
    if device.type != "cuda":
        tile = GemmConfig(32, 256, 128, 1, 1)
        return OverlapConfig(tile, put_rows=32, put_block=256, reduce_tokens=32, reduce_block=256)
    config = tuned("overlap", (width, hidden, activation, pes_here), dtype, device)
    properties = torch.cuda.get_device_properties(device)
    arch = 10 * properties.major + properties.minor
    programs = max(1, multiprocessors(properties.multi_processor_count) // pes_here)
    if config is None or (far and config.bodies == "gluon"):
        config = config_for_gpu(width, hidden, activation, dtype, arch, programs, far)
    if config.programs <= programs:
        return config
    return replace(config, programs=programs, comm_programs=min(config.comm_programs, programs))


def config_for_gpu(
    width: int,
    hidden: int,
    activation: str,
    dtype: torch.dtype,
    arch: int,
    programs: int,
    far: bool = False,
) -> OverlapConfig:
    """The default for compute capability `arch`: the Hopper kernel wherever it can run, else the plain one.

    programs: of the grid. far: as of `default_overlap_config`.
    """
    if not refusals(hopper_config(programs), width, hidden, dtype, arch, far):
        return hopper_config(programs)
    return OverlapConfig.for_gpu(width, hidden, activation, dtype, arch, programs)


def multiprocessors(of_device: int) -> int:
    """How many streaming multiprocessors fused launches may take: all, or LANCET_FUSED_SMS.

    A fused launch is resident to its end. On those that it leaves free NCCL reduces gradients meanwhile.
    """
    text = os.environ.get(SMS_VARIABLE)
    if not text:
        return of_device
    if not text.isdecimal() or not 1 <= int(text) <= of_device:
        raise UserError(
            SMS_VARIABLE,
            got=text,
            expected=f"1 to {of_device}, all of the GPU",
            do="unset it",
        )
    return int(text)


def moe_forward(
    exchange: Exchange,
    x: Tensor,
    routing: Routing,
    experts: Experts,
    config: OverlapConfig,
    *,
    dense: Sequence[DenseGemm] = (),
) -> tuple[Tensor, SavedPass]:
    """x [T, D] -> out [T, D] and what the backward needs. Release `saved.use` if no backward follows.

    Raises UserError for wrong dtype, layout, device or size, before anything is sent.
    """
    check_pass(exchange, x, routing, experts, config, dense)
    use = exchange.begin()
    exchange.schedule(use, routing.count)
    hidden = x.new_empty(exchange.receive_rows, experts.hidden)
    pre = x.new_empty(exchange.receive_rows, experts.w1.shape[2])
    out = torch.empty_like(x)
    launches = _Launch(exchange, use, routing, experts, config, dense, backward=False)
    launches.run(
        source=x, weight_in=experts.w1, bias_in=experts.b1, pre=pre, hidden=hidden,
        weight_out=experts.w2, bias_out=experts.b2, out=out,
    )  # fmt: skip
    return out, SavedPass(use, pre)


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
    """Gradients of `moe_forward`; dy [T, D]. Opens and releases a use of `backward`, none of `forward`.

    Raises UserError as moe_forward.
    """
    check_pass(backward, dy, routing, experts, config, dense)
    check_same_exchange(forward, backward)
    if not saved.use.open:
        raise UserError(
            f"backward of a pass of {forward.name}",
            got="one that was released: its rows may be overwritten",
            expected="one that is open",
            do="release a pass after its only backward",
        )
    use = backward.begin(saved.use.table)
    # Scratch until the last of these launches, which are in one stream: so all layers take the same memory.
    dh = torch.empty_like(saved.pre)
    activated = saved.pre.new_empty(forward.receive_rows, experts.hidden)
    gradients = ExpertGradients(
        torch.empty_like(dy),
        torch.empty_like(routing.weight),
        torch.empty_like(experts.w1),
        None if experts.b1 is None else torch.empty_like(experts.b1),
        torch.empty_like(experts.w2),
        None if experts.b2 is None else torch.empty_like(experts.b2),
    )
    launches = _Launch(backward, use, routing, experts, config, dense, backward=True)
    launches.run(
        source=dy, weight_in=experts.w2, bias_in=experts.b2, pre=saved.pre, hidden=dh, weight_out=experts.w1,
        earlier=saved.use, earlier_banks=forward.banks, saved_rows=forward.rows.local,
        activated=activated, dweight_in=gradients.dw2, dbias_in=gradients.db2,
        dweight_out=gradients.dw1, dbias_out=gradients.db1, out=gradients.dx, dweight=gradients.dweight,
    )  # fmt: skip
    backward.release(use)
    return gradients


class _Launch:
    """The launches of one direction: which tasks, then the kernel's many arguments."""

    def __init__(self, exchange, use, routing, experts, config, dense, *, backward: bool) -> None:
        self.exchange, self.use, self.routing, self.experts = exchange, use, routing, experts
        self.config, self.dense, self.backward = config, list(dense), backward
        self.hidden, self.width_in = experts.hidden, experts.w1.shape[2]

    def run(self, *, out: Tensor, **tensors: Tensor | Use | int | None) -> None:
        exchange, config = self.exchange, self.config
        # Once for both launches of a split one: they count the same tiles.
        self.tma = config.tma and self._fit_tma([out, *tensors.values()])
        gemm = config.gemm
        if config.tma and not self.tma:
            gemm = plain_tile(gemm, exchange.dtype)
        self.gemm = gemm = launch_tile(gemm, backward=self.backward, nvshmem=exchange.nvshmem)
        self.columns_in = first_columns(gemm, self.experts.activation, backward=self.backward)
        self.token = self.routing.token_of_row()
        # Float32 that a forward never looks at.
        self.weights = self.row_dots = self.routing.weight
        if self.backward:
            self.row_dots = self.weights.new_empty(
                triton.cdiv(self.hidden, self.columns_in), exchange.receive_rows
            )
            self.weights = self.routing.weight_of_row()
            if exchange.buffers.stage is not None:
                staged = exchange.buffers.stage.weights.local
                rows = min(len(staged), len(self.weights))
                staged[:rows] = self.weights[:rows]
                self.weights = staged
        stage = exchange.buffers.stage
        self.stage = exchange.rows.local if stage is None else stage.results.local
        self.problems, dense_tiles = None, 0
        if self.dense:
            self.problems, dense_tiles = dense_table(self.dense, gemm, exchange.memory.device)
        blocks = triton.cdiv(out.shape[0], config.reduce_tokens)
        first: dict[str, Any] = {
            "put": True,
            "tiles_in": triton.cdiv(self.hidden, self.columns_in),
            "dense_tiles": dense_tiles,
        }
        second: dict[str, Any] = {}
        rest = second if config.split else first
        rest |= {"tiles_out": triton.cdiv(exchange.width, gemm.block_n), "wgrad": self.backward}
        rest["reduce_blocks"] = blocks
        grid = {"programs": config.programs, "comm_programs": config.comm_programs}
        for stages in filter(None, (first, second)):
            self._launch(LaunchShape(**({"put": False} | stages | grid)), out=out, **tensors)

    def _launch(self, shape: LaunchShape, **given: Tensor | Use | int | None) -> None:
        exchange, config, routing, gemm = self.exchange, self.config, self.routing, self.gemm
        # What this launch does not have is never looked at, but must be a pointer of the right type.
        nothing = exchange.rows.local
        tensors = {name: nothing if value is None else value for name, value in given.items()}
        get = lambda name: tensors.get(name, nothing)  # noqa: E731
        earlier = given.get("earlier")
        earlier = earlier if isinstance(earlier, Use) else self.use
        problems = exchange.report if self.problems is None else self.problems
        buffers = exchange.buffers
        stage = buffers.stage or Stage(exchange.rows, buffers.dots, exchange.rows, buffers.dots)
        if self.tma:
            runtime.provide_scratch()
        start = partial(launch, overlap_kernel)
        if config.bodies == "gluon" and self.tma:
            start = partial(launch_gluon, self.use.next_counter())
        start(
            (shape.programs,),
            use_ptr=self.use.words, counter=self.use.next_counter(), earlier_use_ptr=earlier.words,
            table_ptr=self.use.table, report_ptr=exchange.report, rank=exchange.rank,
            max_polls=exchange.max_polls(), limit=ALL_TASKS,
            W=exchange.world, L=exchange.local_experts, D=exchange.width, F=self.hidden, H=self.width_in,
            R=exchange.receive_rows, tiles=exchange.tiles, chunks=exchange.chunks,
            T=routing.expert.shape[0], K=routing.expert.shape[1],
            tiles_in=shape.tiles_in, tiles_out=shape.tiles_out, lag=shape.lag,
            dense_tiles=shape.dense_tiles, num_problems=len(self.dense), reduce_blocks=shape.reduce_blocks,
            programs=shape.programs, comm_programs=shape.comm_programs,
            source_ptr=get("source"), token_ptr=self.token, send_weights_ptr=self.weights,
            put_stage_ptr=stage.rows.local,
            rows_ptr=exchange.rows.local, rows_peers_ptr=exchange.rows.peers,
            row_weights_ptr=exchange.row_weights.local, row_weights_peers_ptr=exchange.row_weights.peers,
            arrived_ptr=exchange.arrived.local, arrived_peers_ptr=exchange.arrived.peers,
            released_ptr=exchange.released.local,
            results_ptr=exchange.results.local, results_peers_ptr=exchange.results.peers,
            dots_ptr=buffers.dots.local, dots_peers_ptr=buffers.dots.peers, spoiled_ptr=buffers.spoiled,
            returned_ptr=exchange.returned.local, returned_peers_ptr=exchange.returned.peers,
            weight_in_ptr=get("weight_in"), bias_in_ptr=get("bias_in"), pre_ptr=get("pre"),
            hidden_ptr=get("hidden"), weight_out_ptr=get("weight_out"), bias_out_ptr=get("bias_out"),
            stage_ptr=self.stage, row_dots_ptr=self.row_dots, dots_stage_ptr=stage.dots.local,
            ready_ptr=self.use.ready, done_ptr=self.use.done,
            saved_rows_ptr=get("saved_rows"), activated_ptr=get("activated"),
            dweight_in_ptr=get("dweight_in"), dbias_in_ptr=get("dbias_in"),
            dweight_out_ptr=get("dweight_out"), dbias_out_ptr=get("dbias_out"),
            out_ptr=get("out"), expert_ptr=routing.expert, row_ptr=routing.row, weight_ptr=routing.weight,
            dweight_ptr=tensors.get("dweight", routing.weight), problems_ptr=problems,
            HAS_PUT=shape.put, HAS_IN=shape.tiles_in > 0, HAS_OUT=shape.tiles_out > 0,
            # Not by how many tokens there are: none today must not mean another variant of the kernel.
            HAS_WGRAD=shape.wgrad, HAS_REDUCE=shape.tiles_out > 0 or shape.reduce_blocks > 0,
            DENSE_KINDS=dense_kinds(self.dense) if shape.dense_tiles else 0,
            BACKWARD=self.backward, ACT=self.experts.activation, HAS_BIAS=self.experts.b1 is not None,
            SAVE_PRE=True, BANKS=exchange.banks,
            EARLIER_BANKS=given.get("earlier_banks", exchange.banks),
            NVSHMEM=exchange.nvshmem, UPCAST=runtime.needs_upcast(exchange.dtype), TMA=self.tma,
            BM=gemm.block_m, BN=gemm.block_n, BN_IN=self.columns_in, BK=gemm.block_k,
            BW=triton.next_power_of_2(exchange.world),
            PUT_ROWS=config.put_rows, PUT_BLOCK=config.put_block,
            BT=config.reduce_tokens, BD=config.reduce_block,
            num_warps=gemm.num_warps, num_stages=gemm.num_stages, maxnreg=most_registers(gemm),
        )  # fmt: skip

    def _fit_tma(self, tensors: Iterable[Tensor | Use | int | None]) -> bool:
        """Descriptors need bases and row distances that are multiples of 16 bytes. Stores rely on it, too."""
        operands = [t for t in tensors if isinstance(t, Tensor)]
        widths = [self.exchange.width, self.hidden]
        for problem in self.dense:
            operands += problem.a, problem.b, problem.c
            widths += problem.a.shape[1], problem.b.shape[1], problem.c.shape[1]
        bytes_each = self.exchange.dtype.itemsize
        return all(t.data_ptr() % 16 == 0 for t in operands) and all(w * bytes_each % 16 == 0 for w in widths)


def dense_kinds(problems: Sequence[DenseGemm]) -> int:
    """The kernel's DENSE_KINDS: none, weight gradients ("tn") only, or all, so that variants stay few."""
    kinds = {problem.kind for problem in problems}
    return sum(1 << KINDS[kind] for kind in (KINDS if kinds - {"tn"} else kinds))


def dense_table(problems: Sequence[DenseGemm], tile: GemmConfig, device: torch.device) -> tuple[Tensor, int]:
    """-> int64 [problems, 8], the rows of the kernel's table, and the number of tiles of all of them.

    Written by a kernel: CUDA graphs cannot capture a copy from memory that may be gone when they run.
    """
    table = torch.empty(len(problems), DENSE_WORDS.value, dtype=torch.int64, device=device)
    tiles = 0
    for i, problem in enumerate(problems):
        with on_device(device):
            write_dense_row_kernel[(1,)](table[i], *problem.row(tiles), num_warps=1)
        rows, columns = problem.c.shape
        tiles += triton.cdiv(rows, tile.block_m) * triton.cdiv(columns, tile.block_n)
    return table, tiles
