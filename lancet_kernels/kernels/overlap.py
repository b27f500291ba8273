"""The expert part of an MoE layer, dispatch to combine, forward and backward, in fused launches.

    T  tokens here     E  experts in all, W PEs with L = E / W each    K  choices per token    C  capacity
    D  model width     F  hidden width                                 H  F, or 2F for swiglu

Forward: put rows -> act(x @ w1 + b1) -> @ w2 + b2, put back -> weighted sum. Backward: put weighted dy -> dh
= (dy @ w2^T) act' -> dx = dh @ w1^T, put back -> sum; dW2, dW1 and their biases fill the way back. By default
each direction is one launch; `split` makes it two (dispatch+GEMM, GEMM+combine). Independent GEMMs (dW of
another layer, say) can ride along in any of them: `DenseGemm`.

The launchers do not synchronise with the device. A wait that ran out of time is in the exchange's report;
`Exchange.check()` raises it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.kernels import runtime
from lancet_kernels.kernels.exchange import Exchange, Use
from lancet_kernels.kernels.gemm_config import GemmConfig
from lancet_kernels.kernels.nvshmem_launch import launch
from lancet_kernels.kernels.overlap_checks import check_pass, check_same_exchange
from lancet_kernels.kernels.overlap_config import OverlapConfig, launch_tile, most_registers, plain_tile
from lancet_kernels.kernels.overlap_data import (
    DENSE_KINDS,
    DenseGemm,
    ExpertGradients,
    Experts,
    Routing,
    SavedPass,
)
from lancet_kernels.kernels.overlap_kernel import overlap_kernel
from lancet_kernels.kernels.overlap_tiles import DENSE_WORDS, write_dense_row_kernel
from lancet_kernels.kernels.tasks import LaunchShape, build_tasks
from lancet_kernels.kernels.tuning import tuned


def default_overlap_config(
    width: int, hidden: int, activation: str, dtype: torch.dtype, device: torch.device, pes_here: int = 1
) -> OverlapConfig:
    """What was tuned for the device, else a sensible choice. Args: pes_here: PEs that share the device.

    In the interpreter small sizes get small tiles, so that they still have several; large ones get large
    tiles, because there a tile costs the same milliseconds whatever its size.
    """
    if device.type != "cuda" and max(width, hidden) <= 64:
        tile = GemmConfig(16, 32, 16, 1, 1)
        return OverlapConfig(tile, put_rows=4, put_block=32, reduce_tokens=4, reduce_block=32)
    if device.type != "cuda":
        tile = GemmConfig(32, 256, 128, 1, 1)
        return OverlapConfig(tile, put_rows=32, put_block=256, reduce_tokens=32, reduce_block=256)
    found = tuned("overlap", (width, hidden, activation, pes_here), dtype, device)
    if found is not None:
        return found
    properties = torch.cuda.get_device_properties(device)
    arch = 10 * properties.major + properties.minor
    programs = max(1, properties.multi_processor_count // pes_here)
    return OverlapConfig.for_gpu(width, hidden, activation, dtype, arch, programs)


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
    world, local = exchange.world, exchange.local_experts
    shape = (world, local, exchange.capacity)
    hidden = x.new_empty(*shape, experts.hidden)
    pre = x.new_empty(*shape, experts.w1.shape[2])
    out = torch.empty_like(x)
    launches = _Launch(exchange, use, routing, experts, config, dense, backward=False)
    launches.run(
        source=x, weight_in=experts.w1, bias_in=experts.b1, pre=pre, hidden=hidden,
        weight_out=experts.w2, bias_out=experts.b2, out=out,
    )  # fmt: skip
    return out, SavedPass(use, pre, hidden)


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
    use = backward.begin()
    scale = routing.weight_of_slot()
    dh = torch.empty_like(saved.pre)
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
        source=dy, scale=scale, weight_in=experts.w2, pre=saved.pre, hidden=dh, weight_out=experts.w1,
        earlier=saved.use, forward_banks=forward.banks, saved_rows=forward.rows.local,
        saved_hidden=saved.hidden, dweight_in=gradients.dw2, dbias_in=gradients.db2,
        dweight_out=gradients.dw1, dbias_out=gradients.db1, out=gradients.dx,
        saved_results=forward.results.local, dweight=gradients.dweight,
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
        self.problems = dense_table(self.dense, self.exchange.memory.device) if self.dense else None
        exchange, config = self.exchange, self.config
        # Once for both launches of a split one: they count the same tiles.
        self.tma = config.tma and self._fit_tma([out, *tensors.values()])
        gemm = config.gemm
        if config.tma and not self.tma:
            gemm = plain_tile(gemm, exchange.dtype)
        self.gemm = gemm = launch_tile(gemm, backward=self.backward, nvshmem=exchange.nvshmem)
        tiles = {
            "tiles_in": -(-self.hidden // gemm.block_n),
            "tiles_out": -(-exchange.width // gemm.block_n),
        }
        blocks = -(-out.shape[0] // config.reduce_tokens)
        wgrads: tuple[tuple[int, int], ...] = ()
        dweight_blocks = blocks if self.backward else 0
        if self.backward:
            wgrads = self._grid(self.hidden, exchange.width), self._grid(exchange.width, self.width_in)
        problems = tuple(self._grid(*gemm.c.shape) for gemm in self.dense)
        first: dict[str, Any]
        second: dict[str, Any]
        first, second = {"put": True, "tiles_in": tiles["tiles_in"], "dense": problems}, {}
        first["dweight_blocks"] = dweight_blocks
        rest = first if not config.split else second
        rest |= {"tiles_out": tiles["tiles_out"], "wgrads": wgrads, "reduce_blocks": blocks}
        for stages in filter(None, (first, second)):
            self._launch(LaunchShape(**({"put": False} | stages), **self._shape()), out=out, **tensors)

    def _grid(self, rows: int, columns: int) -> tuple[int, int]:
        return -(-rows // self.gemm.block_m), -(-columns // self.gemm.block_n)

    def _shape(self) -> dict[str, Any]:
        exchange = self.exchange
        return {
            "world": exchange.world,
            "rank": exchange.rank,
            "local_experts": exchange.local_experts,
            "chunks": exchange.chunks,
            "programs": self.config.programs,
            "comm_programs": self.config.comm_programs,
        }

    def _launch(self, shape: LaunchShape, **given: Tensor | Use | int | None) -> None:
        exchange, config, routing, gemm = self.exchange, self.config, self.routing, self.gemm
        tasks = device_tasks(shape, exchange.memory.device)
        # What this launch does not have is never looked at, but must be a pointer of the right type.
        nothing = exchange.rows.local
        tensors = {name: nothing if value is None else value for name, value in given.items()}
        get = lambda name: tensors.get(name, nothing)  # noqa: E731
        earlier = given.get("earlier")
        earlier = earlier if isinstance(earlier, Use) else self.use
        words = exchange.report if self.problems is None else self.problems
        put_stage, stage = (nothing, nothing) if exchange.stage is None else exchange.stage.local
        if self.tma:
            runtime.provide_scratch()
        launch(
            overlap_kernel, (config.programs,),
            tasks, 0 if runtime.without_tasks else tasks.shape[0], self.use.words, self.use.next_counter(),
            earlier.words, exchange.report, exchange.rank, exchange.max_polls(),
            exchange.world, exchange.local_experts, exchange.capacity, exchange.width, self.hidden,
            self.width_in, exchange.chunks, routing.expert.shape[0], routing.expert.shape[1],
            get("source"), routing.token, tensors.get("scale", routing.weight), routing.count, put_stage,
            exchange.rows.local, exchange.rows.peers, exchange.arrived.local, exchange.arrived.peers,
            exchange.released.local, exchange.results.local, exchange.results.peers,
            exchange.returned.local, exchange.returned.peers,
            get("weight_in"), get("bias_in"), get("pre"), get("hidden"), get("weight_out"), get("bias_out"),
            stage, self.use.ready, self.use.done,
            get("saved_rows"), get("saved_hidden"), get("dweight_in"), get("dbias_in"), get("dweight_out"),
            get("dbias_out"),
            get("out"), routing.expert, routing.slot, routing.weight, get("saved_results"),
            tensors.get("dweight", routing.weight), words,
            None if exchange.wire is None else exchange.wire.words,
            HAS_PUT=shape.put, HAS_IN=shape.tiles_in > 0, HAS_OUT=shape.tiles_out > 0,
            # Not by how many tokens there are: none today must not mean another variant of the kernel.
            HAS_WGRAD=bool(shape.wgrads), HAS_REDUCE=shape.tiles_out > 0 or shape.reduce_blocks > 0,
            HAS_DWEIGHT=self.backward and (shape.put or shape.dweight_blocks > 0),
            DENSE_KINDS=dense_kinds(self.dense) if shape.dense else 0,
            BACKWARD=self.backward, ACT=self.experts.activation, HAS_BIAS=self.experts.b1 is not None,
            SAVE_PRE=True, SCALED="scale" in given, WEIGHTED=not self.backward, BANKS=exchange.banks,
            EARLIER_BANKS=given.get("forward_banks", exchange.banks),
            NVSHMEM=exchange.nvshmem, UPCAST=runtime.needs_upcast(exchange.dtype), TMA=self.tma,
            BM=gemm.block_m, BN=gemm.block_n, BK=gemm.block_k, PUT_ROWS=config.put_rows,
            PUT_BLOCK=config.put_block, BT=config.reduce_tokens, BD=config.reduce_block,
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


# More than a measurement launches: what is made again in the middle of one waits for the device.
@functools.lru_cache(maxsize=1024)
def _device_tasks(shape: LaunchShape, device: torch.device) -> Tensor:
    return torch.from_numpy(build_tasks(shape)).to(device)


_captured_tasks: dict[tuple[LaunchShape, torch.device], Tensor] = {}
"""Task lists that CUDA graphs hold the addresses of: kept, whatever the cache forgets."""


def device_tasks(shape: LaunchShape, device: torch.device) -> Tensor:
    """The task list on the device; made once for each shape, with a copy that waits for the device."""
    tasks = _device_tasks(shape, device)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured_tasks[shape, device] = tasks
    return tasks


def dense_kinds(problems: Sequence[DenseGemm]) -> int:
    """The kernel's DENSE_KINDS: none, weight gradients ("tn") only, or all, so that variants stay few."""
    kinds = {problem.kind for problem in problems}
    return sum(1 << DENSE_KINDS[kind] for kind in (DENSE_KINDS if kinds - {"tn"} else kinds))


def dense_table(problems: Sequence[DenseGemm], device: torch.device) -> Tensor:
    """int64 [problems, 8]: the rows of the kernel's table.

    Written by a kernel: CUDA graphs cannot capture a copy from memory that may be gone when they run.
    """
    table = torch.empty(len(problems), DENSE_WORDS.value, dtype=torch.int64, device=device)
    for i, problem in enumerate(problems):
        write_dense_row_kernel[(1,)](table[i], *problem.row(), num_warps=1)
    return table
