"""torch's trace of a module's forward, and what that trace takes for constant.

A trace holds every number, flag and mode that the forward read as a constant. torch.compile checks before
each call that none of them has changed; `Assumptions` is that check for a graph that is run without it.
Besides `capture`, this is the only file that touches torch's private interfaces.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch._dynamo.config
from torch import fx, nn
from torch._dynamo import functional_export
from torch._dynamo.convert_frame import CaptureOutput, get_traced_fn
from torch._dynamo.guards import CheckFunctionManager
from torch._dynamo.hooks import Hooks
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch._dynamo.variables.base import VariableTracker

from lancet_kernels.errors import UserError
from lancet_kernels.ops.rows import expected_sizes


class Assumptions:
    """What the trace of a module read and took for constant: modes, numbers, hooks, dtypes and shapes of
    parameters, settings in objects that the module holds. Not: its inputs, autocast.
    """

    def __init__(self, module: nn.Module, captured: CaptureOutput) -> None:
        self._function = get_traced_fn(module)[0]
        self._self_name, self._self_expression = _name_of_self(self._function)
        hooks_too = torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)
        with hooks_too, get_metrics_context(), dynamo_timed("lancet_assumptions"):
            manager: CheckFunctionManager = captured.graph_capture_output.build_guards(
                self._function.__code__, Hooks(guard_filter_fn=self._of_module)
            )
        self._manager = manager
        self._check = manager.guard_manager.check

    def hold(self, module: nn.Module) -> bool:
        """Is everything as it was when the module was traced? Some microseconds a submodule."""
        return self._check(self._locals(module))

    def broken(self, module: nn.Module) -> str:
        """The first assumption that does not hold any more, in terms of the module: `dropout.p == 0.1`."""
        result = self._manager.guard_manager.check_verbose(self._locals(module))
        return self._plain(result.verbose_code_parts[0]) if result.verbose_code_parts else ""

    def _locals(self, module: nn.Module) -> dict[str, object]:
        """The local variables of the module's forward, as far as assumptions speak of them."""
        function = self._function
        is_argument = self._self_expression == f"L['{self._self_name}']"
        by_name: dict[str, object] = {self._self_name: module if is_argument else (module,)}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            by_name[name] = cell.cell_contents
        return by_name

    def _of_module(self, guards: Sequence) -> list[bool]:
        """Which of the trace's guards are about the module, not about its inputs or all of torch."""
        closure = {f"L['{name}']" for name in self._function.__code__.co_freevars}

        def kept(guard: Any) -> bool:
            if guard.guard_type in ("GLOBAL_STATE", "SHAPE_ENV"):
                return False
            rest = guard.orig_guard.name.replace(self._self_expression, "")
            return set(re.findall(r"L\['\w+'\]", rest)) <= closure

        return [kept(guard) for guard in guards]

    def _plain(self, code: str) -> str:
        return plain_path(code.split("  # ")[0].strip(), self._self_expression)


def _name_of_self(function: Callable[..., object]) -> tuple[str, str]:
    """The parameter of a forward through which it gets its module, and the expression for the module."""
    code = function.__code__
    if code.co_argcount:
        name = code.co_varnames[0]
        return name, f"L['{name}']"
    # A wrapper (*args, **by_name).
    name = code.co_varnames[code.co_kwonlyargcount]
    return name, f"L['{name}'][0]"


def plain_path(code: str, self_expression: str = "L['self']") -> str:
    """An expression of torch's guards in the words of a user.

    `L['self']._modules['a'].p == 0.1` -> `a.p == 0.1`
    """
    code = code.replace(self_expression, "")
    code = re.sub(r"(?:\._modules|\._parameters|\._buffers|\.__dict__)?\['(\w+)'\]", r".\1", code)
    code = re.sub(r"___check_type_id\((.*?), \d+\).*", r"type of \1", code)
    code = re.sub(r"___check_obj_id\((.*?), \d+\).*", r"identity of \1", code)
    code = re.sub(r"^not (.*)\._(\w+_hooks)$", r"no \2 on \1", code)
    return re.sub(r"(?<![\w)\]'])\.(?=[A-Za-z_])", "", code)


@contextlib.contextmanager
def _writes(found: list[str]) -> Iterator[None]:
    """Collect into `found` what a trace inside the block writes outside of its own local variables, unless it
    writes back what was there before."""
    written: dict[str, list[str] | None] = {}  # by source; None where it has no attributes
    original = SideEffects._get_modified_vars

    def spy(effects: SideEffects) -> list:
        variables = list(original(effects))
        for variable in variables:
            attributes = effects.store_attr_mutations.get(variable, {})
            if variable.source is not None:
                changed = [
                    name for name, value in attributes.items() if not _as_before(variable, name, value)
                ]
                written[str(variable.source.name)] = changed if attributes else None
        return variables

    with (
        mock.patch.object(SideEffects, "_get_modified_vars", spy),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        yield
    for warning in said:
        text = str(warning.message)
        if "side effects happened in the model.forward" not in text:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
            continue
        for source in re.findall(r"\"(.*?)\"", text[text.index("[") :]):
            attributes = written.get(source)
            found += [source] if attributes is None else [f"{source}.{name}" for name in attributes]


def _as_before(variable: Any, name: str, value: VariableTracker) -> bool:
    """Is what a trace leaves in an attribute the constant that the object has there?"""
    if not value.is_python_constant() or not hasattr(getattr(variable, "value", None), name):
        return False
    before, after = getattr(variable.value, name), value.as_python_constant()
    return type(before) is type(after) and before == after


def trace(
    module: nn.Module, inputs: Sequence[object], by_name: Mapping[str, object]
) -> tuple[fx.GraphModule, Callable[[], Assumptions]]:
    """The forward of a module as one graph, and a function that says what it takes for constant.

    Raises: UserError for a forward that writes what would be lost (an attribute, a list outside); torch's
    errors for one that is not one graph.
    """
    captures: list[CaptureOutput] = []
    original = functional_export.fullgraph_capture

    def spy(*args: Any, **options: Any) -> CaptureOutput:
        captures.append(original(*args, **options))
        return captures[-1]

    writes: list[str] = []
    # Sizes are numbers, also when this class of module was captured with others before.
    static = torch._dynamo.config.patch(automatic_dynamic_shapes=False, assume_static_by_default=True)
    with static, expected_sizes():
        with mock.patch.object(functional_export, "fullgraph_capture", spy), _writes(writes):
            graph = functional_export.dynamo_graph_capture_for_export(module)(*inputs, **by_name)
        expression = _name_of_self(get_traced_fn(module)[0])[1]
        if writes:
            names = ", ".join(sorted({plain_path(source, expression) for source in writes}))
            raise UserError(
                f"forward of {type(module).__name__}",
                got=f"a forward that writes {names}",
                expected="a forward without side effects: a plan would not repeat them",
                do="return the value instead, or train without optimize()",
            )
        return graph, partial(Assumptions, module, captures[-1])
