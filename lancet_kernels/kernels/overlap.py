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
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.kernels import runtime
from lancet_kernels.kernels.activation_names import check_activation
from lancet_kernels.kernels.exchange import Exchange, Use
from lancet_kernels.kernels.gemm_config import GemmConfig
from lancet_kernels.kernels.nvshmem_launch import launch
from lancet_kernels.kernels.overlap_checks import (
    check_dense,
    check_routing,
    check_same_exchange,
    check_tensor,
)
from lancet_kernels.kernels.overlap_kernel import overlap_kernel
from lancet_kernels.kernels.overlap_tiles import DENSE_WORDS, NN, NT, TN, write_dense_row_kernel
from lancet_kernels.kernels.tasks import LaunchShape, build_tasks, check_comm_programs
from lancet_kernels.kernels.tuning import tuned

DENSE_KINDS = {"nn": NN.value, "nt": NT.value, "tn": TN.value}


@dataclass(frozen=True)
class OverlapConfig:
    """How the launches are cut.

    Attributes:
        gemm: tile of all GEMMs in the launch; its block_m is the chunk of rows that one signal covers.
        put_rows, put_block: rows and elements of a row that one put step copies.
        reduce_tokens, reduce_block: tokens and elements of a row that one reduction step adds.
        programs: size of the grid; at most what the GPU holds at once, shared by all PEs on it.
        comm_programs: how many of them put while the rest has tiles that need not wait.
        split: two launches per direction instead of one.
        tma: load operands through tensor descriptors, in launches whose operands are all aligned for it.
    """

    gemm: GemmConfig
    put_rows: int = 8
    put_block: int = 512
    reduce_tokens: int = 8
    reduce_block: int = 256
    programs: int = 1
    comm_programs: int = 1
    split: bool = False
    tma: bool = False

    def __post_init__(self) -> None:
        blocks = self.put_rows, self.put_block, self.reduce_tokens, self.reduce_block
        if any(b < 1 or b & (b - 1) for b in blocks):
            raise UserError(
                "put_rows, put_block, reduce_tokens, reduce_block",
                got=blocks,
                expected="powers of 2",
                do="round them up",
            )
        check_comm_programs(self.comm_programs, self.programs)

    @classmethod
    def default(
        cls,
        width: int,
        hidden: int,
        activation: str,
        dtype: torch.dtype,
        device: torch.device,
        pes_here: int = 1,
    ) -> OverlapConfig:
        """What was tuned for the device, else a sensible choice.

        In the interpreter small sizes get small tiles, so that they still have several; large ones get large
        tiles, because there a tile costs the same milliseconds whatever its size.
        """
        if device.type != "cuda" and max(width, hidden) <= 64:
            tile = GemmConfig(16, 32, 16, 1, 1)
            return cls(tile, put_rows=4, put_block=32, reduce_tokens=4, reduce_block=32)
        if device.type != "cuda":
            tile = GemmConfig(32, 256, 128, 1, 1)
            return cls(tile, put_rows=32, put_block=256, reduce_tokens=32, reduce_block=256)
        found = tuned("overlap", (width, hidden, activation, pes_here), dtype, device)
        if found is not None:
            return found
        properties = torch.cuda.get_device_properties(device)
        arch = 10 * properties.major + properties.minor
        programs = max(1, properties.multi_processor_count // pes_here)
        return cls.for_gpu(width, hidden, activation, dtype, arch, programs)

    @classmethod
    def for_gpu(
        cls, width: int, hidden: int, activation: str, dtype: torch.dtype, arch: int, programs: int
    ) -> OverlapConfig:
        """The heuristic default for compute capability `arch` and a grid of `programs`."""
        aligned = width * dtype.itemsize % 16 == 0 and hidden * dtype.itemsize % 16 == 0
        tile = overlap_tile(activation, dtype, arch)
        return cls(
            tile if aligned else plain_tile(tile, dtype),
            programs=programs,
            comm_programs=max(1, programs // 8),
            tma=arch >= 90 and aligned,
        )


def overlap_tile(activation: str, dtype: torch.dtype, arch: int) -> GemmConfig:
    """The tile that fits beside everything else in the kernel without spilling (compiled 2026-11-21).

    On sm_90 128x256 and, for swiglu's two accumulators, 128x128 spill 24 to 40 bytes in the fused kernel. On
    sm_80, which loads operands through registers, 128x64 with 8 warps spills 16 bytes once weight gradients
    of other layers ride along; float32 with 32 columns a step spills some 450, and 64x64 16 bytes on sm_90
    (Triton 3.6).
    """
    if dtype.itemsize == 4:
        return GemmConfig(64, 32, 16, 8, 2)
    if arch >= 90:
        return GemmConfig(128, 64 if activation == "swiglu" else 128, 64, 8, 4)
    return GemmConfig(64, 64, 32, 8, 4)


def plain_tile(tile: GemmConfig, dtype: torch.dtype) -> GemmConfig:
    """What `tile`, one for tensor descriptors, becomes where not all operands are aligned for them.

    Plain loads need registers for addresses: 128x128x64 with 4 stages spills 1104 bytes in the forward and
    1724 in the backward with independent GEMMs (bfloat16, sm_90, Triton 3.6, compiled 2026-11-21); this does
    not. (64 columns do, 416 bytes, on sm_100 with Triton 3.9.) Spills are in memory that the driver grows at
    a launch, for which it waits until the device is idle: never, if a peer there waits for that launch.
    """
    if dtype.itemsize == 4:
        return replace(tile, num_stages=1)
    return replace(
        tile,
        block_n=min(tile.block_n, 32),
        block_k=min(tile.block_k, 32),
        num_stages=min(tile.num_stages, 3),
    )


def launch_tile(tile: GemmConfig, *, backward: bool, nvshmem: bool) -> GemmConfig:
    """The tile of one launch of a configuration with `tile`; its block_m stays, being the chunk of a signal.

    NVSHMEM's functions need registers, too: beside the backward's tasks, tiles of 128 columns spill 4 bytes
    on sm_90 (Triton 3.6) and 88 to 104 on sm_100 (3.9; compiled 2026-11-21).
    """
    return replace(tile, block_n=min(tile.block_n, 64)) if backward and nvshmem else tile


def most_registers(tile: GemmConfig) -> int:
    """Registers of a thread if a program has an SM's to itself, as in a persistent launch.

    Said aloud, because ptxas would rather spill (72 bytes, sm_80 forward) to fit two programs.
    """
    return min(255, 65536 // (32 * tile.num_warps))


@dataclass(frozen=True)
class Routing:
    """Where the tokens of this PE go (a gate's decision and its inverse).

    Attributes:
        expert, slot: int64 [T, K]; slot >= C: dropped. weight: float32 [T, K].
        token, choice: int32 [E, C], which token sits in each slot, by which of its choices.
        count: int64 [E], how many slots are taken: the first ones. Beyond them token and choice mean nothing.
    """

    expert: Tensor
    slot: Tensor
    weight: Tensor
    token: Tensor
    choice: Tensor
    count: Tensor

    def weight_of_slot(self) -> Tensor:
        """float32 [E, C]: the weight of the choice that sits in each slot; anything where none does."""
        if self.weight.numel() == 0:
            return self.weight.new_zeros(self.token.shape)
        index = self.token.long() * self.weight.shape[1] + self.choice
        return self.weight.reshape(-1)[index.clamp_(0, self.weight.numel() - 1)]


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
    """c = a @ b ("nn"), a @ b^T ("nt") or a^T @ b ("tn"); contiguous, of the launch's dtype."""

    kind: str
    a: Tensor
    b: Tensor
    c: Tensor

    def row(self) -> list[int]:
        """Its row in the kernel's table: kind, a, b, c, M, N, K."""
        contraction = self.a.shape[0] if self.kind == "tn" else self.a.shape[1]
        pointers = [t.data_ptr() for t in (self.a, self.b, self.c)]
        return [DENSE_KINDS[self.kind], *pointers, *self.c.shape, contraction]


@dataclass
class SavedPass:
    """What the backward needs of a forward pass: its use of the exchange, the value before the activation
    [W, L, C, H] and after it [W, L, C, F]. The rows are still in the exchange."""

    use: Use
    pre: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class ExpertGradients:
    """dx [T, D], of this PE's tokens; dweight float32 [T, K]; the others like the experts' parameters."""

    dx: Tensor
    dweight: Tensor
    dw1: Tensor
    db1: Tensor | None
    dw2: Tensor
    db2: Tensor | None


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
        first, second = {"put": True, "tiles_in": tiles["tiles_in"], "dense": problems}, {}
        first["dweight_blocks"] = dweight_blocks
        rest = first if not config.split else second
        rest |= {"tiles_out": tiles["tiles_out"], "wgrads": wgrads, "reduce_blocks": blocks}
        for stages in filter(None, (first, second)):
            self._launch(LaunchShape(**({"put": False} | stages), **self._shape()), out=out, **tensors)

    def _grid(self, rows: int, columns: int) -> tuple[int, int]:
        return -(-rows // self.gemm.block_m), -(-columns // self.gemm.block_n)

    def _shape(self) -> dict[str, int]:
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
        earlier = given.get("earlier") or self.use
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


def check_pass(
    exchange: Exchange,
    x: Tensor,
    routing: Routing,
    experts: Experts,
    config: OverlapConfig,
    dense: Sequence[DenseGemm] = (),
) -> None:
    """Raise UserError unless a pass with these can run: before anything is sent, so no peer waits."""
    experts_in_all = exchange.world * exchange.local_experts
    num_tokens, num_choices = x.shape[0], routing.expert.shape[-1]
    local, width, hidden = exchange.local_experts, exchange.width, experts.hidden
    width_in = 2 * hidden if experts.activation == "swiglu" else hidden
    runtime.check_device("input of the fused experts", x)
    check_activation(experts.activation)
    checks = (
        ("x", x, (num_tokens, width), exchange.dtype),
        ("expert", routing.expert, (num_tokens, num_choices), torch.int64),
        ("slot", routing.slot, (num_tokens, num_choices), torch.int64),
        ("weight", routing.weight, (num_tokens, num_choices), torch.float32),
        ("token", routing.token, (experts_in_all, exchange.capacity), torch.int32),
        ("choice", routing.choice, (experts_in_all, exchange.capacity), torch.int32),
        ("count", routing.count, (experts_in_all,), torch.int64),
        ("w1", experts.w1, (local, width, width_in), exchange.dtype),
        ("w2", experts.w2, (local, hidden, width), exchange.dtype),
        ("b1", experts.b1, (local, width_in), exchange.dtype),
        ("b2", experts.b2, (local, width), exchange.dtype),
    )
    for name, tensor, shape, dtype in checks:
        if tensor is not None:
            check_tensor(f"{name} of the fused experts", tensor, shape, dtype, x)
    check_routing(routing)
    check_dense(dense, x)
    if (experts.b1 is None) != (experts.b2 is None):
        raise UserError("biases", got="one of b1 and b2", expected="both or neither", do="give zeros")
    if config.gemm.block_m != exchange.chunk_rows:
        raise UserError(
            "config.gemm.block_m",
            got=config.gemm.block_m,
            expected=f"{exchange.chunk_rows} (rows per signal of {exchange.name})",
            do="make the exchange with chunk_rows=config.gemm.block_m",
        )
