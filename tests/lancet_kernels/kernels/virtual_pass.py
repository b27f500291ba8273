"""A case of `overlap_cases` on virtual PEs: data on the device, one pass, and how far off its answers are."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from overlap_cases import Answer, Case, experts_of, reference, routing_of, tokens_of
from torch import Tensor

from lancet_kernels.kernels.exchange import Exchange
from lancet_kernels.kernels.overlap import (
    Experts,
    OverlapConfig,
    Routing,
    SavedPass,
    moe_backward,
    moe_forward,
)
from lancet_kernels.kernels.virtual_pes import VirtualPes


@dataclass
class Data:
    """What one PE is given; the addresses stay, the values change."""

    x: Tensor
    dy: Tensor
    routing: Routing
    experts: Experts

    def tensors(self) -> list[Tensor]:
        held = [self.x, self.dy, *vars(self.routing).values(), *vars(self.experts).values()]
        return [t for t in held if isinstance(t, Tensor)]


def data_of(case: Case, rank: int) -> Data:
    return Data(*tokens_of(case, rank), routing_of(case, rank), experts_of(case, rank))


class VirtualPass:
    """Forward and backward of a case on all its PEs. `split`: two launches per direction."""

    def __init__(
        self, case: Case, device: torch.device, *, split: bool = False, timeout_s: float = 20.0
    ) -> None:
        self.case = case
        self.pes = VirtualPes(case.world, device)
        default = OverlapConfig.default(
            case.width, case.hidden, case.activation, case.dtype, device, pes_here=case.world
        )
        self.config = replace(default, split=split)
        self.forwards, self.backwards = (
            [
                Exchange(
                    memory,
                    name,
                    local_experts=case.local,
                    capacity=case.capacity,
                    width=case.width,
                    dtype=case.dtype,
                    chunk_rows=self.config.gemm.block_m,
                    timeout_s=timeout_s,
                )
                for memory in self.pes.memories
            ]
            for name in ("forward", "backward")
        )
        self.data = [to(data_of(case, rank), device) for rank in range(case.world)]

    def load(self, seed: int) -> list[Answer]:
        """Other values at the same addresses. -> the answers that belong to them."""
        case = replace(self.case, seed=seed)
        for rank, held in enumerate(self.data):
            for mine, new in zip(held.tensors(), data_of(case, rank).tensors(), strict=True):
                mine.copy_(new)
        return reference(case)

    def forward(self, rank: int) -> tuple[Tensor, SavedPass]:
        data = self.data[rank]
        return moe_forward(self.forwards[rank], data.x, data.routing, data.experts, self.config)

    def play(self, rank: int) -> Answer:
        """One whole pass of one PE; asks the device for nothing."""
        data, forward = self.data[rank], self.forwards[rank]
        out, saved = self.forward(rank)
        gradients = moe_backward(
            forward, saved, self.backwards[rank], data.dy, data.routing, data.experts, self.config
        )
        forward.release(saved.use)
        return Answer(
            out, gradients.dx, gradients.dweight, gradients.dw1, gradients.dw2, gradients.db1, gradients.db2
        )

    def check(self) -> None:
        """Raise CommunicationError if a wait of any PE ran out of time."""
        for exchange in (*self.forwards, *self.backwards):
            exchange.check()


def to(data: Data, device: torch.device) -> Data:
    move = lambda t: t.to(device) if isinstance(t, Tensor) else t  # noqa: E731
    routing = Routing(*(move(t) for t in vars(data.routing).values()))
    return Data(
        move(data.x), move(data.dy), routing, Experts(*(move(t) for t in vars(data.experts).values()))
    )


def assert_right(got: list[Answer], case: Case, expected: list[Answer] | None = None) -> None:
    """Against float64, within what torch itself is off in the dtype of the case."""
    expected = expected or reference(case)
    in_dtype = reference(case, case.dtype) if case.dtype != torch.float64 else expected
    for rank, (mine, right, torchs) in enumerate(zip(got, expected, in_dtype, strict=True)):
        for field in fields(Answer):
            a, b, c = (getattr(answer, field.name) for answer in (mine, right, torchs))
            if b is None:
                assert a is None
                continue
            assert a.isfinite().all(), f"PE {rank}, {field.name}: NaN or infinity"
            scale = float(b.abs().max().clamp_min(1e-3))
            off = float((a.cpu().double() - b.double()).abs().max()) / scale
            allowed = 3 * float((c.double() - b.double()).abs().max()) / scale
            # Sums in another order: some roundings of float32, and one of the dtype at the end.
            allowed += 1e-5 + torch.finfo(case.dtype).eps
            assert off <= allowed, f"PE {rank}, {field.name}: off by {off:.2e}, allowed {allowed:.2e}"
