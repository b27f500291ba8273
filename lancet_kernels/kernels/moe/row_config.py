"""The tile of the kernels that move rows of tokens (`kernels.permute`)."""

from __future__ import annotations

from dataclasses import dataclass

import triton


@dataclass(frozen=True)
class RowConfig:
    """The tile of the kernels that move rows: block_tokens x block_width, powers of two."""

    block_tokens: int
    block_width: int
    num_warps: int = 4

    def is_valid(self) -> bool:
        """At most 64 values per thread, at least one."""
        sides = (self.block_tokens, self.block_width)
        powers = all(n > 0 and n & (n - 1) == 0 for n in sides) and self.num_warps in (1, 2, 4, 8)
        return powers and sides[0] * sides[1] <= 64 * 32 * self.num_warps

    @staticmethod
    def default(width: int) -> RowConfig:
        """2048 values: with 4 warps and bf16 two 16-byte loads per thread and choice."""
        block_width = min(1024, triton.next_power_of_2(max(1, width)))
        return RowConfig(min(64, 2048 // block_width), block_width)

    @staticmethod
    def candidates(width: int) -> list[RowConfig]:
        """The configurations to time, the default first: 8 to 32 values per thread (1 to 4 loads of 16 bytes
        in bf16).

        With fewer values, loads are narrower than 16 bytes; with more, too few programs run at the same time
        to hide the latency of memory.
        """
        widest = triton.next_power_of_2(max(1, width))
        tried = [
            RowConfig(max(1, min(64, values // min(columns, widest))), min(columns, widest), warps)
            for columns in (512, 1024, 2048)
            for values in (1024, 2048, 4096, 8192)
            for warps in (4, 8)
            if 8 <= values // (32 * warps) <= 32
        ]
        configs = dict.fromkeys([RowConfig.default(width), *tried])
        return [config for config in configs if config.is_valid()]
