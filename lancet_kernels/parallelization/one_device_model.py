"""The input of `parallelize`: a model's forward on one device, for the whole batch and a microbatch."""

from __future__ import annotations

import hashlib
import operator
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from unittest import mock

import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture.capture import FAKE_TENSOR_LOG, Captured, capture
from lancet_kernels.graph.capture.captured_graph import (
    fake_mode_of,
    input_position,
    is_tangent,
    module_of,
    set_value,
    state_name,
)
from lancet_kernels.graph.from_fx import GENERATOR, facts_of, op_name, program_from_fx, program_from_graph
from lancet_kernels.graph.meta import REGION, forward_nodes
from lancet_kernels.graph.ops import argument_names
from lancet_kernels.graph.program import Phase, Program
from lancet_kernels.graph.rules.rules import WHOLE, Form, Forms, Rule
from lancet_kernels.optimization.guards import Arguments
from lancet_kernels.optimization.step import placeholder_value
from lancet_kernels.schedules.cut.duplex import copies_of_batch
from lancet_kernels.schedules.cut.ranges import PartitionRange
from lancet_kernels.schedules.rewrite.cut import cut_ranges
from lancet_kernels.schedules.shard.shard_graph import shard_graph
from lancet_kernels.schedules.shard.sharding_strategy import ShardingStrategy

_MOVES = frozenset(
    f"aten.{op}"
    for op in """view reshape _unsafe_view t transpose permute expand detach alias clone squeeze
    unsqueeze""".split()
)
"""Ops that `_gradient_formulas` skips: they only move elements."""


class OneDeviceModel:
    """A model with example inputs: the whole batch, to be cut into `copies` microbatches.

    Raises: CaptureError; UserError for a model that cannot be sharded.
    """

    def __init__(self, model: nn.Module, arguments: Arguments, copies: int) -> None:
        self.model, self.arguments, self.copies = model, arguments, copies
        self.name = type(model).__name__
        self.leaves: list[object] = pytree.tree_leaves(arguments)
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in self.leaves):
            raise self._refuse("an input that wants a gradient", "inputs without", "detach it")
        self.captured = capture(model, *arguments)
        if not self.captured.returns_alone:
            got = "a forward that changes its buffers or its inputs (batch norm, say)"
            raise self._refuse(got, "results alone", "use a layer norm, or optimize()")
        results = forward_graph(self.captured).graph.output_node().args[0]
        if any(not isinstance(node, fx.Node) for node in results):
            raise self._refuse("a result that is no tensor", "tensors alone", "return the loss alone")
        if any(REGION.on(node) for node in self.captured.joint.graph.nodes):
            warnings.warn(
                f"parallelize of {self.name}: activation checkpointing inside the model is ignored, its "
                "activations are saved",
                stacklevel=4,
            )
        self._clear_groups()
        self.program = forward_of(self.captured, self.name)
        for instruction in self.program.instructions:
            if GENERATOR in instruction.mutates:
                got = f"{instruction.name} ({instruction.op}), whose random numbers depend on the sharding"
                raise self._refuse(got, "none", "use lancet_kernels.Dropout, or set its probability to 0")
        self._compare_gradients()

    def _clear_groups(self) -> None:
        """Number tokens as on one device. Raises: UserError for any other op with a group of ranks."""
        for node in self.captured.joint.graph.nodes:
            schema = getattr(node.target, "_schema", None)
            for n, argument in enumerate(schema.arguments if schema is not None else ()):
                group = node.args[n] if n < len(node.args) else node.kwargs.get(argument.name)
                # Ranks go by the name of their group; the `group` of a group norm is a number.
                if argument.name not in ("group", "group_name") or not (isinstance(group, str) and group):
                    continue
                if op_name(node) != "lancet.token_index":
                    got = f"{node.name} ({op_name(node)}), an op of several ranks"
                    raise self._refuse(got, "a model for one device", "use optimize()")
                node.update_arg(n, "")

    def _refuse(self, got: str, expected: str, do: str) -> UserError:
        return UserError(f"model {self.name} to parallelize", got=got, expected=expected, do=do)

    @cached_property
    def microbatches(self) -> PartitionRange | None:
        """The cut of the batch; None for one microbatch. Raises: UserError where it cannot be cut."""
        if self.copies == 1:
            return None
        try:
            cut = copies_of_batch(self.program, self.copies)
        except UserError as error:
            raise self._refuse(
                str(error.got), str(error.expected), "choose another batch, or copies=1"
            ) from None
        size = min(self.program.tensors[t].shape[0] for t in self.program.inputs if t in cut.forms)
        if size % self.copies:
            raise self._refuse(
                f"a batch of {size}",
                f"a multiple of {self.copies}, for microbatches of one size",
                "choose another batch, or copies=1",
            )
        return cut

    @cached_property
    def microbatch(self) -> fx.GraphModule:
        """The forward graph of the first microbatch. Raises: UserError where an op wants the whole batch."""
        module, cut = forward_graph(self.captured), self.microbatches
        if cut is None:
            return module
        try:
            with mock.patch.object(FAKE_TENSOR_LOG, "disabled", True):
                return on_part_of_batch(module, cut.forms, self.copies)
        except (RuntimeError, ValueError, IndexError) as error:
            reason = str(error).splitlines()[0]
            got = f"a forward that does not run on a part of its batch ({reason})"
            raise self._refuse(got, "ops along the batch", "use copies=1") from error

    def microbatch_program(self, name: str = "") -> Program:
        """The Program of the first microbatch, for which strategies are."""
        return self.as_forward(program_from_fx(self.microbatch), name)

    def as_forward(self, program: Program, name: str = "") -> Program:
        """A Program of the microbatch's graph with the attribute `saved` of `forward_of`."""
        whole = {i.name: i.attributes["saved"] for i in self.program.instructions}
        instructions = tuple(
            replace(i, attributes={**i.attributes, "saved": whole[i.name]}) for i in program.instructions
        )
        return replace(program, name=name or self.name, instructions=instructions)

    def values(self, module: fx.GraphModule) -> list[object]:
        """A value for each placeholder of a forward graph; inputs are cut to the graph's number of rows."""
        state = self.captured.state()
        values = []
        for node in module.graph.find_nodes(op="placeholder"):
            value = placeholder_value(node, state, self.leaves)
            if isinstance(value, Tensor) and value.shape != node.meta["val"].shape:
                value = value[: node.meta["val"].shape[0]]
            values.append(value)
        return values

    def _inputs(self, graph: fx.Graph) -> Iterator[tuple[str, int]]:
        """(placeholder, position among the leaves) of the tensors of the batch."""
        for node in graph.nodes:
            if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor):
                position = input_position(node)
                if position is not None:
                    yield node.name, position

    @cached_property
    def input_positions(self) -> list[int]:
        """Positions of the leaves of the arguments that the sharded graph reads, in its order."""
        return [position for _, position in self._inputs(forward_graph(self.captured).graph)]

    @cached_property
    def first_names(self) -> dict[str, str]:
        """The first name of every parameter, buffer and plain tensor, under each of its names."""
        first: dict[int, str] = {}
        named = [
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
            *self.captured.plain.values().items(),
        ]
        return {name: first.setdefault(id(tensor), name) for name, tensor in named}

    @cached_property
    def state_names(self) -> dict[str, str]:
        """By placeholder, the first name of the parameter or buffer that it stands for."""
        named = ((n.name, state_name(n)) for n in self.captured.joint.graph.nodes if n.op == "placeholder")
        return {placeholder: self.first_names[name] for placeholder, name in named if name is not None}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Tensors of the forward that are neither parameters, buffers nor inputs, by attribute: constants of
        the graph, and plain tensors."""
        module = forward_graph(self.captured)
        targets = [node.target for node in module.graph.nodes if node.op == "get_attr"]
        constants = {target: operator.attrgetter(target)(module) for target in targets}
        return constants | self.captured.plain.values()

    def forms(self, strategy: ShardingStrategy) -> dict[str, Form]:
        """The form of each parameter on a rank, by first name. Buffers are whole."""
        forms: dict[str, Form] = {name: WHOLE for name, _ in self.model.named_parameters()}
        for placeholder, name in self.state_names.items():
            if name in forms and placeholder in strategy.parameters:
                forms[name] = strategy.parameters[placeholder]
        return forms

    def sharded_graph(self, strategy: ShardingStrategy, group: str) -> fx.Graph:
        """The forward of one rank, whose attributes have their first names."""
        graph = forward_graph(self.captured).graph
        inputs = {name: f"input_{position}" for name, position in self._inputs(graph)}
        forms = self.forms(strategy)
        state = {p: (name, forms.get(name, WHOLE)) for p, name in self.state_names.items()}
        if self.microbatches is not None:
            cut_ranges(graph, self.program, [self.microbatches])
        return shard_graph(graph, strategy, group, self.copies, state, inputs)

    def _compare_gradients(self) -> None:
        """Refuse a model whose gradients are not those of its forward ops, from which sharded ones follow."""
        traced = self.captured.module
        assert isinstance(traced, fx.GraphModule)
        if not any(map(_may_change_gradients, traced.graph.nodes)):
            return
        forward = forward_graph(self.captured)
        module = runs_graph(nn.Module(), forward.graph)
        again = capture(module, self.values(forward))
        placeholders = [node for node in forward.graph.nodes if node.op == "placeholder"]
        inputs = {n: state_name(node) or input_position(node) for n, node in enumerate(placeholders)}
        if _gradient_formulas(self.captured, {}) != _gradient_formulas(again, inputs):
            raise self._refuse(
                "gradients that are not those of its forward's ops (an autograd.Function, no_grad, a hook)",
                "plain differentiable ops",
                "write it with ops of torch, or use optimize()",
            )


def _may_change_gradients(node: fx.Node) -> bool:
    """False for a node of the module's trace that is an op with torch's own gradient."""
    if node.op == "call_method":
        return node.target in ("detach", "detach_", "requires_grad_", "register_hook")
    if node.op != "call_function":
        return node.op == "call_module"
    home = getattr(node.target, "__module__", None) or ""
    private = home.startswith(("torch._C", "torch.autograd", "torch._dynamo")) and home != "torch._C._nn"
    return private or isinstance(node.target, HigherOrderOperator)


def _gradient_formulas(captured: Captured, inputs: Mapping[int, object]) -> list[str]:
    """A digest of the computation of each gradient, without `_MOVES`.

    Args: inputs: the parameter for which an input of the captured module stands, by position.
    """
    digests: dict[fx.Node, str] = {}
    for node in captured.joint.graph.nodes:
        read = [digests[source] for source in node.all_input_nodes]
        if node.op == "placeholder":
            position = input_position(node)
            name = state_name(node) or (None if position is None else inputs.get(position, position))
            text = repr((name, is_tangent(node)))
        elif op_name(node) in _MOVES and len(read) == 1:
            digests[node] = read[0]
            continue
        else:
            arguments = fx.map_arg((node.args, dict(node.kwargs)), lambda source: digests[source])
            text = op_name(node) + repr(sorted(read) if op_name(node) == "aten.add" else arguments)
        digests[node] = hashlib.sha256(text.encode()).hexdigest()
    results = captured.joint.graph.output_node().args[0]
    return sorted(digests[node] for node in results if isinstance(node, fx.Node))


def forward_of(captured: Captured, name: str) -> Program:
    """The forward of a captured module, without instructions that only the backward needs. Attribute `saved`:
    positions of an instruction's outputs that the backward reads."""
    joint = program_from_fx(captured.joint, name)
    backward = (i for i in joint.instructions if i.phase is not Phase.FORWARD)
    saved = {joint.storage[t] for i in backward for t in i.inputs}
    program = program_from_graph(forward_graph(captured).graph, name, unchanged=joint)
    instructions = tuple(
        replace(i, attributes={**i.attributes, "saved": [p for p, t in enumerate(i.outputs) if t in saved]})
        for i in program.instructions
    )
    return replace(program, instructions=instructions)


def forward_graph(captured: Captured) -> fx.GraphModule:
    """The graph of which `forward_of` is the Program: the same names, a tuple of the results as output."""
    results = captured.joint.graph.output_node().args[0][: captured.forward_outputs]
    nodes = list(captured.joint.graph.nodes)
    forward = forward_nodes(nodes)
    needed = {node for node in results if isinstance(node, fx.Node)}
    for node in reversed(nodes):
        if node in needed and node in forward:
            needed.update(node.all_input_nodes)
    # All elements of a tuple: a cut needs the weight of a mean, though only the backward reads it.
    needed |= {n for n in nodes if n.target is operator.getitem and n.args[0] in needed and n in forward}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies.get(node) for node in results))
    return module_of(captured.joint, graph)


def on_part_of_batch(module: fx.GraphModule, forms: Forms, parts: int) -> fx.GraphModule:
    """The forward graph of the first of `parts` equal parts of the batch.

    Args: forms: of the tensors with a batch dimension, by name.
    Raises: RuntimeError, ValueError or IndexError where an op cannot run with fewer rows.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    changed: set[fx.Node] = set()
    with fake_mode_of(next(node for node in graph.nodes if node.op == "placeholder")):
        for node in graph.nodes:
            form = forms.get(node.name, WHOLE)
            shape = list(node.meta["val"].shape) if form.dimension is not None else []
            if form.dimension is not None:
                shape[form.dimension] //= parts
            if node.op == "placeholder" and shape:
                set_value(node, node.meta["val"].new_empty(shape))
            elif node.op == "call_function" and not changed.isdisjoint(node.all_input_nodes):
                rule = facts_of(node).rule or Rule()
                names = argument_names(node.target)
                node.args = tuple(rule.arguments_of_slice(node.args, names, shape or None, sums=False))
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
                set_value(node, node.target(*args, **kwargs))
            else:
                continue
            changed.add(node)
    return module_of(module, graph)


def runs_graph(root: nn.Module, graph: fx.Graph) -> nn.Module:
    """A module with the parameters, buffers and submodules of `root` that runs the graph. Unlike a
    GraphModule, whose graph torch's trace would reuse, it can be captured."""
    forward = type(fx.GraphModule(root, graph)).forward
    module = type("GraphForward", (nn.Module,), {"forward": forward})()
    module._parameters, module._buffers, module._modules = root._parameters, root._buffers, root._modules
    module._non_persistent_buffers_set = root._non_persistent_buffers_set
    return module
