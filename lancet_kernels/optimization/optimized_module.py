"""The module that `optimize` returns: it trains with the plan, and runs the original module when the plan
does not apply.

The plan is for inputs of one shape. For another number of tokens a graph has the same instructions with
tensors of other sizes, so order, parts and fused layers of the plan apply to it unchanged. Nothing is planned
or measured again: a rank captures another shape when it first gets it, while the others wait, and its
collectives stay those of the plan, whatever shapes the other ranks have in that step.

A graph with other instructions (that of a batch of no tokens, say) cannot run with the plan. Then the module
runs without the plan on all ranks in that step (`rank_agreement`).
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lancet_kernels.errors import UserError, class_name
from lancet_kernels.graph.capture.run import Recorder
from lancet_kernels.graph.costs.costs import MeasuredCosts
from lancet_kernels.graph.costs.measure import run_as_a_whole
from lancet_kernels.graph.from_fx import host_waits
from lancet_kernels.graph.program import Instruction, Kind, Phase, Program, fingerprint
from lancet_kernels.layer.gradients import Replicas
from lancet_kernels.layer.summed_gradients import PlannedSums, differentiable
from lancet_kernels.ops.base import during
from lancet_kernels.ops.comm.link import link
from lancet_kernels.optimization.guards import OTHER_SHAPE, Arguments, Guards, as_arguments, bind, to_trace
from lancet_kernels.optimization.paired import PairedMicrobatches, loss_of
from lancet_kernels.optimization.planning import Planned, Staleness, predicted
from lancet_kernels.optimization.rank_agreement import CallAgreement
from lancet_kernels.optimization.step import ModelStep
from lancet_kernels.schedules.plan import Plan
from lancet_kernels.schedules.rewrite.buckets import buckets_in_order
from lancet_kernels.schedules.rewrite.gathers import sum_held
from lancet_kernels.schedules.time.simulate import COMPUTE, LINK, Event, Timeline

_log = logging.getLogger(__name__)

MOST_SHAPES = 8
"""Captured shapes that are kept beside the planned one, least recently used ones dropped first."""


@dataclass(frozen=True)
class _Runnable:
    """The planned step for one shape of the inputs, with its guards."""

    run: Callable[..., object]
    guards: Guards

    def __call__(self, inputs: Sequence[object], by_name: Mapping[str, object]) -> object:
        with during(runs_a_plan=True):
            return self.run(*inputs, **by_name)


class OptimizedModule(nn.Module):
    """A module with its plan. Call it like the module; `module` is the original, which shares the parameters.

    With gradients enabled and nothing changed since `optimize`, it runs the plan, also for inputs of other
    shapes, which may differ between ranks. After a temporary change on any rank (a mode, autocast) all run
    the original module, sum its gradients over the ranks as the plan would, and warn once per reason. After a
    permanent change (parameters, wrappers around the model) it raises a UserError. Without gradients it runs
    the original module; also with them if `plan.plain`.

    plan: the plan. timeline: the simulated iteration. fallbacks: number of calls with gradients that ran
    without the plan, by reason.
    host_waits: instructions that make the host wait for a GPU (`graphed`). fused_layers: the exchanges of
    the fused layers.
    """

    def __init__(
        self,
        step: ModelStep,
        plan: Plan,
        timeline: Timeline,
        inner_compile: str = "",
        compare_every: int = 0,
        candidates: Planned = (),
    ) -> None:
        """Args: step: the costed step of `plan`. inner_compile, compare_every: as of `optimize`. candidates:
        further plans of the step, which may include this one."""
        super().__init__()
        self.module = step.model
        # Not train(): it would change the modes of submodules, a frozen norm in eval mode, say.
        self.training = self.module.training
        self.plan, self.timeline = plan, timeline
        self.fallbacks: Counter[str] = Counter()
        self.host_waits: tuple[str, ...] = ()
        self.fused_layers = tuple(step.context.layers.values())
        # A copy without the cached properties that planning filled.
        self._step, self._inner_compile = replace(step), inner_compile
        self._recorder = Recorder()
        others = [one for one in candidates if one[0].order != plan.order or one[0].blocking != plan.blocking]
        self._staleness = Staleness(self._step, [(plan, timeline), *others], compare_every)
        self._signature = inspect.signature(self.module.forward)
        self._guards = step.guards
        agrees = not plan.plain and (step.communicates or bool(plan.pair))
        self._agreement = CallAgreement(step.groups.world if agrees else "", self._name)
        self._others: OrderedDict[object, _Runnable | str] = OrderedDict()
        self._replicas: Replicas | None = None
        self._sums: PlannedSums | None = None
        self._first: _Runnable | None = None
        planned = step if plan.plain else step.planned(plan)
        if step.reduction:
            self._replicas = Replicas(step.model, step.groups, compare_every)
            buckets = buckets_in_order(planned.module)
            self._sums = PlannedSums(
                step.model, step.groups, buckets, step.divide_by, step.accumulation, early=plan.plain
            )
        if not plan.plain:
            self.host_waits = tuple(host_waits(planned.module.graph))
            self._first = self._runnable(planned, plan, self._guards)

    def _runnable(self, planned: ModelStep, plan: Plan, guards: Guards) -> _Runnable:
        give = None if self._sums is None else self._sums.watch.give
        return _Runnable(planned.compiled(plan, self._recorder, self._inner_compile, give), guards)

    def report(self, **figures: object) -> None:
        """Add figures to the report of the plan."""
        self.plan = self.plan.reported(**figures)

    @torch.compiler.disable
    def forward(self, *inputs: object, **by_name: object) -> object:
        """The result of the module for these inputs, given by position or by name.

        Raises: UserError for a model that changed permanently since it was planned, or whose parameters have
        become different on ranks that hold the same ones.
        """
        self._reshard()
        if not torch.is_grad_enabled():
            self._agreement.way("a call without gradients", str)
            # Buffers that FSDP creates in a first gather under inference_mode fail in gathers outside of it.
            mode = contextlib.nullcontext() if self._step.twin is None else torch.inference_mode(False)
            with mode, torch.no_grad():
                return self.module(*inputs, **by_name)
        with self._staleness.counting():
            return self._with_gradients(inputs, by_name)

    def stale(self) -> str:
        """A message about a plan that would be faster with the routing of the last counted call; "": none.

        Rows are counted in the first call and in each `compare_every`-th one of a step that was measured
        here; the candidates of `optimize` are simulated with them. Collective over all ranks.
        """
        return self._staleness.stale()

    def _with_gradients(self, inputs: Sequence[object], by_name: Mapping[str, object]) -> object:
        if self._first is None:
            self._guards.refuse_changes()
            self._compare_replicas()
            return self._watched(self._without_plan(inputs, by_name))
        call = "a call" if self._step.accumulation.sums else "a call in no_sync()"
        planned = self._agreement.way(call, partial(self._planned_call, inputs, by_name))
        self._compare_replicas()
        if not isinstance(planned, str):
            return self._watched(planned())
        self.fallbacks[planned] += 1
        if self.fallbacks[planned] == 1:
            warnings.warn(
                f"{self._name} runs without its plan: {planned}; gradients are right, communication is not "
                "hidden (`fallbacks` counts such calls)",
                stacklevel=2,
            )
        return self._without_plan(inputs, by_name)

    def _reshard(self) -> None:
        if self._step.twin is not None:
            self._step.twin.reshard()

    def _planned_call(
        self, inputs: Sequence[object], by_name: Mapping[str, object]
    ) -> Callable[[], object] | str:
        """A call of the planned step with these inputs, or the reason of `_planned_for`."""
        arguments = bind(self._signature, self._name, inputs, by_name)
        planned = self._planned_for(arguments)
        if isinstance(planned, str):
            return planned
        return partial(planned, *planned.guards.inputs.laid_out(arguments))

    def _planned_for(self, arguments: Arguments) -> _Runnable | str:
        """The planned step for these arguments, or the reason why the module must run without the plan.

        Raises: UserError as `Guards.reason`.
        """
        assert self._first is not None, "a plain plan has no planned step"
        reason = self._guards.reason(arguments)
        if reason != OTHER_SHAPE:
            return reason or self._first
        shapes = tuple(tuple(x.shape) for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor))
        if shapes not in self._others:
            self._add_shapes(shapes, arguments)
        self._others.move_to_end(shapes)
        planned = self._others[shapes]
        return planned if isinstance(planned, str) else planned.guards.reason(arguments) or planned

    def _add_shapes(self, shapes: object, arguments: Arguments) -> None:
        begin = time.monotonic()
        try:
            self._others[shapes] = self._planned_again(to_trace(arguments))
        except UserError as error:
            self._others[shapes] = f"{OTHER_SHAPE}, for which there is no plan: {error}"
        _log.info("captured the step for %s in %.1f s", shapes, time.monotonic() - begin)
        if len(self._others) > MOST_SHAPES:
            self._others.popitem(last=False)
            warnings.warn(
                f"more than {MOST_SHAPES} shapes of inputs beside the planned one: the step is captured "
                f"again, which takes {time.monotonic() - begin:.1f} s, for each shape that was not among the "
                f"last {MOST_SHAPES}; pad batches to few lengths",
                stacklevel=7,
            )

    def _planned_again(self, arguments: Arguments) -> _Runnable:
        """The planned step for inputs of another shape.

        Raises: UserError (CaptureError, CutError) if the plan does not apply to these.
        """
        step = self._step.with_inputs(arguments, self.plan.fused)
        if (other := _first_difference(step.program, self._step.program)) is not None:
            raise UserError(
                "graph of the step", got=other, expected="the planned instructions", do="see fallbacks"
            )
        plan = replace(self.plan, program_fingerprint=fingerprint(step.program))
        guards = self._guards.for_inputs(arguments, step.captured.assumptions())
        return self._runnable(step.planned(plan), plan, guards)

    def _without_plan(self, inputs: Sequence[object], by_name: Mapping[str, object]) -> object:
        """The result of the module, whose gradients are summed over the ranks as the plan would sum them."""
        sums, accumulation = self._step.sums, self._step.accumulation
        if sums is not None and sums.shards is not None and accumulation.sums:
            sum_held(sums.shards, accumulation)
        if self._sums is None:
            return self.module(*inputs, **by_name)
        return self._sums.call(self.module, inputs, by_name)

    def _compare_replicas(self) -> None:
        if self._replicas is not None:
            self._replicas.call()

    def _watched(self, result: object) -> object:
        """The result, with hooks that refuse double backward."""
        for leaf in differentiable(result):
            leaf.register_hook(_refuse_double_backward)
        return result

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which forward and backward leave out the sums of gradients over the ranks, as that of
        DistributedDataParallel: the next backward outside of it sums the accumulated gradients, also if it is
        one of another optimized module with the same parameters.

        Until then `.grad` holds only the gradients of this rank (divided by the number of ranks, if gradients
        are those of the mean). Earlier sums are set aside and added again with the next sum; to drop both,
        zero_grad() must set `.grad` to None, its default. Gradients of parameters that FSDP shards are held
        whole, outside of `.grad`, until the next backward of this module.
        """
        with self._step.accumulation.without_sums():
            yield

    def microbatches(self, batches: Sequence[Sequence[object] | Mapping[str, object]]) -> list[Any]:
        """Run forward and backward of several microbatches, whose gradients are summed over the ranks once.

        Gradients are those of the mean of the losses (of their sum, if the step was planned with
        `reduce_gradients="sum"`), and are added to `.grad`.

        Args: batches: the inputs of each, a tuple by position or a dict by name.
        Returns: the detached result of the step for each. Its loss is the first number in the result that
            requires a gradient.
        Raises: UserError without microbatches, or for a step without a loss.
        """
        if not batches:
            raise UserError("microbatches", got="none", expected="one or more", do="give their inputs")
        return self.run_microbatches([as_arguments(batch) for batch in batches])

    def run_microbatches(self, batches: Sequence[Arguments]) -> list[object]:
        """As `microbatches`. Args: batches: the arguments of each."""
        scale = 1.0 if self._step.reduction == "sum" else 1.0 / len(batches)
        unsummed = self._step.accumulation.unsummed
        if self._first is not None and self.plan.pair:
            self._reshard()
            paired = self._agreement.way(f"{len(batches)} microbatches", partial(self._in_pairs, batches))
            if not isinstance(paired, str):
                self._compare_replicas()
                return self._pairs(paired, scale)
        try:
            return self._one_by_one(batches, scale)
        except BaseException:
            if not unsummed:
                self._step.accumulation.forget()
            raise

    def _one_by_one(self, batches: Sequence[Arguments], scale: float) -> list[object]:
        results = []
        for number, (inputs, by_name) in enumerate(batches):
            with contextlib.nullcontext() if number == len(batches) - 1 else self.no_sync():
                result = self(*inputs, **by_name)
                loss_of(result, class_name(self.module)).mul(scale).backward()
            results.append(pytree.tree_map_only(Tensor, Tensor.detach, result))
        return results

    def _in_pairs(self, batches: Sequence[Arguments]) -> list[Arguments] | str:
        """The inputs, if all have the planned shape and can run the plan; otherwise the reason."""
        if len(batches) == 1 or self._step.accumulation.unsummed:
            return "one microbatch, or gradients that are not summed yet"
        bound = [bind(self._signature, self._name, *arguments) for arguments in batches]
        if any(self._planned_for(arguments) is not self._first for arguments in bound):
            return "a microbatch that the plan as it stands is not for"
        return [self._guards.inputs.laid_out(arguments) for arguments in bound]

    @property
    def _name(self) -> str:
        return f"the optimized {class_name(self.module)}"

    @cached_property
    def _pairs(self) -> PairedMicrobatches:
        return PairedMicrobatches(self._step, self.plan)

    def bare_step(self, arguments: Arguments) -> Callable[[], object]:
        """A call of the step with these arguments, without checks, for measurements."""
        run = self._without_plan if self._first is None else self._first
        return partial(run, *arguments)

    @property
    def is_measured(self) -> bool:
        """Whether the ops of the step were timed on this machine."""
        return isinstance(self._step.cost, MeasuredCosts) and not self.fused_layers

    def run_as_a_whole(self) -> Callable[[], float]:
        """`graph.costs.measure.run_as_a_whole` of the uncut step. Calls of the result are collective."""
        return run_as_a_whole(self._step.module, self._step.inputs, self._step.device)

    def at_speed(self, run_ms: float) -> None:
        """Predict the plan anew for ranks on which `run_as_a_whole` takes `run_ms`, because a machine's speed
        drifts after planning. Collective."""
        before = self.plan.report
        ((plan, self.timeline),) = predicted(self._step.at_speed(run_ms), [self.plan], measured=True)
        ratio = plan.report.predicted.iteration_ms / before.predicted.iteration_ms
        self.plan = plan.reported(pair_ms=before.pair_ms * ratio)

    def __deepcopy__(self, memo: dict) -> OptimizedModule:
        raise self._cannot("copied", "copy.deepcopy(optimized.module), and optimize() the copy to train it")

    def __reduce_ex__(self, protocol: object) -> tuple:
        raise self._cannot(
            "pickled or saved whole",
            "torch.save(optimized.module.state_dict(), file), and optimize() the model that loads it",
        )

    def _cannot(self, what: str, instead: str) -> UserError:
        return UserError(
            f"optimized {class_name(self.module)}",
            got=f"a module to be {what}",
            expected="none: its plan holds compiled graphs and communicators of this process",
            do=f"use {instead}",
        )

    @contextlib.contextmanager
    def recorded(self) -> Iterator[list[Event]]:
        """Record iterations on this rank (CPU ranks); the list is filled when the block ends.

        Order and overlap are right; the total includes the time to read the clock at every instruction.
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


def _first_difference(mine: Program, planned: Program) -> str | None:
    """The first instruction that differs by more than its sizes, in words; None if all are equal."""

    def facts(i: Instruction) -> tuple[object, ...]:
        return i.name, i.op, i.kind, i.phase, i.inputs, i.outputs, i.mutates, i.after

    for one, other in zip(mine.instructions, planned.instructions, strict=False):
        if facts(one) != facts(other):
            return f"{one.name} ({one.op}) in place of {other.name} ({other.op})"
    return None if len(mine) == len(planned) else f"{len(mine)} instructions, not {len(planned)}"


def _refuse_double_backward(_gradient: Tensor) -> None:
    if torch.is_grad_enabled():  # with create_graph=True alone
        raise UserError(
            "backward of an optimized module",
            got="create_graph=True",
            expected="gradients that are not differentiated again",
            do="call optimized.module for them",
        )
