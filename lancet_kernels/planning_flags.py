"""The paper's hyper-parameters (section 7) as options of a command. They win over the environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lancet_kernels.options import option, positive_float, positive_int

if TYPE_CHECKING:
    from lancet_kernels.schedules.partition_range import PartitionOptions


@dataclass(frozen=True)
class PlanningFlags:
    """To inherit from."""

    most_parts: int | None = option(
        None, "no op is cut into more parts (default: LANCET_RHO, or 8)", parse=positive_int
    )
    group_ms: float | None = option(
        None,
        "ops are grouped up to so many milliseconds (default: LANCET_GAMMA, or five groups per MoE layer)",
        parse=positive_float,
    )
    longest_range_ms: float | None = option(
        None,
        "no range that is cut takes longer (default: LANCET_IOTA, or the time between two MoE layers)",
        parse=positive_float,
    )

    def partition(self) -> PartitionOptions:
        """Raises: UserError for an environment variable that counts and is no such number."""
        # Here, not above: it brings the solver.
        from lancet_kernels.schedules.partition_range import PartitionOptions

        return PartitionOptions.from_environment(self.most_parts, self.group_ms, self.longest_range_ms)
