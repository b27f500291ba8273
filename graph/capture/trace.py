"""torch's trace of a module's forward, and the values that the trace assumes to be constant.

A trace contains every number, flag and mode that the forward read, as a constant. torch.compile checks before
each call that none of them has changed; `Assumptions` does that for a graph that runs without torch.compile.

Tracing records the module of each node, and for a backward node the module of its forward (`layer_name`): for
error messages when a collective fails.

Plain tensors are those that a forward reads and that are neither inputs nor parameters nor buffers: an
attribute, an element of a list, a field of a configuration, a variable of a Python module. torch's trace
would hold on to the tensor; here it is an input of the graph, read anew before each call, so a replaced
tensor takes effect. (Its dtype, sizes and strides are assumptions of the trace.)
`TracedFunction` is what torch traces for a module; a trace names what it reads by expressions in its scope.

What PEFT and transformers do in a forward that a graph cannot hold is replaced while it is traced:

requires_grad_() of a result     `enable_input_require_grads` calls it on the embeddings, so that a
                                 checkpointed block behind frozen ones has an input with a gradient. In a
                                 graph, what needs one follows from its parameters: it does nothing.
LoRA of experts                  `target_parameters` registers a parametrization in each forward, and
                                 removes it. In a trace the layer takes the adapted weight from `now`.
"""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType
from typing import Any
from unittest import mock

import torch
import torch._dynamo.config
from torch import Tensor, fx, nn
from torch._dynamo import functional_export
from torch._dynamo.convert_frame import CaptureOutput, get_traced_fn
from torch._dynamo.guards import CheckFunctionManager, _get_closure_vars
from torch._dynamo.hooks import Hooks
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import TempLocalSource
from torch._dynamo.utils import dynamo_timed, get_metrics_context
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.tensor import TensorVariable
from torch._guards import Source

from lancet_kernels.errors import UserError, class_name
from lancet_kernels.graph.capture.fsdp_parameters import Twin
from lancet_kernels.graph.from_fx import is_instruction, op_name
from lancet_kernels.graph.meta import REGION
from lancet_kernels.graph.ops import STARTED, facts
from lancet_kernels.ops.base import BEFORE_A_TRACE, during, now
from lancet_kernels.ops.comm.waiting import enter_layer


@contextlib.contextmanager
def frameworks_traced() -> Iterator[None]:
    """A context for a trace, with the replacements above."""
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(TensorVariable, "method_requires_grad_", _requires_grad))
        if (wrapper := _param_wrapper()) is not None:
            patches.enter_context(mock.patch.object(wrapper, "_activate_lora", _adapted))
        yield


def _param_wrapper() -> Any:
    return getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", None)


def _check_adapters(model: nn.Module) -> None:
    """Raise UserError for adapters of a layer that does not read `now.weights`: a trace would leave them
    out."""
    kind = _param_wrapper()
    for wrapper in model.modules() if kind is not None else ():
        if isinstance(wrapper, kind) and not getattr(wrapper.get_base_layer(), "takes_weights", False):
            raise UserError(
                f"adapters of {wrapper.parameter_name}",
                got=f"a {class_name(wrapper.get_base_layer())}, which is no layer of lancet_kernels",
                expected="experts of lancet_kernels",
                do='call convert(model) before PEFT, or model.set_experts_implementation("lancet")',
            )


_torch_requires_grad: Callable[..., VariableTracker] = TensorVariable.method_requires_grad_


def _requires_grad(variable: TensorVariable, *arguments: object, **by_name: object) -> VariableTracker:
    """Ignore the call on a result: torch refuses a graph whose outputs depend on such a result."""
    flags = [a for a in (*arguments, *by_name.values()) if isinstance(a, (bool, VariableTracker))]
    is_on = all(flag is True or getattr(flag, "value", None) is True for flag in flags)
    if variable.source is None and is_on:
        return variable
    return _torch_requires_grad(variable, *arguments, **by_name)


@contextlib.contextmanager
def _adapted(wrapper: Any, active_adapters: list[str]) -> Iterator[None]:
    """In place of `ParamWrapper._activate_lora`."""
    name, weight = wrapper.parameter_name, wrapper.get_param()
    for adapter in active_adapters:
        if adapter in wrapper.lora_A:
            weight = weight + wrapper.get_delta_weight(adapter)
    with during(weights={**now.weights, name: weight}):
        yield


class TracedFunction:
    """The forward of a module, or the call around it where the module has hooks."""

    def __init__(self, module: nn.Module) -> None:
        self._function = get_traced_fn(module)[0]
        self.code = self._function.__code__
        if self.code.co_argcount:
            self._self_name = self.code.co_varnames[0]
            self._self_expression = f"L['{self._self_name}']"
        else:
            # A wrapper (*args, **by_name).
            self._self_name = self.code.co_varnames[self.code.co_kwonlyargcount]
            self._self_expression = f"L['{self._self_name}'][0]"

    def locals(self, module: nn.Module) -> dict[str, object]:
        """The local variables that expressions refer to, without the arguments of the call."""
        is_argument = self._self_expression == f"L['{self._self_name}']"
        by_name: dict[str, object] = {self._self_name: module if is_argument else (module,)}
        cells = self._function.__closure__ or ()
        for name, cell in zip(self.code.co_freevars, cells, strict=True):
            by_name[name] = cell.cell_contents
        return by_name

    def value(self, expression: Any, module: nn.Module) -> Any:
        """The current value of an expression, text or compiled."""
        scope = {"L": self.locals(module), "G": self._function.__globals__}
        return eval(expression, _get_closure_vars(), scope)

    def reads_arguments(self, expression: str) -> bool:
        """Does an expression depend on the arguments of the call, rather than on the module, a variable
        around it or one of a Python module?"""
        closure = {f"L['{name}']" for name in self.code.co_freevars}
        rest = expression.replace(self._self_expression, "")
        return not set(re.findall(r"L\['\w+'\]", rest)) <= closure

    def plain(self, code: str) -> str:
        """An expression of torch's guards, as a user would write it.

        `L['self']._modules['a'].p == 0.1` -> `a.p == 0.1`
        """
        code = code.replace(self._self_expression, "")
        code = re.sub(r"^not ___dict_contains\('(\w+)', (.*?)\.?__dict__\)$", r"no \2.\1", code)
        code = re.sub(r"(?:\._modules|\._parameters|\._buffers|\.__dict__)?\['(\w+)'\]", r".\1", code)
        code = re.sub(r"___check_type_id\((.*?), \d+\).*", r"type of \1", code)
        code = re.sub(r"___check_obj_id\((.*?), \d+\).*", r"identity of \1", code)
        code = re.sub(r"^not (.*)\._(\w+_hooks)$", r"no \2 on \1", code)
        return re.sub(r"(?:(?<![\w)\]'])|(?<= '))\.(?=[A-Za-z_])", "", code)


HOLDER = "_plain_tensors"
"""The submodule of the traced module that has plain tensors as buffers."""


class PlainTensors:
    """The plain tensors of a module, and the buffers that its trace reads instead.

    paths: by name in the traced module, the expression of each as a user would write it.
    """

    def __init__(self, module: nn.Module, traced: fx.GraphModule, function: TracedFunction) -> None:
        """Args: traced: the module's trace; its placeholders for state become attributes.

        Raises: UserError for what would be a constant of the graph, although it changes; for a tensor that
            requires a gradient: optimizers, checkpoints and sums over ranks would not know it.
        """
        self._module, self._function = module, function
        self._expressions: dict[str, CodeType] = {}
        self.paths: dict[str, str] = {}
        # The first name of each parameter and buffer.
        state = [*module.named_buffers(), *module.named_parameters()]
        names = {id(tensor): name for name, tensor in state}
        holder = nn.Module()
        for node in traced.graph.find_nodes(op="placeholder"):
            expression = node._dynamo_source.name
            if expression.startswith("random_value"):
                raise self._refuse("a random number of Python's", "random numbers of torch", "torch.rand")
            if function.reads_arguments(expression):
                continue
            if expression.startswith("___from_numpy("):
                path = function.plain(expression.removeprefix("___from_numpy(").removesuffix(")"))
                got = f"the numpy array {path}, which a graph cannot read"
                raise self._refuse(got, "a tensor", "torch.from_numpy() where it is assigned, not in forward")
            tensor = function.value(expression, module)
            name = names.get(id(tensor))
            if name is None:
                leaf = f"t{len(self.paths)}"
                name = f"{HOLDER}.{leaf}"
                self.paths[name] = path = function.plain(expression)
                self._expressions[name] = compile(expression, name, "eval")
                if tensor.requires_grad:
                    got = f"{path}, which requires a gradient and is not registered"
                    do = "nn.Parameter as an attribute, nn.ParameterList or nn.ModuleList; compute in forward"
                    raise self._refuse(got, "parameters and what forward computes of them", do)
                holder.register_buffer(leaf, tensor)
            last = traced.graph.find_nodes(op="placeholder")[-1]
            with traced.graph.inserting_after(last), torch.no_grad():
                read = traced.graph.create_node("get_attr", name)
            read.meta = dict(node.meta)
            node.replace_all_uses_with(read)
        if self.paths:
            traced.add_module(HOLDER, holder)
        traced.recompile()

    def _refuse(self, got: str, expected: str, do: str) -> UserError:
        return UserError(f"forward of {class_name(self._module)}", got=got, expected=expected, do=f"use {do}")

    def values(self) -> dict[str, Tensor]:
        """The tensors as they are now, by name."""
        return {
            name: self._function.value(expression, self._module)
            for name, expression in self._expressions.items()
        }


class Assumptions:
    """The values that the trace of a module assumes to be constant: modes, numbers, hooks, dtypes and shapes
    of parameters, attributes of objects in the module; not inputs and autocast."""

    def __init__(self, module: nn.Module, captured: CaptureOutput) -> None:
        self._function = TracedFunction(module)
        hooks_too = torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)
        freed = mock.patch.object(CheckFunctionManager, "id_ref", _id_ref)
        with hooks_too, freed, get_metrics_context(), dynamo_timed("lancet_assumptions"):
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


def _id_ref(manager: CheckFunctionManager, guarded: object, _text: str) -> int:
    """As torch's, without the finalizer that keeps the manager, and so each plan's guards, as long as the
    guarded object, a module of torch, say. It ends compiled code; there is none."""
    with contextlib.suppress(TypeError):
        manager._weakrefs.setdefault(id(guarded), weakref.ref(guarded))
    return id(guarded)


class TwinAssumptions(Assumptions):
    """The assumptions of a twin's trace, compared with its model."""

    def __init__(self, twin: Twin, assumptions: Callable[[], Assumptions]) -> None:
        self._twin, self._assumptions = twin, assumptions()

    def hold(self, _model: nn.Module) -> bool:
        """Is everything as it was when the twin was traced?"""
        self._twin.update()
        return self._assumptions.hold(self._twin.module)

    def broken(self, _model: nn.Module) -> str:
        """The first assumption that no longer holds."""
        return self._assumptions.broken(self._twin.module)


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
            # A temporary source: an object that the forward itself builds, to return it, say. A mere Source,
            # which has no name: torch's stack of modes, one of which transformers enters for its masks.
            source = variable.source
            if source is not None and type(source) not in (TempLocalSource, Source):
                changed = [
                    name for name, value in attributes.items() if not _as_before(variable, name, value)
                ]
                written[str(source.name)] = changed if attributes else None
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
    for prepare in BEFORE_A_TRACE:
        prepare(module)
    _check_adapters(module)
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
        spied = mock.patch.object(functional_export, "fullgraph_capture", spy)
        with spied, frameworks_traced(), _writes(writes):
            graph = functional_export.dynamo_graph_capture_for_export(module)(*inputs, **by_name)
        function = TracedFunction(module)
        if writes:
            names = ", ".join(sorted({function.plain(source) for source in writes}))
            raise UserError(
                f"forward of {class_name(module)}",
                got=f"a forward that writes {names}",
                expected="a forward without side effects: a plan would not repeat them",
                do="return the value instead, change tensors in place (add_), or train without optimize()",
            )
        plain = PlainTensors(module, graph, function)
        return graph, plain, partial(Assumptions, module, captures[-1])


_KEYS = ("nn_module_stack", "fwd_nn_module_stack")
_COPIED = (*_KEYS, REGION.key)


def layer_name(node: fx.Node) -> str:
    """The path, in the captured module, of the module that a node belongs to; "" if it is unknown.

    Example: "model.blocks.3.feed_forward".
    """
    for key in _KEYS:
        for path, _ in reversed((node.meta.get(key) or {}).values()):
            return path.removeprefix("L['self']").removeprefix(".")
    return ""


def layers_of(graph: fx.Graph) -> dict[str, str]:
    """By name of an instruction, the path of its module, as `layer_name` gives it."""
    return {node.name: layer_name(node) for node in graph.nodes if is_instruction(node)}


def layer_meta(node: fx.Node) -> dict[str, object]:
    """The entries of `meta` to copy to a new node of the same layer, so that `layer_name` works for it, and a
    recomputed one stays one."""
    return {key: node.meta[key] for key in _COPIED if key in node.meta}


def announce_layers(module: fx.GraphModule, in_pieces: bool) -> None:
    """Insert a call of `enter_layer` before each collective of an MoE layer, if the layer changes there.

    Args: in_pieces: the graph is compiled in pieces; an exchange of counts, inside a piece, gets no call.
    """
    current = None
    for node in list(module.graph.nodes):
        row = facts(STARTED.get(node.target, op_name(node)))
        if not is_instruction(node) or not (row.kind.is_communication or row.of_a_layer):
            continue
        if in_pieces and op_name(node) == "lancet.exchange_counts":
            continue
        name = layer_name(node)
        if name and name != current:
            with module.graph.inserting_before(node):
                module.graph.call_function(enter_layer, (name,))
            current = name
    module.recompile()
