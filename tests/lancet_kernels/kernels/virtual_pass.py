"""A case of `overlap_cases` on virtual PEs: data on the device, one pass, and how far off its answers are."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lancet_kernels.kernels.hopper.config import hopper_config
from lancet_kernels.kernels.overlap import default_overlap_config, moe_backward, moe_forward
from lancet_kernels.kernels.overlap_data import DenseGemm, Experts, Routing, SavedPass
from lancet_kernels.kernels.protocol.exchange import Exchange
from tests.lancet_kernels.kernels.overlap_cases import (
    Answer,
    Case,
    experts_of,
    reference,
    routing_of,
    same_dtype,
    tokens_of,
)
from tests.lancet_kernels.kernels.overlap_ranks import DENSE, make_dense
from tests.lancet_kernels.kernels.virtual_pes import VirtualPes

# Sizes that tensor descriptors take: multiples of 16 bytes.
ALIGNED_DENSE = ((200, 264, 136), (136, 72, 328), (136, 520, 200))  # M, N, K


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
    """Forward and backward of a case on all its PEs.

    dense: independent GEMMs ride along in both. bodies: of the kernel.
    """

    def __init__(
        self,
        case: Case,
        device: torch.device,
        *,
        dense: bool = False,
        bodies: str = "triton",
        timeout_s: float = 8.0,
    ) -> None:
        self.case = case
        self.pes = VirtualPes(case.world, device)
        default = default_overlap_config(
            case.width, case.hidden, case.activation, case.dtype, device, pes_here=case.world
        )
        if bodies == "gluon":
            default = hopper_config(default.programs)
        self.config = default
        sizes = ALIGNED_DENSE if bodies == "gluon" else DENSE
        memories = self.pes.memories
        self.forwards, self.backwards = (
            [
                Exchange(
                    memory,
                    name,
                    local_experts=case.local,
                    send_rows=case.send_rows,
                    receive_rows=case.receive_rows,
                    width=case.width,
                    dtype=case.dtype,
                    chunk_rows=self.config.gemm.block_m,
                    timeout_s=timeout_s,
                )
                for memory in memories
            ]
            for name in ("forward", "backward")
        )
        self.data = [to(data_of(case, rank), device) for rank in range(case.world)]
        self.dense = [
            [DenseGemm(*(t.to(device) for t in (d.a, d.b, d.c))) for d in make_dense(case.dtype, sizes)]
            if dense
            else []
            for _ in range(case.world)
        ]

    def load(self, case: Case) -> None:
        """The values of another case of these sizes, at the same addresses."""
        for rank, held in enumerate(self.data):
            for mine, new in zip(held.tensors(), data_of(case, rank).tensors(), strict=True):
                mine.copy_(new)

    def forward(self, rank: int) -> tuple[Tensor, SavedPass]:
        data = self.data[rank]
        return moe_forward(
            self.forwards[rank], data.x, data.routing, data.experts, self.config, dense=self.dense[rank]
        )

    def play(self, rank: int) -> Answer:
        """One whole pass of one PE; asks the device for nothing."""
        data, forward = self.data[rank], self.forwards[rank]
        out, saved = self.forward(rank)
        gradients = moe_backward(
            forward,
            saved,
            self.backwards[rank],
            data.dy,
            data.routing,
            data.experts,
            self.config,
            dense=self.dense[rank],
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


def assert_right(got: list[Answer], case: Case) -> None:
    """Against float64: at most three times the error of torch in the same dtype, and a rounding.

    More than `check_accuracy` allows between CPUs: a GPU adds and rounds exponentials in ways of its own.
    """
    for rank, answers in enumerate(zip(got, reference(case), same_dtype(case), strict=True)):
        for field in fields(Answer):
            name = f"{case}, PE {rank}: {field.name}"
            assert_close(*(getattr(answer, field.name) for answer in answers), name)


def assert_dense_right(run: VirtualPass) -> None:
    for problem in (problem for problems in run.dense for problem in problems):
        a, b, c = (t.cpu().double() for t in (problem.a, problem.b, problem.c))
        same = (a.T.float() @ b.float()).to(problem.c.dtype)
        assert_close(c.to(same.dtype), a.T @ b, same, "independent GEMM")


def assert_close(got: Tensor | None, exact: Tensor | None, same: Tensor | None, name: str) -> None:
    if exact is None:
        assert got is None, name
        return
    assert got.isfinite().all(), f"{name}: NaN or infinity"
    if got.numel():
        scale = float(exact.abs().max())
        off, allowed = (float((t.cpu().double() - exact).abs().max()) for t in (got, same))
        allowed = 3 * allowed + (torch.finfo(got.dtype).eps + 1e-6) * scale
        assert off <= allowed, f"{name}: off by {off:.2e}, allowed {allowed:.2e}, largest value {scale:.2e}"
