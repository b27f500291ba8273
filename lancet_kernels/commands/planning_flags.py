"""The paper's hyper-parameters (section 7) as options of a command. They win over the environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lancet_kernels.commands.options import option, positive_float, positive_int

if TYPE_CHECKING:
    from lancet_kernels.schedules.partition.partition_range import PartitionOptions


@dataclass(frozen=True)
class PlanningFlags:
    """Base class for the options of commands that plan."""

    most_parts: int | None = option(
        None,
        "most chunks that an op is cut into, the paper's rho (default: LANCET_RHO, or 8)",
        parse=positive_int,
        advanced=True,
    )
    group_ms: float | None = option(
        None,
        "consecutive ops are grouped until they take this many milliseconds, the paper's gamma (default: "
        "LANCET_GAMMA, or five groups per MoE layer)",
        parse=positive_float,
        advanced=True,
    )
    longest_range_ms: float | None = option(
        None,
        "longest range of ops that is cut, in milliseconds, the paper's iota (default: LANCET_IOTA, or the "
        "time between two MoE layers)",
        parse=positive_float,
        advanced=True,
    )

    def partition(self) -> PartitionOptions:
        """Raises: UserError for an environment variable that is used and is not a valid number."""
        # Imported here, because most commands do not plan.
        from lancet_kernels.schedules.partition.partition_range import PartitionOptions

        return PartitionOptions.from_environment(self.most_parts, self.group_ms, self.longest_range_ms)
