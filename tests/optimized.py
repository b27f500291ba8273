"""`optimize` for tests: without measuring, with plans that cut, and what a step gives."""

import contextlib
import sys
from collections.abc import Iterator
from unittest import mock

from torch import nn

import lancet_kernels.schedules.rewrite.walk as library
from lancet_kernels.optimization.optimize import optimize
from lancet_kernels.optimization.optimized_module import OptimizedModule
from lancet_kernels.optimization.step import ModelStep, capture_step
from lancet_kernels.schedules.cut.partition_range import PartitionOptions
from lancet_kernels.schedules.rewrite.cut import GraphCutter
from lancet_kernels.schedules.strategies import Planner, PlanningOptions
from tests.planned_steps import Outcome, dear_communication, outcome

BOUND = 1e-10
"""Largest difference in float64, as the issue asks; seen: 1e-15."""


def plan_dearly(program, _cost, options, cut, **others):
    """A planner as if communication were dear: tiny models would not be cut otherwise."""
    cut = GraphCutter(cut.module, program, dear_communication)
    return Planner(program, dear_communication, options, cut, **others)


def optimized(module: nn.Module, inputs: tuple, strategy: str = "lancet", **options) -> OptimizedModule:
    """`optimize` without measuring, with plans that cut, in at most 3 parts: 4 take twice as long to plan."""
    options.setdefault("reduce_gradients", "sum")
    options.setdefault("options", PlanningOptions(PartitionOptions(most_parts=3)))
    with mock.patch.object(library, "Planner", plan_dearly):
        return optimize(module, inputs, strategy=strategy, cluster="p3dn", **options)


@contextlib.contextmanager
def one_capture() -> Iterator[None]:
    """Within it, `optimize` gets the step that it captured first: for several strategies of one step."""
    module, steps = sys.modules[optimize.__module__], []

    def captured_once(*arguments: object) -> ModelStep:
        if not steps:
            steps.append(capture_step(*arguments))
        return steps[0]

    with mock.patch.object(module, "capture_step", captured_once):
        yield


def outcome_of(module: nn.Module, inputs: tuple, reduced: bool) -> Outcome:
    """The outcome of one step of a module, optimized or as it is."""
    original = module.module if isinstance(module, OptimizedModule) else module
    return outcome(original, module(*inputs), reduced)
