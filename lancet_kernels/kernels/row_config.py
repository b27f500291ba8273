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
        """All that are worth measuring for rows of this width."""
        widest = triton.next_power_of_2(max(1, width))
        tried = [
            RowConfig(tokens, min(columns, widest), warps)
            for tokens in (1, 2, 4, 8, 16)
            for columns in (256, 512, 1024, 2048)
            for warps in (2, 4, 8)
        ]
        return [config for config in dict.fromkeys(tried) if config.is_valid()]
