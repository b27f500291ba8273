"""The model that `parallelize` is given: its forward on one device, for the whole batch and a microbatch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cached_property

import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from lancet_kernels.errors import UserError
from lancet_kernels.graph.capture import Captured, capture, input_position, state_name
from lancet_kernels.graph.forms import WHOLE, Form
from lancet_kernels.graph.forward_program import forward_graph, forward_of, runs_graph
from lancet_kernels.graph.from_fx import GENERATOR, program_from_fx
from lancet_kernels.graph.program import Phase, Program
from lancet_kernels.guards import Arguments
from lancet_kernels.schedules.duplex import copies_of_batch
from lancet_kernels.schedules.ranges import PartitionRange
from lancet_kernels.schedules.realize import cut_ranges
from lancet_kernels.schedules.shard_graph import shard_graph
from lancet_kernels.schedules.sharding import Strategy

_MOVES = frozenset(
    f"aten.{op}"
    for op in """view reshape _unsafe_view t transpose permute expand detach alias clone squeeze
    unsqueeze""".split()
)
"""Ops that may be there or not for the same gradient."""


class OneDeviceModel:
    """A model with example inputs: the whole batch, of which `copies` microbatches are made.

    Raises: CaptureError; UserError for a model that cannot be sharded, in one line that says why.
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
        self.program = forward_of(self.captured, self.name)
        for instruction in self.program.instructions:
            if GENERATOR in instruction.mutates:
                got = f"{instruction.name} ({instruction.op}), whose random numbers depend on the sharding"
                raise self._refuse(got, "none", "use lancet_kernels.Dropout, or set its probability to 0")
        self._compare_gradients()

    def _refuse(self, got: str, expected: str, do: str) -> UserError:
        return UserError(f"model {self.name} to parallelize", got=got, expected=expected, do=do)

    @cached_property
    def batch(self) -> tuple[int, PartitionRange | None]:
        """Its size, and how it is cut into microbatches. Raises: UserError where it cannot be."""
        if self.copies == 1:
            return 0, None
        found = copies_of_batch(self.program, self.copies)
        sizes = {self.program.tensors[t].shape[0] for t in self.program.inputs if t in found.forms}
        size = min(sizes)
        if size % self.copies:
            raise self._refuse(
                f"a batch of {size}",
                f"a multiple of {self.copies}, for microbatches of one size",
                "choose another batch, or copies=1",
            )
        return size, found

    @cached_property
    def microbatch(self) -> Captured:
        """The model on the first microbatch."""
        if self.copies == 1:
            return self.captured
        structure = pytree.tree_structure(self.arguments)
        captured = capture(self.model, *pytree.tree_unflatten(self._microbatch_leaves, structure))
        ops = [[(i.name, i.op) for i in p.instructions] for p in (self.program, forward_of(captured, ""))]
        if ops[0] != ops[1]:
            got = "a forward whose ops depend on the size of the batch"
            raise self._refuse(got, "the same ops for half of it", "use copies=1")
        return captured

    @cached_property
    def _microbatch_leaves(self) -> list[object]:
        size, cut = self.batch
        leaves = list(self.leaves)
        for name, position in self._inputs(self.captured.joint):
            leaf = leaves[position]
            if cut is not None and name in cut.forms and isinstance(leaf, Tensor):
                leaves[position] = leaf[: size // self.copies]
        return leaves

    def microbatch_program(self, name: str = "") -> Program:
        """What a strategy is for."""
        return forward_of(self.microbatch, name or self.name)

    def microbatch_run(self) -> tuple[fx.GraphModule, list[object]]:
        """The forward graph of a microbatch, and a value for each of its placeholders."""
        module = forward_graph(self.microbatch)
        return module, _values(module, self.microbatch, self._microbatch_leaves)

    def _inputs(self, module: fx.GraphModule) -> Iterator[tuple[str, int]]:
        """(placeholder, position among the leaves) of the tensors of the batch."""
        for node in module.graph.nodes:
            if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor):
                position = input_position(node)
                if position is not None:
                    yield node.name, position

    @cached_property
    def input_positions(self) -> list[int]:
        """Which leaves of the arguments the sharded graph reads, in its order."""
        return [position for _, position in self._inputs(forward_graph(self.captured))]

    @cached_property
    def first_names(self) -> dict[str, str]:
        """Of every parameter and buffer under each of its names: the first one."""
        first: dict[int, str] = {}
        named = [
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        ]
        return {name: first.setdefault(id(tensor), name) for name, tensor in named}

    def forms(self, strategy: Strategy) -> dict[str, Form]:
        """By first name, in which form a rank has a parameter. Buffers are whole."""
        parameters = dict(self.model.named_parameters())
        found: dict[str, Form] = dict.fromkeys(parameters, WHOLE)
        for node in self.captured.joint.graph.nodes:
            name = state_name(node) if node.op == "placeholder" else None
            if name is not None and self.first_names.get(name) in found and node.name in strategy.parameters:
                found[self.first_names[name]] = strategy.parameters[node.name]
        return found

    def sharded_graph(self, strategy: Strategy, group: str) -> fx.Graph:
        """The forward of one rank; its attributes go by their first names."""
        module = forward_graph(self.captured)
        inputs = {name: f"input_{position}" for name, position in self._inputs(module)}
        _, cut = self.batch
        forms = self.forms(strategy)
        state = {}
        for node in module.graph.nodes:
            name = state_name(node) if node.op == "placeholder" else None
            if name is not None:
                first = self.first_names[name]
                state[node.name] = first, forms.get(first, WHOLE)
        if cut is not None:
            cut_ranges(module.graph, self.program, [cut])
        return shard_graph(module.graph, strategy, group, self.copies, state, inputs)

    def _compare_gradients(self) -> None:
        """Refuse a model whose gradients are not those of its forward ops: those alone are sharded."""
        forward = forward_graph(self.captured)
        module = runs_graph(nn.Module(), forward.graph)
        again = capture(module, _values(forward, self.captured, self.leaves))
        if _backward_ops(self.captured) != _backward_ops(again):
            raise self._refuse(
                "gradients that are not those of its forward's ops (an autograd.Function, no_grad, a hook)",
                "plain differentiable ops",
                "write it with ops of torch, or use optimize()",
            )


def _values(module: fx.GraphModule, captured: Captured, leaves: list[object]) -> list[object]:
    """A value for each placeholder of a forward graph: parameters, buffers, leaves of the arguments."""
    state = dict(captured.module.named_parameters()) | dict(captured.module.named_buffers())
    values: list[object] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            name, position = state_name(node), input_position(node)
            assert name is not None or position is not None, f"{node.name} is neither input nor parameter"
            values.append(leaves[position or 0] if name is None else state[name])
    return values


def _backward_ops(captured: Captured) -> Counter[tuple[object, ...]]:
    """How often each op makes results of which shapes in the backward."""
    program = program_from_fx(captured.joint)
    return Counter(
        (i.op, *(program.tensors[t].shape for t in i.outputs))
        for i in program.instructions
        if i.phase is Phase.BACKWARD and i.op not in _MOVES
    )
