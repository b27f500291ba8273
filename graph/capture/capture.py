"""Captures the joint forward and backward graph of a module, and turns such a graph into a function again.

    captured = capture(module, inputs)
    captured.joint            one fx graph of aten and lancet ops, forward and backward
    captured.compile(split)   a function of the module's inputs that runs the graphs of `split` under autograd

Nothing is executed: tensors are fake during capture, so a model may be larger than this machine.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import compiled_autograd
from torch._dynamo.exc import ObservedException, TensorifyScalarRestartAnalysis
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,
    ParamAOTInput,
    PlainAOTOutput,
)
from torch._functorch.aot_autograd import (
    aot_compile_joint_with_descriptors,
    aot_export_joint_with_descriptors,
)
from torch._functorch.partitioners import default_partition
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from lancet_kernels import ops
from lancet_kernels.errors import UserError, class_name
from lancet_kernels.graph.capture.captured_graph import (
    garbage_collection,
    insert_recomputation,
    set_value,
    tensors_restored,
)
from lancet_kernels.graph.capture.run import GraphRunner, Recorder
from lancet_kernels.graph.capture.trace import Assumptions, PlainTensors, trace
from lancet_kernels.graph.meta import forward_first
from lancet_kernels.graph.program import Phase
from lancet_kernels.ops.base import during

Split = Callable[[fx.GraphModule, int], tuple[fx.GraphModule, fx.GraphModule]]
"""(joint graph, number of forward outputs) -> (forward graph, backward graph)."""
Give = Callable[[Iterable[tuple[str, Tensor | None]]], None]
"""Takes gradients, by parameter."""

FAKE_TENSOR_LOG = logging.getLogger("torch._subclasses.fake_tensor")
"""A page for an operator that fails on fake tensors; the error says the same."""
_Line = tuple[str, int, str]
"""File, number and text of a line."""


class CaptureError(UserError):
    """The module cannot be captured as one graph. The message has torch's reason."""


@dataclass
class Captured:
    """A module's joint graph, and the state of torch that is needed to run it."""

    module: nn.Module
    """The traced copy; shares the parameters of the original."""
    joint: fx.GraphModule
    plain: PlainTensors
    """Read anew in each call."""
    assumptions: Callable[[], Assumptions]
    """Computes what the graph assumes to be constant; on demand, as it takes some tenths of a second."""
    _descriptors: Any
    _tracing_context: TracingContext
    shards: Callable[[], Mapping[str, Tensor]] = dict
    """Gives the graph's inputs in place of sharded parameters, by name; called in each call."""
    _places: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    """Owner and attribute of a parameter or buffer of the traced module, by name."""

    @property
    def forward_outputs(self) -> int:
        """The number of forward outputs of the joint graph; its other outputs are gradients."""
        outputs = self.joint.graph.output_node().meta["desc"]
        return sum(d is not None and not isinstance(d, GradAOTOutput) for d in outputs)

    @property
    def result_structure(self) -> pytree.TreeSpec:
        """The structure of the module's result, whose leaves are the forward's outputs."""
        return self._descriptors.out_spec

    @property
    def returns_alone(self) -> bool:
        """Does the forward return its results and change nothing: no buffer, no input?"""
        outputs = self.joint.graph.output_node().meta["desc"][: self.forward_outputs]
        return all(isinstance(d, PlainAOTOutput) for d in outputs)

    def parameter_of_gradient(self) -> dict[int, str]:
        """Position of a gradient among the joint graph's outputs -> name of its parameter."""
        descriptors = self.joint.graph.output_node().meta["desc"]
        return {
            i: d.grad_of.target
            for i, d in enumerate(descriptors)
            if isinstance(d, GradAOTOutput) and isinstance(d.grad_of, ParamAOTInput)
        }

    def with_graph(self, joint: fx.GraphModule) -> Captured:
        """The same step with another joint graph, to be compiled beside this one."""
        # torch records in these what it has compiled.
        state, graph = self._descriptors._aot_state, self._descriptors._aot_graph_capture
        descriptors = replace(
            self._descriptors,
            _aot_state=replace(state, fw_metadata=copy.copy(state.fw_metadata)),
            _aot_graph_capture=replace(graph, graph_module=joint),
        )
        return replace(self, joint=joint, _descriptors=descriptors)

    def compile(
        self,
        split: Split,
        recorder: Recorder | None = None,
        inner_compile: str = "",
        give: Give | None = None,
    ) -> Callable[..., object]:
        """A function of the module's inputs that runs the two graphs under autograd. Call it once.

        Args:
            recorder: records the start and end of instructions, while it is on.
            inner_compile: a backend of torch.compile for the pieces between communications; "": none.
            give: called at the end of each backward with the gradients of the parameters.
        """
        recorder = recorder or Recorder()
        parameters = self.parameter_of_gradient()
        first_gradient = 0

        def give_gradients(results: Sequence[Tensor | None]) -> None:
            if give is not None:
                give((name, results[i - first_gradient]) for i, name in parameters.items())

        def runner(phase: Phase) -> Callable[..., GraphRunner]:
            then = give_gradients if phase is Phase.BACKWARD else None
            return lambda graph, _inputs: GraphRunner(graph, phase, recorder, inner_compile, then)

        def partition(joint: fx.GraphModule, _inputs, *, num_fwd_outputs: int, **_):
            nonlocal first_gradient
            first_gradient = num_fwd_outputs
            return split(joint, num_fwd_outputs)

        def compile_joint() -> Callable[..., object]:
            return aot_compile_joint_with_descriptors(
                self._descriptors,
                partition_fn=partition,
                fw_compiler=runner(Phase.FORWARD),
                bw_compiler=runner(Phase.BACKWARD),
            )

        fake_mode = self._tracing_context.fake_mode
        assert fake_mode is not None
        # Saved tensors may be read again (retain_graph=True). At run time torch asks for an empty list, too.
        self._descriptors._aot_state.fw_metadata.bw_donated_idxs = []
        with (
            # The same contexts as during tracing, which torch assumes here.
            tracing(self._tracing_context),
            compiled_autograd._disable(),
            fake_mode,
            enable_python_dispatcher(),
            torch._functorch.config.patch(donated_buffer=False),
            # As in `capture`.
            _use_lazy_graph_module(True),
        ):
            try:
                call = compile_joint()
            except TensorifyScalarRestartAnalysis:
                # A float64 tensor without dimensions: torch has recorded that it is a tensor, and must be
                # called again.
                call = compile_joint()
        names = [*self._descriptors.params_spec, *self._descriptors.buffers_spec]

        def run(*inputs: object, **by_name: object) -> object:
            return call(*map(self.state(), names), *inputs, **by_name)

        return run

    def state(self) -> Callable[[str], Tensor]:
        """A function: name of a parameter, buffer or plain tensor -> the graph's input for it."""
        values = {**self.plain.values(), **self.shards()}
        return lambda name: values[name] if name in values else self._attribute(name)

    def _attribute(self, name: str) -> Tensor:
        if name not in self._places:
            owner, _, leaf = name.rpartition(".")
            self._places[name] = self.module.get_submodule(owner), leaf
        return getattr(*self._places[name])


@garbage_collection(on=False)
def capture(
    module: nn.Module, inputs: Sequence[object], by_name: Mapping[str, object] | None = None
) -> Captured:
    """Capture the joint graph of `module(*inputs, **by_name)`.

    Args: inputs: example inputs; the graph is valid for their shapes.
    Raises: CaptureError, with torch's reason, if the module is not one graph (it branches on data, say).
    """
    try:
        # Passes change the graphs many times before anybody needs their Python code.
        with mock.patch.object(FAKE_TENSOR_LOG, "disabled", True), _use_lazy_graph_module(True):
            traced, plain, assumptions = trace(module, inputs, by_name or {})
        for node in traced.graph.nodes:
            _check_no_number(module, node, node.meta.get("example_value"))
        fake_mode = traced.meta["fake_mode"]
        context = TracingContext(fake_mode)
        with (
            tensors_restored(traced),
            tracing(context),
            during(expects_sizes=True),
            _without_onednn(),
            _use_lazy_graph_module(True),
            contextlib.ExitStack() as stack,
        ):
            # By default, torch makes symbols of sizes and integers, also in later captures with the same
            # tensors, which it marks when a graph has run.
            joint = aot_export_joint_with_descriptors(
                stack, traced, tuple(inputs), dict(by_name or {}), ignore_shape_env=True
            )
    except UserError:
        raise
    except Exception as error:
        raise _refusal(module, error) from error
    _make_sizes_numbers(module, joint.graph_module)
    for node in joint.graph_module.graph.nodes:
        if node.op == "call_function":
            # torch leaves the backward of a `torch.autograd.Function` without a tag.
            node.meta.setdefault("partitioner_tag", "is_backward")
    insert_recomputation(joint.graph_module)
    return Captured(traced, joint.graph_module, plain, assumptions, joint, context)


def _make_sizes_numbers(module: nn.Module, joint: fx.GraphModule) -> None:
    """Replace the symbolic sizes of a graph by the numbers that they stand for, so that sizes can be
    compared.

    Raises: CaptureError for a size that depends on data.
    """

    def with_numbers(value: object) -> object:
        if not isinstance(value, FakeTensor) or all(type(n) is int for n in (*value.shape, *value.stride())):
            return value
        sizes = [int(n) for n in value.shape], [int(n) for n in value.stride()]
        with value.fake_mode:
            static = torch.empty_strided(*sizes, dtype=value.dtype, device=value.device)
        return static.requires_grad_(value.requires_grad)

    for node in joint.graph.nodes:
        value = node.meta.get("val")
        _check_no_number(module, node, value)
        try:
            if isinstance(value, (tuple, list)):
                node.meta["val"] = type(value)(map(with_numbers, value))
            elif isinstance(value, Tensor):
                set_value(node, with_numbers(value))
        except (RuntimeError, ValueError) as error:
            raise _refusal(module, error, node) from error


def _check_no_number(module: nn.Module, node: fx.Node, value: object) -> None:
    """Raise CaptureError for a node whose value is a number that depends on data: `loss.item()`."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        error = ValueError(f"the result of {node.target} is a number that depends on data")
        raise _refusal(module, error, node) from error


def split_joint(joint: fx.GraphModule, forward_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split the joint graph into forward and backward; the forward saves the tensors that the backward reads.
    The order of the nodes on each side is kept."""
    forward = forward_first(joint.graph)
    for node in joint.graph.nodes:
        if node.op == "call_function":
            # torch's partitioner reads this tag to find the last forward node.
            node.meta["partitioner_tag"] = "is_forward" if node in forward else "is_backward"
    # Inputs that are numbers have no `val`.
    placeholders = [node.meta.get("val") for node in joint.graph.nodes if node.op == "placeholder"]
    halves = default_partition(
        joint, placeholders, num_fwd_outputs=forward_outputs, static_lifetime_input_indices=[]
    )
    names = {node.name for node in forward}
    for half, is_forward in zip(halves, (True, False), strict=True):
        # torch leaves ops that may draw random numbers (fused attention), and what waits for collectives
        # depend on, in both graphs, so they would run twice.
        for node in reversed(half.graph.nodes):
            if node.op == "call_function" and (node.name in names) != is_forward and not node.users:
                half.graph.erase_node(node)
        half.recompile()
    return halves


def _refusal(module: nn.Module, error: Exception, node: fx.Node | None = None) -> CaptureError:
    """The error for a module that torch cannot trace. Args: node: whose result is the reason."""
    if isinstance(error.__cause__, ObservedException):  # what the traced code raised
        reason = str(error.__cause__)
    else:
        lines_of_torch = map(str.strip, str(error).splitlines()[:3])
        reason = " ".join(line for line in lines_of_torch if not line.startswith("Hint:")).strip()
    if node is not None:
        written = re.findall(r'File "(.+)", line (\d+), in .*\n\s*(.*)', node.meta.get("stack_trace") or "")
        lines = [(file, int(number), code) for file, number, code in written]
    else:
        lines = [(f.filename, f.lineno, f.line) for f in getattr(error, "real_stack", None) or ()]
    return CaptureError(
        f"capture of {class_name(module)}",
        got=f"{_hook(module, error, lines)}{_line_of_user(lines)}{type(error).__name__}: {reason}",
        expected="a module that torch.compile(fullgraph=True) accepts",
        do="remove what it names, or train without optimize()",
    )


def hooks_of(module: nn.Module) -> tuple[Mapping[int, Callable[..., object]], ...]:
    """The hooks around a module's forward and, last, around its backward, by kind."""
    return (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )


def _hook(module: nn.Module, error: Exception, lines: Sequence[_Line]) -> str:
    """`hook scale on blocks.0.norm, `, if torch cannot trace that hook; "": it is none."""
    for path, part in module.named_modules():
        for number, hooks in enumerate(hooks_of(part)):
            for hook in hooks.values():
                while isinstance(hook, partial):
                    hook = hook.func
                is_backward = number >= 2
                # torch refuses all of these, without a line number.
                refused = "backwards hooks" in str(error) if is_backward else _runs(hook, lines)
                if refused:
                    name = getattr(hook, "__qualname__", type(hook).__qualname__)
                    return f"{'backward ' * is_backward}hook {name} on {path or 'the module itself'}, "
    return ""


def _runs(hook: Callable[..., object], lines: Sequence[_Line]) -> bool:
    """Is one of the lines in a hook?"""
    function: Any = hook if inspect.isroutine(hook) else type(hook).__call__
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    if code is None:
        return False
    own = [line for *_, line in code.co_lines() if line is not None]
    return any(file == code.co_filename and min(own) <= number <= max(own) for file, number, _ in lines)


def _line_of_user(lines: Sequence[_Line]) -> str:
    """`step.py, line 9, "if y.sum() > 0:": `, the innermost line outside torch and our ops; "": none."""
    inner = [Path(package.__path__[0]) for package in (torch, ops)]
    for file, number, code in reversed(lines):
        if not any(Path(file).is_relative_to(folder) for folder in inner):
            return f'{Path(file).name}, line {number}, "{code.strip()}": '
    return ""


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    """oneDNN's LSTM returns None where its fake result is a tensor."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
