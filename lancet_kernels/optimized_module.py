"""The module that `optimize` returns: it trains with the plan, and runs the original module where the plan
does not fit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lancet_kernels.errors import UserError
from lancet_kernels.gradients import call_with_summed_gradients
from lancet_kernels.graph.program import Kind, Phase
from lancet_kernels.graph.run import Recorder
from lancet_kernels.ops.link import link
from lancet_kernels.schedules.plan import Plan
from lancet_kernels.schedules.simulate import COMPUTE, LINK, Event, Timeline


class OptimizedModule(nn.Module):
    """A module with its plan. Call it like the module; `module` is the original, which shares the parameters.

    With gradients enabled and inputs of the planned shapes it runs the plan; otherwise (validation, an
    odd last batch) it runs the original module, whose gradients it sums over the ranks as the plan would.
    plan: what was decided. timeline: the simulated iteration.
    host_waits: instructions that make the host wait for a GPU (`graphed`). fused_layers: numbers of the fused
    layers (`ops.fused_graph`).
    """

    def __init__(
        self,
        module: nn.Module,
        run: Callable[..., object],
        plan: Plan,
        timeline: Timeline,
        inputs: Sequence[object],
        recorder: Recorder,
        reduce_group: str,
        host_waits: Sequence[str] = (),
        fused_layers: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.module = module
        self.host_waits, self.fused_layers = tuple(host_waits), tuple(fused_layers)
        self.train(module.training)
        self.plan, self.timeline = plan, timeline
        self._run, self._recorder = run, recorder
        self._expected = module.training, _shapes(inputs)
        self._reduce_group = reduce_group

    def forward(self, *inputs: object, **by_name: object) -> object:
        """What the module returns for these inputs, given by position, in the order of example_inputs.

        Raises: UserError for inputs that are given by name.
        """
        if by_name:
            raise UserError(
                f"inputs of the optimized {type(self.module).__name__}",
                got=f"{', '.join(by_name)} by name",
                expected="all inputs by position",
                do="give them in the order of example_inputs",
            )
        if not torch.is_grad_enabled():
            return self.module(*inputs)
        if (self.module.training, _shapes(inputs)) == self._expected:
            return self._run(*inputs)
        if self._reduce_group:
            return call_with_summed_gradients(self.module, inputs, self._reduce_group)
        return self.module(*inputs)

    @contextlib.contextmanager
    def recorded(self) -> Iterator[list[Event]]:
        """Inside the block, iterations are recorded on this rank; the events are there when it ends (CPU
        ranks).

        Clocks beside every instruction cost time: look at the order and the overlap, not at the total.
        """
        events: list[Event] = []
        self._recorder.on, self._recorder.computed, link.log = True, [], []
        try:
            yield events
        finally:
            computed, moved = self._recorder.computed, link.log
            self._recorder.on, link.log = False, None
        begin = min((start for _, _, start, _ in computed), default=0.0)
        for name, phase, start, end in computed:
            events.append(
                Event(name, COMPUTE, (start - begin) * 1e3, (end - begin) * 1e3, Kind.COMPUTE, phase)
            )
        for start, end in moved:
            times = (start - begin) * 1e3, (end - begin) * 1e3
            events.append(Event("all-to-all", LINK, *times, Kind.ALL_TO_ALL, Phase.FORWARD))


def _shapes(inputs: Sequence[object]) -> list[object]:
    return [
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in pytree.tree_leaves(inputs)
    ]
