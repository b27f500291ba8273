"""Checks the operands of a grouped GEMM, and determines the launch of its kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.kernels.activation_names import ACTIVATIONS
from lancet_kernels.kernels.checks import check_tensor
from lancet_kernels.kernels.gemm_config import GemmConfig, default_config
from lancet_kernels.kernels.runtime import INTERPRETED, architecture, needs_upcast, provide_scratch
from lancet_kernels.kernels.tuning import tuned

EPILOGUES = ("none", *ACTIVATIONS)
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# A small grid in the interpreter, with more than one program so that tiles are shared.
INTERPRETED_PROGRAMS = 2


def most_tiles(config: GemmConfig, rows: int, num_experts: int, n: int) -> int:
    """An upper bound of the tiles of [rows, n] that does not depend on the offsets."""
    return (triton.cdiv(rows, config.block_m) + num_experts) * triton.cdiv(n, config.block_n)


def check_groups(what: str, rows: Tensor, offset: Tensor, weight: Tensor | None = None) -> int:
    """-> the number of experts.

    Raises UserError if offsets, rows and weights do not fit one another, or if no kernel runs there.
    """
    check_tensor(f"{what}: rows", rows, shape=(None, None), dtype=tuple(DTYPES))
    if weight is not None:
        check_tensor(f"{what}: weight", weight, shape=(None,) * 3, dtype=rows.dtype, device=rows.device)
    num_experts = max(1, offset.numel() - 1 if weight is None else weight.shape[0])
    sizes = (num_experts + 1,)
    check_tensor(f"{what}: offset", offset, shape=sizes, dtype=torch.int64, device=rows.device)
    return num_experts


def check_operand(what: str, tensor: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The tensor if it has this shape, no gaps, and dtype and device of `like`; a new one for None."""
    if tensor is None:
        return like.new_empty(shape)
    check_tensor(what, tensor, shape=shape, dtype=like.dtype, device=like.device)
    return tensor


def can_use_tma(arch: int, *matrices: Tensor) -> bool:
    """Descriptors need sm_90, and addresses and row distances that are multiples of 16 bytes.

    float32 goes without: its dots read operands through registers, and with descriptors in between each
    thread takes nearly all the registers it can have (compiled for sm_90: 255 instead of 168).
    """
    return arch >= 90 and all(
        t.element_size() == 2 and t.numel() > 0 and t.data_ptr() % 16 == 0 and t.shape[-1] % 8 == 0
        for t in matrices
    )


@dataclass(frozen=True)
class Launch:
    """A valid configuration on a device, and which way the operands are loaded."""

    config: GemmConfig
    dtype: torch.dtype
    device: torch.device
    tma: bool
    accumulators: int

    @staticmethod
    def of(
        what: str,
        config: GemmConfig | None,
        m: int,
        n: int,
        k: int,
        operands: tuple[Tensor, Tensor],
        accumulators: int,
    ) -> Launch:
        """For [m, k] @ [k, n], with the config, else a tuned one, else the default.

        Raises UserError if it cannot run here.
        """
        dtype, device = operands[0].dtype, operands[0].device
        arch = architecture(device)
        tma = can_use_tma(arch, *operands)
        if tma or dtype.itemsize == 4 or arch < 90:
            config = config or tuned(what, (m, n, k, accumulators), dtype, device)
        # Loads through masks need sm_80's smaller tiles anywhere: the large ones spill with them.
        config = config or default_config(m, n, k, dtype, arch if tma else min(arch, 80), accumulators)
        if not config.is_valid(dtype, arch, accumulators):
            raise UserError(
                f"{what}: config",
                got=f"{config} for {dtype} with {accumulators} accumulator(s) on sm_{arch}",
                expected="one whose is_valid() holds",
                do="use default_config or one of candidates",
            )
        return Launch(config, dtype, device, tma, accumulators)

    def grid(self, most_tiles: int, num_programs: int | None = None) -> tuple[int]:
        """The number of resident programs, or the configured number, but at most the number of tiles; at
        least 1."""
        if num_programs is None and INTERPRETED:
            num_programs = INTERPRETED_PROGRAMS
        elif num_programs is None:
            per_sm = self.config.programs_per_sm(self.dtype, architecture(self.device), self.accumulators)
            num_programs = torch.cuda.get_device_properties(self.device).multi_processor_count * per_sm
        return (max(1, min(num_programs, most_tiles)),)

    def options(self) -> dict[str, object]:
        """The constexprs that all three kernels share, and the launch options."""
        provide_scratch()
        return {
            "GROUP_M": self.config.group_m,
            "UPCAST": needs_upcast(self.dtype),
            "TMA": self.tma,
            "BM": self.config.block_m,
            "BN": self.config.block_n,
            "BK": self.config.block_k,
            "num_warps": self.config.num_warps,
            "num_stages": self.config.num_stages,
        }
