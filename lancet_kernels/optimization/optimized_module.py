"""The module that `optimize` returns: it trains with the plan, and runs the original module when the plan
does not apply."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Union

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.run import Recorder
from lancet_kernels.graph.program.program import Kind, Phase
from lancet_kernels.layer.replicas import Replicas
from lancet_kernels.layer.summed_gradients import PlannedSums
from lancet_kernels.ops.comm.link import link
from lancet_kernels.optimization.captured_step import CapturedStep
from lancet_kernels.optimization.guards import Arguments, Guards, as_arguments, bind
from lancet_kernels.optimization.paired import PairedMicrobatches, loss_of
from lancet_kernels.optimization.planned_shapes import PlannedShapes
from lancet_kernels.schedules.plan import Plan
from lancet_kernels.schedules.time.clock import COMPUTE, LINK
from lancet_kernels.schedules.time.simulate import Event, Timeline

_Inputs = Union[Sequence[object], Mapping[str, object]]  # noqa: UP007  Python 3.10 subscribes no other form
"""A tuple by position, or a dict by name."""


class OptimizedModule(nn.Module):
    """A module with its plan. Call it like the module; `module` is the original, which shares the parameters.

    With gradients enabled and nothing changed since `optimize`, it runs the plan, also for inputs of other
    shapes, which may differ between ranks (`planned_shapes`). After a temporary change (a mode, autocast) it
    runs the original module, sums its gradients over the ranks as the plan would, and warns once per reason.
    After a permanent change (parameters, wrappers around the model) it raises a UserError. Without gradients
    it runs the original module; also with them if `plan.plain`.

    plan: the plan. timeline: the simulated iteration. fallbacks: number of calls with gradients that ran
    without the plan, by reason.
    host_waits: instructions that make the host wait for a GPU (`graphed`). fused_layers: numbers of the fused
    layers (`ops.moe.fused_graph`).
    """

    def __init__(
        self,
        captured: CapturedStep,
        plan: Plan,
        timeline: Timeline,
        guards: Guards,
        sums: PlannedSums | None,
        compare_every: int,
        shapes: PlannedShapes | None = None,
        recorder: Recorder | None = None,
        host_waits: Sequence[str] = (),
        paired: Callable[[], PairedMicrobatches] | None = None,
    ) -> None:
        """Args: sums: of a call without the plan; None: nothing is summed. shapes: run the plan; None: the
        module runs as it is."""
        super().__init__()
        self.module = captured.model
        self.host_waits, self.fused_layers = tuple(host_waits), tuple(captured.layer_numbers.values())
        # Not train(): it would change the modes of submodules, a frozen norm in eval mode, say.
        self.training = self.module.training
        self.plan, self.timeline = plan, timeline
        self.fallbacks: Counter[str] = Counter()
        self._guards, self._shapes, self._recorder = guards, shapes, recorder or Recorder()
        self._sums, self._twin = sums, captured.twin
        self._replicas: Replicas | None = None
        if captured.reduces_gradients:
            self._replicas = Replicas(captured.model, captured.groups, compare_every)
        self._accumulation = captured.accumulation
        self._means = captured.reduction != "sum"
        self._paired = paired
        self._signature = inspect.signature(self.module.forward)

    @torch.compiler.disable
    def forward(self, *inputs: object, **by_name: object) -> object:
        """The result of the module for these inputs, given by position or by name.

        Raises: UserError for a model that changed permanently since it was planned, or whose parameters have
        become different on ranks that hold the same ones.
        """
        if self._twin is not None:
            self._twin.reshard()
        if not torch.is_grad_enabled():
            return self.module(*inputs, **by_name)
        if self._shapes is None:
            self._guards.refuse_changes()
            self._compare_replicas()
            return self._watched(self._without_plan(inputs, by_name))
        arguments = bind(self._signature, f"the optimized {type(self.module).__name__}", inputs, by_name)
        step = self._shapes.step_for(arguments)
        self._compare_replicas()
        if not isinstance(step, str):
            return self._watched(step(*step.guards.inputs.laid_out(arguments)))
        self.fallbacks[step] += 1
        if self.fallbacks[step] == 1:
            warnings.warn(
                f"the optimized {type(self.module).__name__} runs without its plan: {step}; gradients are "
                "right, communication is not hidden (`fallbacks` counts such calls)",
                stacklevel=2,
            )
        return self._without_plan(inputs, by_name)

    def _without_plan(self, inputs: Sequence[object], by_name: Mapping[str, object]) -> object:
        """The result of the module, whose gradients are summed over the ranks as the plan would sum them."""
        if self._sums is None:
            return self.module(*inputs, **by_name)
        return self._sums.call(self.module, inputs, by_name)

    def _compare_replicas(self) -> None:
        if self._replicas is not None:
            self._replicas.call()

    def _watched(self, result: object) -> object:
        """The result, whose gradients cannot be differentiated again."""
        for leaf in _differentiable(result):
            leaf.register_hook(_refuse_double_backward)
        return result

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which forward and backward leave out the sums of gradients over the ranks, as that of
        DistributedDataParallel: the next backward outside of it sums what has come together.

        Until then `.grad` holds what this rank has computed (divided by the number of ranks, if gradients are
        those of the mean) without what was summed before, which is set aside and comes back with the sum; to
        drop both, zero_grad() must set `.grad` to None, its default. Of parameters that FSDP shards,
        gradients are held whole, beside it.
        """
        with self._accumulation.without_sums():
            yield

    def microbatches(self, batches: Sequence[_Inputs]) -> list[Any]:
        """Run forward and backward of several microbatches, whose gradients are summed over the ranks once.

        Gradients are those of the mean of the losses (of their sum, if the step was planned with
        `reduce_gradients="sum"`), and are added to `.grad`.

        Args: batches: the inputs of each, a tuple by position or a dict by name.
        Returns: what the step returned for each, without its graph. The loss is the result, or the first
            tensor of it that requires a gradient.
        Raises: UserError without microbatches, or for a step that returns nothing to differentiate.
        """
        if not batches:
            raise UserError("microbatches", got="none", expected="one or more", do="give their inputs")
        what = f"the optimized {type(self.module).__name__}"
        return self.run_microbatches([bind(self._signature, what, *as_arguments(batch)) for batch in batches])

    def run_microbatches(self, batches: Sequence[Arguments]) -> list[object]:
        """As `microbatches`. Args: batches: the arguments of each."""
        scale = 1.0 / len(batches) if self._means else 1.0
        unsummed = self._accumulation.unsummed
        in_pairs = self._paired is not None and len(batches) > 1 and not unsummed
        planned = self._all_planned(batches) if in_pairs else None
        if planned is not None:
            return self._in_pairs(planned, scale)
        try:
            return self._one_by_one(batches, scale)
        except BaseException:
            if not unsummed:
                self._accumulation.forget()
            raise

    def _one_by_one(self, batches: Sequence[Arguments], scale: float) -> list[object]:
        results = []
        for number, (inputs, by_name) in enumerate(batches):
            with contextlib.nullcontext() if number == len(batches) - 1 else self.no_sync():
                result = self(*inputs, **by_name)
                loss_of(result, type(self.module).__name__).mul(scale).backward()
            results.append(pytree.tree_map_only(Tensor, Tensor.detach, result))
        return results

    def _all_planned(self, batches: Sequence[Arguments]) -> list[Arguments] | None:
        """The inputs, if the plan as it stands applies to each of them."""
        shapes = self._shapes
        assert shapes is not None, "microbatches run in pairs with a plan alone"
        if self._twin is not None:
            self._twin.reshard()
        first = shapes.first
        if any(shapes.step_for(arguments) is not first for arguments in batches):
            return None
        return [first.guards.inputs.laid_out(arguments) for arguments in batches]

    def _in_pairs(self, batches: Sequence[Arguments], scale: float) -> list[object]:
        assert self._paired is not None
        pairs = self._paired()
        self._compare_replicas()
        return pairs(batches, scale)

    def bare_step(self, arguments: Arguments) -> Callable[[], object]:
        """Runs the step on the example inputs, without its checks: to be measured."""
        run = self._without_plan if self._shapes is None else self._shapes.first
        return partial(run, *arguments)

    def __deepcopy__(self, memo: dict) -> OptimizedModule:
        raise self._cannot("copied", "copy.deepcopy(optimized.module), and optimize() the copy to train it")

    def __reduce_ex__(self, protocol: object) -> tuple:
        raise self._cannot(
            "pickled or saved whole",
            "torch.save(optimized.module.state_dict(), file), and optimize() the model that loads it",
        )

    def _cannot(self, what: str, instead: str) -> UserError:
        return UserError(
            f"optimized {type(self.module).__name__}",
            got=f"a module to be {what}",
            expected="none: its plan holds compiled graphs and communicators of this process",
            do=f"use {instead}",
        )

    @contextlib.contextmanager
    def recorded(self) -> Iterator[list[Event]]:
        """Record iterations on this rank; the list is filled when the block ends (CPU ranks).

        Reading the clock at every instruction costs time: look at order and overlap, not at the total.
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


def _differentiable(result: object) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad]


def _refuse_double_backward(_gradient: Tensor) -> None:
    """Called when backward reaches the plan; with create_graph=True, gradients are enabled there."""
    if torch.is_grad_enabled():
        raise UserError(
            "backward of an optimized module",
            got="create_graph=True",
            expected="gradients that are not differentiated again",
            do="call optimized.module for them",
        )
