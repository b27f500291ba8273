"""What is measured: sizes of an MoE layer, and one set of data for each."""

from __future__ import annotations

import math
from dataclasses import asdict

import torch
from torch import Tensor

from lancet_kernels.tuning.workloads import Workload


class Sizes(Workload):
    """T tokens in all, D model width, F hidden width, E experts, K choices per token; gelu or swiglu."""

    @property
    def rows(self) -> int:
        return self.tokens * self.choices

    def letters(self) -> dict[str, int]:
        values = list(asdict(self).values())[1:6]
        return dict(zip("TDFEK", values, strict=True))


SIZES = (
    Sizes("wide", 32768, 4096, 1024, 64, 4, "swiglu"),
    Sizes("fine-grained", 40960, 768, 256, 128, 8, "swiglu"),
    Sizes("middle", 24576, 1536, 512, 64, 4, "swiglu"),
    Sizes("paper", 12288, 768, 3072, 16, 1),
)
# In the interpreter every task of a pass takes milliseconds, whatever its size: few experts.
SMOKE = (Sizes("smoke", 16, 16, 32, 2, 2), Sizes("smoke swiglu", 16, 16, 32, 2, 2, "swiglu"))


def normal(*shape: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Random numbers of the size that keeps sums over the first of the last two dimensions near 1."""
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.empty(shape, device=device, dtype=dtype)
    return values.normal_(0.0, 1.0 / math.sqrt(shape[-2]) if len(shape) > 2 else 1.0, generator=generator)
