"""torch's trace of a module's forward, and the values that the trace assumes to be constant.

A trace contains every number, flag and mode that the forward read, as a constant. torch.compile checks before
each call that none of them has changed; `Assumptions` does that for a graph that runs without torch.compile.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any
from unittest import mock

import torch
import torch._dynamo.config
from torch import fx, nn
from torch._dynamo import functional_export
from torch._dynamo.convert_frame import CaptureOutput
from torch._dynamo.guards import CheckFunctionManager
from torch._dynamo.hooks import Hooks
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import TempLocalSource
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch._dynamo.variables.base import VariableTracker

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.plain_tensors import PlainTensors, TracedFunction
from lancet_kernels.ops.context import during


class Assumptions:
    """The values that the trace of a module assumes to be constant: modes, numbers, hooks, dtypes and shapes
    of parameters, attributes of objects in the module. Inputs and autocast are not among them.
    """

    def __init__(self, module: nn.Module, captured: CaptureOutput) -> None:
        self._function = TracedFunction(module)
        hooks_too = torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)
        with hooks_too, get_metrics_context(), dynamo_timed("lancet_assumptions"):
            manager: CheckFunctionManager = captured.graph_capture_output.build_guards(
                self._function.code, Hooks(guard_filter_fn=self._of_module)
            )
        self._manager = manager
        self._check = manager.guard_manager.check

    def hold(self, module: nn.Module) -> bool:
        """Is everything as it was when the module was traced? Takes some microseconds per submodule."""
        return self._check(self._function.locals(module))

    def broken(self, module: nn.Module) -> str:
        """The first assumption that no longer holds, in terms of the module: `dropout.p == 0.1`."""
        result = self._manager.guard_manager.check_verbose(self._function.locals(module))
        for code in result.verbose_code_parts:
            return self._function.plain(code.split("  # ")[0].strip())
        return ""

    def _of_module(self, guards: Sequence) -> list[bool]:
        """For each of the trace's guards: is it about the module, rather than its inputs or torch's state?"""
        states = ("GLOBAL_STATE", "SHAPE_ENV")
        reads_arguments = self._function.reads_arguments
        return [g.guard_type not in states and not reads_arguments(g.orig_guard.name) for g in guards]


@contextlib.contextmanager
def _writes(paths: list[str]) -> Iterator[None]:
    """Append to `paths` what a trace inside the context writes outside its own local variables, without
    assignments that do not change a value."""
    written: dict[str, list[str] | None] = {}  # by source; None where it has no attributes
    original = SideEffects._get_modified_vars

    def spy(effects: SideEffects) -> list:
        variables = list(original(effects))
        for variable in variables:
            attributes = effects.store_attr_mutations.get(variable, {})
            # A temporary source: an object that the forward itself builds, to return it, say.
            if not isinstance(variable.source, (TempLocalSource, NoneType)):
                changed = [
                    name for name, value in attributes.items() if not _as_before(variable, name, value)
                ]
                written[str(variable.source.name)] = changed if attributes else None
        return variables

    with (
        mock.patch.object(SideEffects, "_get_modified_vars", spy),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        yield
    for warning in caught:
        text = str(warning.message)
        if "side effects happened in the model.forward" not in text:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
            continue
        for source in re.findall(r"\"(.*?)\"", text[text.index("[") :]):
            attributes = written.get(source)
            paths += [source] if attributes is None else [f"{source}.{name}" for name in attributes]


def _as_before(variable: Any, name: str, value: VariableTracker) -> bool:
    """Is the value that a trace assigns to an attribute the constant that it already has?"""
    if not value.is_python_constant() or not hasattr(getattr(variable, "value", None), name):
        return False
    before, after = getattr(variable.value, name), value.as_python_constant()
    return type(before) is type(after) and before == after


def trace(
    module: nn.Module, inputs: Sequence[object], by_name: Mapping[str, object]
) -> tuple[fx.GraphModule, PlainTensors, Callable[[], Assumptions]]:
    """The forward of a module as one graph, its plain tensors, and a function that gives its `Assumptions`.

    Raises: UserError for a forward with side effects (it writes an attribute, or a list outside), which the
    graph would not repeat; torch's errors for a forward that is not one graph.
    """
    captures: list[CaptureOutput] = []
    original = functional_export.fullgraph_capture

    def spy(*args: Any, **options: Any) -> CaptureOutput:
        captured = original(*args, **options)
        if captured.backend_input is not None:
            # torch leaves the graph among the variables of the Python module, which would keep the model.
            captured.graph_capture_output.f_globals[captured.backend_input.backend_id] = None
        captures.append(captured)
        return captured

    writes: list[str] = []
    # Sizes are numbers, even if this class of module was captured with other sizes before.
    # A checkpointed block may append to a list outside of it (router logits); only tensors are recomputed.
    settings = torch._dynamo.config.patch(
        automatic_dynamic_shapes=False,
        assume_static_by_default=True,
        skip_fwd_side_effects_in_bwd_under_checkpoint=True,
        allow_rnn=True,
    )
    with settings, during(expects_sizes=True):
        with mock.patch.object(functional_export, "fullgraph_capture", spy), _writes(writes):
            graph = functional_export.dynamo_graph_capture_for_export(module)(*inputs, **by_name)
        function = TracedFunction(module)
        if writes:
            names = ", ".join(sorted({function.plain(source) for source in writes}))
            raise UserError(
                f"forward of {type(module).__name__}",
                got=f"a forward that writes {names}",
                expected="a forward without side effects: a plan would not repeat them",
                do="return the value instead, change tensors in place (add_), or train without optimize()",
            )
        plain = PlainTensors(module, graph, function)
        return graph, plain, partial(Assumptions, module, captures[-1])
