"""The expert part of an MoE layer in fused kernels: dispatch, both GEMMs and combine share one launch.

    T  tokens on this rank      E  experts in all
    K  choices per token        W  ranks, L = E / W experts on each
    D  model width              F  hidden width, H = F or 2F (swiglu)

Same mathematics as dispatch -> all_to_all -> grouped_gemm -> expert_activation -> grouped_gemm -> all_to_all
-> combine (the reference), but rows travel by one-sided puts through symmetric memory while GEMM tiles run
(`lancet_kernels.kernels.overlap`). Sizes travel with the signals: nothing waits for the host.

A forward pass keeps the rows that it received in its exchange until its backward; the passes of an exchange
share its room. Layers of one size share the exchanges: a pass takes one that has a place left, and another
one is created only where none has. So there is room for all passes that wait for their backward at once: one
for each layer, or those of one exchange under activation checkpointing. All ranks run the same passes in the
same order, and so take the same exchanges. These are sized for the most tokens: the number of tokens and
their routing may change from step to step and from rank to rank without allocation or agreement.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lancet_kernels.errors import UserError
from lancet_kernels.kernels.config import DTYPES, OverlapConfig, default_overlap_config
from lancet_kernels.kernels.overlap import (
    DenseGemm,
    ExpertGradients,
    Experts,
    Routing,
    moe_backward,
    moe_forward,
    warm_up,
)
from lancet_kernels.kernels.protocol.exchange import Exchange, ResultBuffers
from lancet_kernels.kernels.runtime import check_runs_on
from lancet_kernels.kernels.symmetric import SymmetricMemory, create, virtual_memories
from lancet_kernels.ops.comm.groups import AnyGroups, expert_group_name, group_of, group_size, group_timeout_s
from lancet_kernels.ops.comm.stand_in_group import is_stand_in
from lancet_kernels.ops.comm.waiting import current_layer, enter_layer, waiting
from lancet_kernels.ops.moe.dispatch import send_rows
from lancet_kernels.ops.moe.expert_ops import input_width
from lancet_kernels.ops.moe.fused_passes import ForwardPass, take_pass, ticket_of

_log = logging.getLogger(__name__)

DEFAULT_FACTOR = 1.25
"""Room of a pass, in even shares of the rows, on average over those that wait for their backward."""
ONE_PASS_FACTOR = 8
"""The most rows of one pass, in even shares, by default: the worst case of up to 8 ranks."""
FEW_ROWS = 256
"""Least room of a pass, in rows, by default: few rows are rarely balanced."""
PASSES_MORE = 6
"""Passes of each further exchange: with more, fewer are created, and more room stays unused."""


class _Alone:
    """The group of one rank."""


ALONE = _Alone()
ALONE_TIMEOUT_S = 60.0


class FusedMemory:
    """Symmetric memory of a process group on one device, and what its layers share. Collective to create."""

    # By process group, because a new group may have the name of a destroyed one.
    _of_group: ClassVar[WeakKeyDictionary[object, dict[torch.device, FusedMemory]]] = WeakKeyDictionary()

    def __init__(self, memory: SymmetricMemory) -> None:
        self.memory = memory
        self._pools: dict[tuple, SharedExchanges] = {}

    @classmethod
    def of(cls, group: str, device: torch.device, timeout_s: float) -> FusedMemory:
        """The memory of a group, created on first use, which must be at the same point on every rank."""
        process_group = group_of(group) if group else None
        of_device = cls._of_group.setdefault(process_group or ALONE, {})
        if device not in of_device:
            # A group of one rank has no name, also where there are other ranks.
            alone = process_group is None
            if is_stand_in(process_group):
                raise UserError(
                    "fused launches",
                    got=f"one rank that stands for {group_size(group)}",
                    expected="a process for each rank, since launches put rows into the memory of others",
                    do='use backend="torch" here, or start the ranks',
                )
            of_device[device] = cls(
                virtual_memories(1, device)[0] if alone else create(process_group, device, timeout_s)
            )
        return of_device[device]

    @classmethod
    def reset(cls, process_group: dist.ProcessGroup | None) -> None:
        """Drop the memory of a group (None: of one rank), after a failure, say; without a rendezvous, because
        ranks may have failed at different places."""
        for device, shared in cls._of_group.pop(process_group or ALONE, {}).items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # launches under way end at the latest with their timeouts
            shared.memory.close()

    def pool(self, each_pass: int, **sizes) -> SharedExchanges:
        """State that layers of these sizes share."""
        key = (each_pass, *sorted(sizes.items(), key=str))
        if key not in self._pools:
            self._pools[key] = SharedExchanges(self.memory, f"exchange{len(self._pools)}", each_pass, sizes)
        return self._pools[key]


class SharedExchanges:
    """The exchanges of all layers of one size. Collective to create and to use.

    Args: sizes: arguments of `Exchange`. each_pass: room of a pass, in rows, on average.

    Attributes:
        backward: that of all backwards, which keep nothing in it.
        forward: those of forwards, as many as have been needed.
        warmed_up: the kinds of passes whose kernels all ranks have compiled.
    """

    def __init__(self, memory: SymmetricMemory, name: str, each_pass: int, sizes: dict[str, Any]) -> None:
        self.memory, self.name, self.each_pass, self.sizes = memory, name, each_pass, sizes
        of_rows = {what: sizes[what] for what in ("send_rows", "receive_rows", "width", "dtype")}
        self.buffers = ResultBuffers(memory, f"{name}.buffers", **of_rows)
        self.backward = self._exchange("backward", passes=1)
        self.forward: list[Exchange] = []
        self.warmed_up: set[tuple] = set()

    def _exchange(self, what: str, **more: Any) -> Exchange:
        return Exchange(self.memory, f"{self.name}.{what}", buffers=self.buffers, **self.sizes, **more)

    def for_a_pass(self) -> Exchange:
        """A forward exchange with a place left."""
        for exchange in self.forward:
            if exchange.free_place() is not None:
                return exchange
        passes, room = self.next_size()
        self.forward.append(self._exchange(f"forward{len(self.forward)}", passes=passes, room=room))
        return self.forward[-1]

    def next_size(self) -> tuple[int, int]:
        """Passes and rows of the exchange that is created next.

        Example: rows of at most 800 in a pass, 125 on average: 6 passes with 800 rows, then the same again.
        """
        longest = self.sizes["receive_rows"]
        passes = PASSES_MORE if self.forward else max(2, longest // max(1, self.each_pass))
        return passes, max(longest, passes * self.each_pass)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them, on this rank."""
        return self.buffers.nbytes + sum(exchange.nbytes for exchange in (self.backward, *self.forward))


class LayerMemory(NamedTuple):
    """Memory of the fused layers of one size on this rank.

    Attributes:
        shared: bytes of all of them together, so far.
        while_running: the most bytes more while a pass runs.
        passes: how many may wait for their backward at once.
        room: rows that these may have together. receive_rows: the most of one.
    """

    shared: int
    while_running: int
    passes: int
    room: int
    receive_rows: int

    def __str__(self) -> str:
        shared, more = (f"{size / 2**30:.2f} GiB" for size in self[:2])
        return (
            f"{shared} shared by all layers of this size, for {self.passes} passes that wait for their "
            f"backward with {self.room} rows together, {self.receive_rows} at most in one; {more} more while "
            "one runs"
        )


@dataclass(eq=False, repr=False)
class LayerExchange:
    """A layer's requirements for exchanges, which are created when a pass needs them (collective, like it).

    Args:
        group: name of the process group. local_experts, width, hidden, activation: L, D, F and which.
        max_tokens: the most tokens of any pass on this rank; None: those of the first pass, and a pass with
            more creates larger exchanges, by half or more, which all ranks must do in the same pass (logged
            as a warning); the smaller ones stay.
        receive_factor: room in even shares, the rows that each rank receives if all experts get equally many;
            None: DEFAULT_FACTOR on average over the passes of an exchange, and up to ONE_PASS_FACTOR in one,
            or FEW_ROWS. A pass that needs more raises UserError on every rank.
        timeout_s: limit for a wait for a peer, then CommunicationError; None: that of the group's
            collectives.

    Memory, in elements of the rows' dtype: with H = F, or 2F for swiglu, S = max_tokens * K rows sent, R
    rows received at most in a pass (receive_factor * S, by default 8 * S; never more than the worst case,
    W * max_tokens * min(K, L)), A room for rows in an exchange (R, or receive_factor, by default 1.25, times
    S for each of its passes, if that is more)

        of each exchange         A * (D + H)      rows received, values before the activation, to the backward
        of all layers together   (R + S) * D      rows of dy received, results that came back
        while a launch runs      R * F, in a backward R * (H + F)

    besides 4 bytes for each row received, 28 for each choice (of the routing) and some words for each tile.
    The first exchange has room for 2 passes or more, each further one for 6; it is created when more passes
    wait for their backward at once. Under activation checkpointing the first is enough. A pass uses as much
    of its exchange as rows came (`kernels.protocol.schedule` says where). It keeps no rows to send.

    Sent by a rank, in elements: (S + R) * D in each direction, x to the experts and their results back.

    Example: Qwen3-30B-A3B on 8 GPUs (D 2048, F 768, K 8), bfloat16, 8,192 tokens: S = 65,536, R = A = 8 S.
    An exchange is 3.8 GB, for 6 passes on average; dy and results 2.4 GB, and 2.4 GB more while a backward
    runs: 8.6 GB under activation checkpointing, 35 GB for 48 layers without; balanced rows of these alone are
    22.5 GB. With receive_factor=1.25 it is 2.2 GB, and 30 GB, and one pass may bring 1.25 S.
    """

    group: str
    local_experts: int
    width: int
    hidden: int
    activation: str
    _: KW_ONLY
    max_tokens: int | None = None
    receive_factor: float | None = None
    timeout_s: float | None = None
    _shared: dict[tuple, tuple[FusedMemory, SharedExchanges, OverlapConfig]] = field(
        default_factory=dict, init=False
    )

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The ranks that share the layer's experts; None: only this rank."""
        return group_of(self.group) if self.group else None

    def of(self, num_choices: int, capacity: int, like: Tensor) -> tuple[SharedExchanges, OverlapConfig]:
        """The exchanges and the configuration for rows like `like` [T, D].

        capacity: the most rows that any rank sends to one expert, with as many tokens.
        """
        timeout_s = self.timeout_s
        if timeout_s is None:
            timeout_s = ALONE_TIMEOUT_S if self.process_group is None else group_timeout_s(self.process_group)
        memory = FusedMemory.of(self.group, like.device, timeout_s)
        num_tokens = like.shape[0]
        key = num_choices, like.dtype, like.device
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            raise UserError(
                f"tokens of a pass of {current_layer() or 'a fused layer'}",
                got=num_tokens,
                expected=f"at most {self.max_tokens} (max_tokens)",
                do="declare more when the layer is made",
            )
        before, least = self._shared.get(key), self.max_tokens or 1
        if before is not None and before[0] is memory:
            if num_tokens * num_choices <= before[1].sizes["send_rows"]:
                return before[1:]
            most = before[1].sizes["send_rows"] // num_choices
            _log.warning(
                "%s: %d tokens, more than the %d before: larger exchanges are created, which all ranks must "
                "do in this pass; set max_tokens to create them once",
                current_layer() or "a fused layer", num_tokens, most,
            )  # fmt: skip
            # The smaller ones stay: growing by half keeps them few.
            least = most + most // 2
        config = default_overlap_config(
            self.width, self.hidden, self.activation, like.dtype, like.device, far=memory.memory.far
        )
        send_rows, worst = self._most_rows(memory.memory, num_tokens, num_choices, capacity, least)
        receive_rows, each_pass = self._room(send_rows, worst)
        with self._enough_memory(send_rows, receive_rows, like.dtype):
            shared = memory.pool(
                each_pass, send_rows=send_rows, receive_rows=receive_rows, width=self.width, dtype=like.dtype,
                local_experts=self.local_experts, chunk_rows=config.gemm.block_m, timeout_s=timeout_s,
            )  # fmt: skip
        self._shared[key] = memory, shared, config
        return shared, config

    def forward_exchange(self, shared: SharedExchanges) -> Exchange:
        """The exchange of the next forward pass. Raises: UserError where memory for it does not fit."""
        sizes = shared.sizes
        with self._enough_memory(sizes["send_rows"], shared.next_size()[1], sizes["dtype"]):
            exchange = shared.for_a_pass()
            exchange.kept(input_width(self.activation, self.hidden))
            return exchange

    @contextmanager
    def _enough_memory(self, send_rows: int, room: int, dtype: torch.dtype) -> Iterator[None]:
        """Say what to set where memory does not fit."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            size = room * (self.width + input_width(self.activation, self.hidden)) * dtype.itemsize
            raise UserError(
                f"memory for the rows that {current_layer() or 'a fused layer'} receives",
                got=f"room for {room} rows more, {size / 2**30:.2f} GiB",
                expected="what fits on the GPU",
                do=f"set receive_factor (1.25 allots {math.ceil(1.25 * send_rows)} rows a pass) or "
                "max_tokens, or checkpoint activations, so that fewer passes keep rows",
            ) from error

    def _most_rows(
        self, memory: SymmetricMemory, num_tokens: int, num_choices: int, capacity: int, least: int
    ) -> tuple[int, int]:
        """How many rows any rank may send, and receive at worst, with `least` tokens or more. Collective:
        ranks may differ.

        Example: 4 ranks, 2 experts each, 100 tokens, top-3, dropless: 300 and 4 * 100 * 2 = 800.
        """
        tokens = memory.largest(max(num_tokens, least))
        # A capacity grows with the tokens, and is that of the rank with the most of them; without tokens any.
        capacity = memory.largest(-(-capacity * tokens // num_tokens) if num_tokens else 0) or tokens
        return tokens * num_choices, self._worst(memory.world, tokens, num_choices, capacity)

    def _worst(self, world: int, tokens: int, num_choices: int, capacity: int) -> int:
        return world * min(tokens * num_choices, self.local_experts * min(capacity, tokens))

    def _room(self, send_rows: int, worst: int) -> tuple[int, int]:
        """Rows received: room for so many in one pass, and on average. Of `_most_rows`.

        Example: 300 and 800: 800 and 375; 10 and 20: 20 and 20; with receive_factor = 1.5: 450 and 450, and
        15 and 15.
        """
        if self.receive_factor is not None:
            each = min(worst, math.ceil(self.receive_factor * send_rows))
            return each, each
        each = min(worst, max(FEW_ROWS, math.ceil(DEFAULT_FACTOR * send_rows)))
        return min(worst, max(FEW_ROWS, ONE_PASS_FACTOR * send_rows)), each

    def kept_bytes(self, like: Tensor, num_choices: int, capacity: int) -> int:
        """Bytes of a pass from forward to backward, on average: rows, and values before the activation.

        Args: as of `of`, with as many tokens on every rank, or max_tokens.
        """
        tokens = max(like.shape[0], self.max_tokens or 0)
        capacity = -(-capacity * tokens // max(like.shape[0], 1))
        worst = self._worst(group_size(self.group), tokens, num_choices, capacity)
        _, each_pass = self._room(tokens * num_choices, worst)
        columns = input_width(self.activation, self.hidden) + self.width
        return each_pass * columns * like.element_size()

    def memory(self) -> LayerMemory:
        """Raises UserError before the first pass, whose tokens determine the sizes."""
        if not self._shared:
            raise UserError(
                "memory of a fused layer",
                got="no pass yet",
                expected="one",
                do="run a forward first: sizes follow from its tokens",
            )
        _, shared, _ = list(self._shared.values())[-1]
        received = shared.sizes["receive_rows"]
        columns = input_width(self.activation, self.hidden) + self.hidden
        return LayerMemory(
            shared.nbytes,
            received * columns * shared.sizes["dtype"].itemsize,
            sum(exchange.passes for exchange in shared.forward),
            sum(exchange.room for exchange in shared.forward),
            received,
        )

    def watch(self) -> None:
        """Raise CommunicationError if a wait in these exchanges has timed out; does not wait itself."""
        for _, shared, _ in self._shared.values():
            for exchange in (shared.backward, *shared.forward):
                exchange.watch()

    def __deepcopy__(self, memo: dict) -> LayerExchange:
        # A copied layer creates its own exchanges when it first runs.
        return replace(self)


def reset_exchanges(groups: AnyGroups | None = None) -> None:
    """Let fused layers of a group work again after a CommunicationError. Collective, and waits for nobody.

    All ranks call it once they are done with the failed step, and then run the next step together: exchanges
    are created anew. Passes that wait for their backward are lost: calling their backward raises UserError.

    Args: groups: those of the layers; None: all ranks.
    """
    name = expert_group_name(groups)
    FusedMemory.reset(group_of(name) if name else None)


def fused_experts(
    x_TD: Tensor,
    expert_TK: Tensor,
    slot_TK: Tensor,
    weight_TK: Tensor,
    count_WL: Tensor,
    capacity: int,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    layer: LayerExchange,
) -> Tensor:
    """-> [T, D]; differentiable in x, the weights of the choices, and the experts' parameters.

    Args: as for the ops of the reference; count_WL: from `kept_counts`.
    Raises: UserError for input that the kernels do not support, CommunicationError if a peer did not take
    part.
    """
    check_fused(x_TD)
    return _FusedExperts.apply(x_TD, expert_TK, slot_TK, weight_TK, count_WL, capacity, w1, b1, w2, b2, layer)


def check_fused(x_TD: Tensor) -> None:
    """Raise UserError for a dtype or a device that fused kernels do not support."""
    if x_TD.dtype not in DTYPES:
        raise UserError(
            "dtype of an MoE layer with backend='fused'",
            got=x_TD.dtype,
            expected="float32, float16 or bfloat16",
            do="use backend='torch' for float64",
        )
    check_runs_on("input of an MoE layer with backend='fused'", x_TD.device)


def run_forward(
    x: Tensor,
    expert: Tensor,
    row: Tensor,
    weight: Tensor,
    count_WL: Tensor,
    capacity: int,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    layer: LayerExchange,
) -> tuple[Tensor, ForwardPass]:
    """A forward pass. -> out [T, D], and the pass, whose bank must still be released."""
    with waiting("fused_experts", layer.process_group, current_layer()):
        shared, config = layer.of(expert.shape[1], capacity, x)
        forward, backward = layer.forward_exchange(shared), shared.backward
        x = x.contiguous()
        count = count_WL.reshape(-1).contiguous()
        routing = Routing.of(expert.contiguous(), row, weight.float().contiguous(), count)
        b1, b2 = (None if b is None else b.contiguous() for b in (b1, b2))
        experts = Experts(w1.contiguous(), b1, w2.contiguous(), b2, layer.activation)
        kind = layer.hidden, layer.activation, b1 is None, config
        if kind not in shared.warmed_up:
            warm_up(forward, backward, x, routing, experts, config)
            shared.warmed_up.add(kind)
        out, saved = moe_forward(forward, x, routing, experts, config)
        forward.watch(current_layer())
    return out, ForwardPass((forward, backward), saved, routing, experts, config)


def run_backward(
    forward_pass: ForwardPass, dy: Tensor, *, dense: Sequence[DenseGemm] = ()
) -> ExpertGradients:
    """The backward of a pass, which it ends."""
    forward, backward = forward_pass.exchanges
    gradients = moe_backward(
        forward, forward_pass.saved, backward, dy.contiguous(), forward_pass.routing, forward_pass.experts,
        forward_pass.config, dense=dense,
    )  # fmt: skip
    forward.release(forward_pass.saved.opened)
    backward.watch(current_layer())
    return gradients


class _FusedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, expert, slot, weight, count_WL, capacity, w1, b1, w2, b2, layer):
        row = send_rows(expert, slot, count_WL)
        out, forward_pass = run_forward(x, expert, row, weight, count_WL, capacity, w1, b1, w2, b2, layer)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(ticket_of(forward_pass))
            ctx.weight_dtype, ctx.group, ctx.layer = weight.dtype, layer.process_group, current_layer()
        else:
            forward_pass.exchanges[0].release(forward_pass.saved.opened)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (ticket,) = ctx.saved_tensors
        forward_pass = take_pass(ticket)
        enter_layer(ctx.layer)
        with waiting("fused_experts_backward", ctx.group, ctx.layer):
            gradients = run_backward(forward_pass, dy)
        dweight = gradients.dweight.to(ctx.weight_dtype)
        return (
            gradients.dx, None, None, dweight, None, None, gradients.dw1, gradients.db1, gradients.dw2,
            gradients.db2, None,
        )  # fmt: skip
