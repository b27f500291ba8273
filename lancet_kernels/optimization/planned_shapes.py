"""The planned step for inputs of other shapes: captured when they first come, and run with the same plan.

A graph is valid for one shape of each input. For another number of tokens it has the same instructions with
tensors of other sizes, so order, parts and fused layers of the plan apply to it as they stand. Nothing is
planned or measured again, and nothing is agreed upon: each rank captures what it needs when it needs it, and
its collectives stay those of the plan, whatever shapes the other ranks have in that step. They wait in their
next collective meanwhile.

What cannot run with the plan: a graph with other instructions (that of a batch of no tokens, say). Then the
module runs without the plan, which all ranks must do in the same step; if one runs with it and one without,
that is an error on both (`ops.comm.all_to_all`).
"""

from __future__ import annotations

import logging
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch.utils._pytree as pytree
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.capture import Captured
from lancet_kernels.graph.program.program import Program
from lancet_kernels.graph.program.program_json import fingerprint
from lancet_kernels.ops.comm.all_to_all import running_a_plan
from lancet_kernels.optimization.captured_step import CapturedStep
from lancet_kernels.optimization.guards import OTHER_SHAPE, Arguments, Guards, to_trace
from lancet_kernels.schedules.plan import Plan
from lancet_kernels.schedules.rewrite.walk import PLANNED, Step, walk

_log = logging.getLogger(__name__)

MOST_SHAPES = 8
"""How many captured shapes are kept, beside the one that was planned; those used last (as torch.compile)."""


@dataclass(frozen=True)
class PlannedStep:
    """The planned step for one shape of the inputs: `run`, and the `guards` that say whether it applies."""

    run: Callable[..., object]
    guards: Guards

    def __call__(self, inputs: Sequence[object], by_name: Mapping[str, object]) -> object:
        """The result of the module."""
        with running_a_plan():
            return self.run(*inputs, **by_name)


class PlannedShapes:
    """The steps of one plan. Args: captured: the step of the shape that was planned, with the `program` that
    was planned. first: that step with the plan. compiled: gives a function that runs a step to which the plan
    was applied."""

    def __init__(
        self,
        captured: CapturedStep,
        program: Program,
        plan: Plan,
        first: PlannedStep,
        compiled: Callable[[Captured, Step, Plan], Callable[..., object]],
    ) -> None:
        self.first = first
        self._captured, self._plan, self._compiled = captured, plan, compiled
        self._instructions = _instructions(program)
        self._others: OrderedDict[object, PlannedStep | str] = OrderedDict()

    def step_for(self, arguments: Arguments) -> PlannedStep | str:
        """The step for these arguments, or the reason why the module must run without the plan.

        Raises: UserError as `Guards.reason`; where gradients would not be summed without the plan.
        """
        step = self._step_for(arguments)
        plain = self._captured.captured.plain
        if isinstance(step, str) and plain.trained and self._captured.reduces_gradients:
            raise UserError(
                f"call of the optimized {type(self._captured.model).__name__}",
                got=f"{step}, and {plain.paths[plain.trained[0]]}, which is trained but no parameter",
                expected="a call that runs the plan, which alone sums that gradient over the ranks",
                do="register it (nn.Parameter as an attribute, nn.ParameterList)",
            )
        return step

    def _step_for(self, arguments: Arguments) -> PlannedStep | str:
        reason = self.first.guards.reason(arguments)
        if reason != OTHER_SHAPE:
            return reason or self.first
        shapes = tuple(tuple(x.shape) for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor))
        if shapes not in self._others:
            self._add(shapes, arguments)
        self._others.move_to_end(shapes)
        step = self._others[shapes]
        return step if isinstance(step, str) else step.guards.reason(arguments) or step

    def _add(self, shapes: object, arguments: Arguments) -> None:
        begin = time.monotonic()
        try:
            self._others[shapes] = self._capture(arguments)
        except UserError as error:
            self._others[shapes] = f"{OTHER_SHAPE}, for which there is no plan: {error}"
        _log.info("captured the step for %s in %.1f s", shapes, time.monotonic() - begin)
        if len(self._others) > MOST_SHAPES:
            self._others.popitem(last=False)
            warnings.warn(
                f"more than {MOST_SHAPES} shapes of inputs beside the planned one: the step is captured "
                f"again, which takes {time.monotonic() - begin:.1f} s, for each shape that was not among the "
                f"last {MOST_SHAPES}; pad batches to few lengths",
                stacklevel=4,
            )

    def _capture(self, arguments: Arguments) -> PlannedStep:
        """Raises: UserError (CaptureError, CutError) if the plan does not apply to these arguments."""
        arguments = to_trace(arguments)
        captured = self._captured.with_inputs(arguments)
        step = replace(captured.step(), other_sizes=True)
        if (other := _first_difference(_instructions(step.program), self._instructions)) is not None:
            raise UserError(
                "graph of the step", got=other, expected="the planned instructions", do="see fallbacks"
            )
        plan = replace(self._plan, program_fingerprint=fingerprint(step.program))
        run = self._compiled(captured.captured, walk(step, plan, PLANNED), plan)
        assumptions = captured.captured.assumptions()
        return PlannedStep(run, self.first.guards.for_inputs(arguments, assumptions))


def _instructions(program: Program) -> list[tuple[object, ...]]:
    """What must not change with the shapes: names, ops, kinds, and who reads what."""
    return [
        (i.name, i.op, i.kind, i.phase, i.inputs, i.outputs, i.mutates, i.after) for i in program.instructions
    ]


def _first_difference(mine: list[tuple[object, ...]], planned: list[tuple[object, ...]]) -> str | None:
    """The first instruction that differs, in words; None if all are equal."""
    for one, other in zip(mine, planned, strict=False):
        if one != other:
            return f"{one[0]} ({one[1]}) in place of {other[0]} ({other[1]})"
    return None if len(mine) == len(planned) else f"{len(mine)} instructions, not {len(planned)}"
