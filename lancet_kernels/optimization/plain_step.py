"""The module as it is, where no plan is worth it: what `optimize(strategy="auto")` keeps then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from lancet_kernels.data_parallel.summed_gradients import PlannedSums
from lancet_kernels.optimization.guards import Guards


class PlainStep:
    """Runs the module; gradients are summed over the ranks while backward runs, as DistributedDataParallel
    does, and each backward adds its sums to `.grad`, as a plan does.

    Args: sums: early ones; None: nothing is summed.
    """

    def __init__(self, module: nn.Module, guards: Guards, sums: PlannedSums | None) -> None:
        self.module, self.guards, self._sums = module, guards, sums

    def __call__(self, inputs: Sequence[object], by_name: Mapping[str, object]) -> object:
        """The result of the module. Raises: UserError as `Guards.refuse_changes`."""
        self.guards.refuse_changes()
        if self._sums is None:
            return self.module(*inputs, **by_name)
        return self._sums.call(self.module, inputs, by_name)
