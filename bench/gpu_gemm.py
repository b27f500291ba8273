"""Grouped GEMM forward, dX and dW against torch's `grouped_mm`, quack's, and one dense GEMM of the same work.

The first GEMM of an expert, [D, F] or for swiglu [D, 2F], without its epilogue. quack takes part where it is
installed (`bench/gpu.sh` says how to carry it to a machine without a network).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from gpu_clock import Clock, each_round, spread
from gpu_sizes import Sizes, choices_of_tokens, normal
from peers import Absent, quack_gemm
from torch import Tensor
from torch.nn.functional import grouped_mm

from lancet_kernels.kernels import grouped_gemm_kernel as kernels

OURS, TORCH, QUACK, DENSE = "lancet_kernels", "torch grouped_mm", "quack", "dense"
# Relative to the largest value, in bf16.
DIFFERENCE_ALLOWED = 2e-2
JITTED = (
    kernels.grouped_gemm_forward_kernel,
    kernels.grouped_gemm_dx_kernel,
    kernels.grouped_gemm_dw_kernel,
)


class GroupedGemms:
    """The first GEMM of the experts of the sizes, on rows without gaps, experts chosen at random.

    Attributes:
        absent: who cannot take part, and why.
    """

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> None:
        self.sizes = sizes
        rows, width, hidden, experts = sizes.rows, sizes.width, sizes.wide, sizes.experts
        make = {"device": device, "dtype": dtype}
        chosen = choices_of_tokens(sizes.tokens, experts, sizes.choices, device)
        count = torch.bincount(chosen.flatten(), minlength=experts)
        self.offset = torch.cat([count.new_zeros(1), count.cumsum(0)])
        self.ends = self.offset[1:].to(torch.int32)
        self.x, self.dy = normal(rows, width, **make), normal(rows, hidden, seed=1, **make)
        self.weight = normal(experts, width, hidden, seed=2, **make)
        self.y, self.dx = torch.empty_like(self.dy), torch.empty_like(self.x)
        self.dw = torch.empty_like(self.weight)
        self.absent: dict[str, str] = {}
        self._quack: Callable | None = None
        try:
            self._quack = quack_gemm(device)
        except Absent as error:
            self.absent[QUACK] = str(error)

    def directions(self) -> Iterator[tuple[str, dict[str, Callable[[], Tensor]]]]:
        """Name and contenders, each a call that returns its result."""
        x, dy, weight, offset, ends = self.x, self.dy, self.weight, self.offset, self.ends
        one, quack = weight[0], self._quack
        offset32 = offset.to(torch.int32)
        # Where it is there: A, B, and where the rows of each expert begin.
        with_quack = lambda run: {QUACK: run} if quack is not None else {}  # noqa: E731
        yield (
            "forward",
            {
                OURS: lambda: kernels.grouped_gemm_forward(x, offset, weight, out=self.y)[0],
                TORCH: lambda: grouped_mm(x, weight, offs=ends),
                **with_quack(lambda: quack(x, weight, out=self.y, cu_seqlens_m=offset32)),
                DENSE: lambda: torch.mm(x, one),
            },
        )
        yield (
            "dX",
            {
                OURS: lambda: kernels.grouped_gemm_dx(dy, offset, weight, out=self.dx),
                TORCH: lambda: grouped_mm(dy, weight.transpose(1, 2), offs=ends),
                **with_quack(lambda: quack(dy, weight.transpose(1, 2), out=self.dx, cu_seqlens_m=offset32)),
                DENSE: lambda: torch.mm(dy, one.t()),
            },
        )
        yield (
            "dW",
            {
                OURS: lambda: kernels.grouped_gemm_dw(x, dy, offset, dw=self.dw),
                TORCH: lambda: grouped_mm(x.t(), dy, offs=ends),
                **with_quack(lambda: quack(x.t(), dy, out=self.dw, cu_seqlens_k=offset32)),
                DENSE: lambda: torch.mm(x.t(), dy),
            },
        )

    def launch_all(self) -> None:
        for _, contenders in self.directions():
            contenders[OURS]()

    def try_peers(self) -> None:
        """Each once: what fails here takes no part."""
        if self._quack is not None:
            try:
                for _, contenders in self.directions():
                    torch.testing.assert_close(
                        contenders[QUACK](), contenders[TORCH](), rtol=DIFFERENCE_ALLOWED, atol=0.1
                    )
            except Exception as error:
                self.absent[QUACK] = f"failed: {type(error).__name__}: {error}"
                self._quack = None


def measure(clock: Clock, gemms: GroupedGemms, rounds: int, warmup: int, is_first: bool) -> Iterator[dict]:
    """A figure for each direction. is_first: the sizes that have a goal against the dense GEMM."""
    sizes = gemms.sizes
    gemms.try_peers()
    flops = 2 * sizes.rows * sizes.width * sizes.wide
    for name, contenders in gemms.directions():
        ours, theirs = contenders[OURS](), contenders[TORCH]()
        off = float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
        del ours, theirs
        ms = clock.rounds(contenders, rounds, warmup)
        goals = {TORCH: 1.0} | ({DENSE: 0.85} if is_first else {})
        yield {
            "figure": f"grouped GEMM {name}",
            "sizes": sizes.letters(),
            "name": sizes.name,
            "ms": {who: spread(values) for who, values in ms.items()},
            "tflops": {who: flops / spread(values)["median"] * 1e-9 for who, values in ms.items()},
            "largest_difference": off,
            "difference_allowed": DIFFERENCE_ALLOWED,
            "absent": gemms.absent,
            "ratios": [
                {
                    "what": f"rate over {who}",
                    "value": spread(each_round(lambda a, b: b / a, ms[OURS], ms[who])),
                    "goal": goals.get(who),
                }
                for who in ms
                if who != OURS
            ],
        }
