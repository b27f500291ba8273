"""Runs the backward of each microbatch together with the forward of the next (`cut.duplex`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from lancet_kernels.errors import UserError, class_name
from lancet_kernels.graph.capture.captured_graph import copy_of, is_tangent
from lancet_kernels.graph.capture.run import GraphRunner, Recorder
from lancet_kernels.graph.meta import GRADIENTS_OF
from lancet_kernels.graph.program import Phase
from lancet_kernels.layer.gradients import local_tensor
from lancet_kernels.layer.summed_gradients import has_hooks
from lancet_kernels.ops.base import during
from lancet_kernels.optimization.guards import Arguments
from lancet_kernels.optimization.rank_agreement import result_of_first_rank
from lancet_kernels.optimization.step import ModelStep, placeholder_value
from lancet_kernels.schedules.cut.duplex import pair_of, program_of_pair
from lancet_kernels.schedules.order.best_order import OrderSearch
from lancet_kernels.schedules.plan import Plan
from lancet_kernels.schedules.rewrite.buckets import ALL_REDUCE
from lancet_kernels.schedules.rewrite.walk import (
    UNPLANNED,
    order,
    split,
    start_early_wait_late,
    walk,
    write_in_place,
)


class PairedMicrobatches:
    """Runs forward and backward of several microbatches, and adds their gradients to `.grad`.

    Args: step: one of which `cannot_be_paired` is "". plan: with the order of the pair.
    """

    def __init__(self, step: ModelStep, plan: Plan) -> None:
        model, captured = step.model, step.captured
        self._captured, self._accumulation = captured, step.accumulation
        self._name = class_name(model)
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        first = captured.forward_outputs
        results = step.module.graph.output_node().args[0]
        halves = split(replace(step, module=copy_of(step.module)), plan).halves
        self._saved = [node.name for node in halves[0].graph.output_node().args[0][first:]]
        self._pair = pair_of(*halves)
        mixed = replace(step, module=self._pair.module, forward_outputs=None)
        walk(mixed, replace(UNPLANNED, order=plan.pair), (order, start_early_wait_late, write_in_place))
        walk(replace(step, halves=halves), UNPLANNED, (start_early_wait_late, write_in_place))
        self._alone = [_RunnableGraph(half) for half in halves]
        self._together = _RunnableGraph(self._pair.module)
        self._gradients = {i - first: name for i, name in captured.parameter_of_gradient().items()}
        self._backward_outputs = len(results) - first
        self._results = first
        # Parameters that FSDP shards: their collectives hold the gradients of earlier microbatches. Those of
        # others are in `.grad`, which the all-reduce adds (`ops.comm.collectives`).
        self._held_by_sums = {
            self._parameters[name]
            for node in step.module.graph.nodes
            if node.target is not ALL_REDUCE
            for name in (GRADIENTS_OF.get(node) or ())
            if name in self._parameters
        }

    @torch.no_grad()
    def __call__(self, batches: Sequence[Arguments], scale: float) -> list[object]:
        """The result of the step for each microbatch. Args: scale: of the loss.

        Raises: UserError for a step without a loss.
        """
        before = {parameter: parameter.grad for parameter in self._parameters.values()}
        for parameter in before:
            parameter.grad = None
        try:
            with during(runs_a_plan=True):
                results = self._run(batches, scale)
        except BaseException:
            self._accumulation.forget()
            for parameter, gradient in before.items():
                parameter.grad = gradient
            raise
        for parameter, gradient in before.items():
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        return results

    def _run(self, batches: Sequence[Arguments], scale: float) -> list[object]:
        forward, backward = self._alone
        state = self._captured.state()
        outputs = forward(self._forward_inputs(state, batches[0]))
        results = []
        for number in range(1, len(batches) + 1):
            flat, saved = self._saved_by(outputs)
            results.append(pytree.tree_unflatten(flat, self._captured.result_structure))
            saved |= self._tangents(flat, scale)
            if number == len(batches):
                self._add(backward([saved.pop(name) for name in backward.inputs]), summed=True)
                break
            values = {self._pair.backward_inputs[name]: saved.pop(name) for name in backward.inputs}
            new = self._forward_inputs(state, batches[number])
            names = map(self._pair.forward_inputs.__getitem__, forward.inputs)
            values |= dict(zip(names, new, strict=True))
            with self._accumulation.without_sums():
                # The pair frees what the first microbatch saved as it goes, if nothing else refers to it.
                outputs = self._together([values.pop(name) for name in self._together.inputs])
                self._add(outputs[: self._backward_outputs], summed=False)
            del outputs[: self._backward_outputs]
        return results

    def _saved_by(self, outputs: list) -> tuple[list, dict[str, object]]:
        """The results of a forward, and the tensors that it saved, by name. Args: outputs: is emptied."""
        flat = outputs[: self._results]
        saved = dict(zip(self._saved, outputs[self._results :], strict=True))
        outputs.clear()
        return flat, saved

    def _forward_inputs(self, state: Callable[[str], Tensor], batch: Arguments) -> list[object]:
        leaves = pytree.tree_leaves(batch)
        return [placeholder_value(node, state, leaves) for node in self._alone[0].placeholders.values()]

    def _tangents(self, flat: Sequence[Tensor], scale: float) -> dict[str, Tensor]:
        """Gradients of the results: for the loss, the first single number, the scale; for others zeros."""
        results = {
            name: flat[node.meta["desc"].output.idx]
            for name, node in self._alone[1].placeholders.items()
            if is_tangent(node)
        }
        loss = next((name for name, result in results.items() if result.numel() == 1), None)
        if loss is None:
            raise no_loss(self._name)
        return {n: torch.full_like(r, scale if n == loss else 0.0) for n, r in results.items()}

    def _add(self, gradients: Sequence[Tensor | None], summed: bool) -> None:
        for i, name in self._gradients.items():
            gradient, parameter = gradients[i], self._parameters[name]
            if gradient is None:
                continue
            if not summed and parameter in self._held_by_sums:
                continue
            if isinstance(parameter, DTensor):
                gradient = gradient[tuple(slice(size) for size in parameter.to_local().shape)]
            if parameter.grad is None:
                # Outputs of a graph may share memory, and have other strides than their parameters.
                parameter.grad = torch.empty_like(parameter)
                local_tensor(parameter.grad).copy_(gradient)
            else:
                local_tensor(parameter.grad).add_(gradient)


def loss_of(result: object, name: str) -> Tensor:
    """The first number that requires a gradient in the result of the step `name`. Raises: UserError."""
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.numel() == 1:
            return leaf
    raise no_loss(name)


def no_loss(name: str) -> UserError:
    return UserError(
        f"result of {name}",
        got="no number that requires a gradient",
        expected="the loss, alone or as the first such tensor",
        do="return the loss of the step",
    )


class _RunnableGraph:
    """placeholders: by name, in order."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.placeholders = {node.name: node for node in module.graph.find_nodes(op="placeholder")}
        self.inputs = list(self.placeholders)
        self._run = GraphRunner(module, Phase.BACKWARD, Recorder())

    def __call__(self, values: list[object]) -> list:
        """Args: values: of the placeholders; the list is emptied. Returns: the outputs."""
        return list(cast(Sequence, self._run(values)))


def cannot_be_paired(step: ModelStep) -> str:
    """The reason why microbatches of a step cannot run in pairs; "" if they can."""
    if not step.captured.returns_alone:
        return "the step changes a buffer or an input"
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(step.arguments)):
        return "an input requires a gradient"
    hooked = (name for name, parameter in step.model.named_parameters() if has_hooks(parameter))
    name = next(hooked, "")
    return f"a hook on {name}, which they do not call" if name else ""


def with_pair(step: ModelStep, plan: Plan, *, must: bool) -> Plan:
    """The plan with the order of a pair, which rank 0 plans within the plan's memory limit. Collective.

    Args: must: raise a UserError on all ranks where microbatches cannot run in pairs; else the pair is empty.
    """

    def planned() -> tuple[tuple[str, ...], float]:
        reason = "a fused launch" if any(group.fused for group in plan.fused) else ""
        reason = reason or cannot_be_paired(step)
        if reason and must:
            raise UserError(
                "pairs of microbatches", got=reason, expected="a step without", do="use another strategy"
            )
        if reason:
            return (), 0.0
        halves = split(replace(step, module=copy_of(step.module)), plan).halves
        pair = pair_of(*halves)
        program = program_of_pair(pair, step.program)
        limit_gb = plan.report.memory_limit_gb
        limit = None if limit_gb is None else limit_gb * 1e9
        best = OrderSearch(program, step.cost).best(limit, search=True)
        return tuple(program.instructions[i].name for i in best.order), best.iteration_ms

    names, milliseconds = result_of_first_rank(step.groups.world, planned)
    return replace(plan, pair=names).reported(pair_ms=milliseconds)
