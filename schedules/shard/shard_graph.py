"""A forward graph for one device, as each of W ranks runs it by a `ShardingStrategy`.

HiDup, section 5 (Compiler). The graph comes with its microbatches apart (`schedules.rewrite.cut`): parts of
an instruction run in the signature that the strategy has for it, and what a strategy for one microbatch does
not know (sums over all, slices of the input) in the one that needs least communication. Where a tensor is
needed in another form, a collective converts it (`ops.comm.collectives`), once for all readers. Stages follow
each other as in section 4.1, the communication of one microbatch beside the computation of the other. All
ranks get the same graph.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import fx

from lancet_kernels.graph.costs.part_instruction import part_name
from lancet_kernels.graph.from_fx import program_from_graph, tensor_names
from lancet_kernels.graph.meta import WRITTEN_INTO
from lancet_kernels.graph.ops import argument, argument_names, rule_for
from lancet_kernels.graph.program import Instruction, whole_name
from lancet_kernels.graph.rules.rules import MEAN, PARTIAL, WHOLE, Form
from lancet_kernels.ops.comm.groups import group_size
from lancet_kernels.schedules.shard.blocks import SLICE, collective, preparations, signatures
from lancet_kernels.schedules.shard.sharding_strategy import ShardingStage, ShardingStrategy

aten, lancet = torch.ops.aten, torch.ops.lancet

Way = tuple[Form, ...]
"""Forms of an instruction's inputs, then outputs."""
_SUMS, _PRODUCTS = ("aten.add", "aten.sub"), ("aten.mul", "aten.div")
_TRAFFIC = {SLICE: 0.0, "all_to_all": 0.5, "all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0}
"""Approximate traffic of a conversion, in units of the tensor's size."""


def shard_graph(
    graph: fx.Graph,
    strategy: ShardingStrategy,
    group: str,
    copies: int,
    state: Mapping[str, tuple[str, Form]],
    inputs: Mapping[str, str],
) -> fx.Graph:
    """The graph of this rank.

    Args:
        graph: a forward graph, of `copies` microbatches.
        group: the ranks (a name from `group_name`), as many as the strategy is for.
        state: by placeholder, the parameter or buffer that the new graph reads instead, and the form in which
            the rank has it.
        inputs: by placeholder, the name of the new one. Every rank gets all of the batch.
    Returns: a graph whose results are whole on every rank. Attributes of the given one are its own, too.
    """
    return _Sharder(graph, strategy, group, state, inputs).run(copies)


class _Sharder:
    """`held[tensor][form]` is the node of the new graph that has a tensor in that form."""

    def __init__(
        self,
        source: fx.Graph,
        strategy: ShardingStrategy,
        group: str,
        state: Mapping[str, tuple[str, Form]],
        inputs: Mapping[str, str],
    ) -> None:
        self.strategy, self.group, self.ranks = strategy, group, group_size(group)
        for node in source.nodes:
            # Parts of the graph that comes out are other tensors.
            node.meta.pop(WRITTEN_INTO.key, None)
        self.program = program_from_graph(source)
        self.nodes = {node.name: node for node in source.nodes}
        self.graph = fx.Graph()
        self.held: dict[str, dict[Form, fx.Node]] = {}
        self.ways: dict[str, list[Way]] = {}
        for stage in strategy.stages:
            for name, way in stage.computation.items():
                self.ways.setdefault(name, []).append(way)
        # Each reader has its own of these, in the form it wants.
        self.free = preparations(self.program)
        self.results = source.output_node().args[0]
        for node in source.nodes:
            if node.name in inputs:
                self.held[node.name] = {WHOLE: self.graph.placeholder(inputs[node.name])}
            elif node.op == "get_attr":
                self.held[node.name] = {WHOLE: self.graph.get_attr(node.target)}
        for name, (attribute, form) in state.items():
            if name in self.nodes:
                self.held[name] = {form: self.graph.get_attr(attribute)}

    def run(self, copies: int) -> fx.Graph:
        """All stages, then the results."""
        stages = self.strategy.stages
        for n in range(len(stages) + 1):
            for copy in range(copies):
                communication = stages[n].communication if n < len(stages) else ()
                for c in communication:
                    if c.source != c.target:
                        self.get(self._of_copy(c.tensor, copy), c.target)
                # The computation of the other microbatch, whose communication came before.
                before = n if copy == copies - 1 else n - 1
                which = (copy + 1) % copies
                if 0 <= before < len(stages):
                    self._compute(stages[before], which)
        self.graph.output(tuple(self._result(node) for node in self.results))
        self.graph.eliminate_dead_code()
        return self.graph

    def _compute(self, stage: ShardingStage, copy: int) -> None:
        for name in stage.computation:
            instruction = self._instruction_of_copy(name, copy)
            if instruction is not None and not self._is_free(instruction):
                self._make(instruction)

    def _of_copy(self, tensor: str, copy: int) -> str:
        """The node of a microbatch for a tensor of the strategy's Program."""
        name, dot, element = tensor.partition(".")
        candidates = (f"{part_name(name, copy)}{dot}{element}", f"{name}_slice{copy}", tensor)
        return next(t for t in candidates if t in self.program.tensors)

    def _instruction_of_copy(self, name: str, copy: int) -> Instruction | None:
        for candidate in (part_name(name, copy), name):
            if candidate in self.program.index:
                return self.program.instructions[self.program.index[candidate]]
        return None

    # Which signature

    def _is_free(self, instruction: Instruction) -> bool:
        return not self.free.keys().isdisjoint(instruction.outputs)

    def _ways_of(self, instruction: Instruction) -> list[Way]:
        """The strategy's ways; else all there are, the one of least traffic first."""
        operands = len(instruction.inputs) + len(instruction.outputs)
        ways = self.ways.get(instruction.name) or self.ways.get(whole_name(instruction.name), [])
        ways = [way for way in ways if len(way) == operands]
        if ways and not self._is_free(instruction):
            return ways
        return ways + sorted(self._all_ways(instruction), key=lambda way: self._traffic(instruction, way))

    def _all_ways(self, instruction: Instruction) -> list[Way]:
        ways = [
            (*s.inputs, *s.outputs)
            for s in signatures(instruction, self.program, self.ranks, lambda i, tensors: 0.0)
        ]
        read = self.nodes[instruction.name].all_input_nodes
        if instruction.op in _SUMS and len(read) == 2 == len(instruction.inputs):
            ways.append((PARTIAL, PARTIAL, PARTIAL))
        if instruction.op in _PRODUCTS and self.nodes[instruction.name].args[0] is read[0]:
            ways.append((PARTIAL, *(WHOLE for _ in instruction.inputs[1:]), PARTIAL))
        return ways

    def _traffic(self, instruction: Instruction, way: Way) -> float:
        return sum(
            self._cheapest(t, form)[0] * self.program.tensors[t].content_bytes
            for t, form in zip(instruction.inputs, way, strict=False)
        )

    def _cheapest(self, tensor: str, wanted: Form) -> tuple[float, Form]:
        """(traffic, form to start from) of a tensor in a form."""
        self._ensure_held(tensor)
        if wanted in self.held[tensor]:
            return 0.0, wanted
        options = [(_TRAFFIC[name], f) for f in self.held[tensor] if (name := collective(f, wanted))]
        return min(options, key=lambda item: item[0], default=(float("inf"), wanted))

    # Tensors and instructions

    def get(self, tensor: str, form: Form) -> fx.Node:
        """The node that has a tensor in a form; what is missing for it is added to the graph."""
        if form not in self.held.get(tensor, {}) and tensor in self.program.producer:
            instruction = self.program.instructions[self.program.producer[tensor]]
            if self._is_free(instruction):
                self._make(instruction, tensor, form)
            self._ensure_held(tensor)
        held = self.held[tensor]
        if form not in held:
            held[form] = self._converted(tensor, self._cheapest(tensor, form)[1], form)
        return held[form]

    def _ensure_held(self, tensor: str) -> None:
        """Add the tensor in some form, if there is none yet."""
        if tensor not in self.held:
            self._make(self.program.instructions[self.program.producer[tensor]])

    def _make(self, instruction: Instruction, tensor: str = "", form: Form | None = None) -> None:
        """Add an instruction, if there is none yet; a free one in the way that gives `tensor` in `form`."""
        ways = self._ways_of(instruction)
        if form is not None:
            position = len(instruction.inputs) + instruction.outputs.index(tensor)
            fitting = [way for way in ways if way[position] == form]
            if not fitting and tensor in self.held:
                return
            ways = fitting or ways
        elif instruction.outputs[0] in self.held:
            return
        # Constants are made whole on every rank; slices of them are there as well.
        way = ways[0] if instruction.inputs else (WHOLE,) * len(instruction.outputs)
        self._add(instruction, way)

    def _add(self, instruction: Instruction, way: Way) -> None:
        node, split = self.nodes[instruction.name], len(instruction.inputs)
        forms = dict(zip(instruction.inputs, way, strict=False))

        def operand(read: fx.Node) -> fx.Node:
            (name,) = tensor_names(read)
            return self.get(name, forms[name])

        args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
        args = self._arguments(instruction, node.target, list(args), way[split:])
        # The result of a collective is contiguous, whatever strides its input had.
        target = aten.reshape.default if node.target is aten.view.default else node.target
        if target is aten.copy.default:
            # What an assignment to a slice is captured as has no derivative; in place it has one.
            args[0] = self.graph.call_function(aten.empty_like.default, (args[0],))
            target = aten.copy_.default
        added = self.graph.create_node("call_function", target, tuple(args), kwargs, node.name)
        if not isinstance(node.meta["val"], (tuple, list)):
            self._hold(instruction.outputs[0], way[split], self._share(instruction, added, way))
            return
        for n, tensor in enumerate(instruction.outputs):
            # A tuple may have elements that are no tensors.
            element = int(tensor.rpartition(".")[2])
            self._hold(tensor, way[split + n], self.graph.call_function(operator.getitem, (added, element)))
        self._average(instruction, node, way[split:])

    def _hold(self, tensor: str, form: Form, node: fx.Node) -> None:
        self.held.setdefault(tensor, {}).setdefault(form, node)

    def _arguments(self, instruction: Instruction, target: object, args: list, outputs: Way) -> list:
        """With a rank's sizes in place of the whole ones (`graph.rules.rules`)."""
        rule = rule_for(instruction)
        if rule is None or outputs == (WHOLE,) * len(outputs):
            return args
        shape = None
        if outputs[0].dimension is not None:
            shape = list(self.program.tensors[instruction.outputs[0]].shape)
            shape[outputs[0].dimension] //= self.ranks
        return rule.arguments_of_slice(args, argument_names(target), shape)

    def _share(self, instruction: Instruction, average: fx.Node, way: Way) -> fx.Node:
        """The share of the whole average that the average over a rank's slice has."""
        rule = rule_for(instruction)
        is_summand = rule is not None and rule.averages and way[-1] == PARTIAL and way[0].is_cut
        return self.graph.call_function(aten.div.Tensor, (average, self.ranks)) if is_summand else average

    def _average(self, instruction: Instruction, node: fx.Node, outputs: Way) -> None:
        """A mean loss, of which ranks have sums and weights: a sum is divided by the weight of all."""
        rule = rule_for(instruction)
        name = "" if rule is None else rule.reduction_argument
        if not name or argument(node, name) != MEAN or outputs[0] != PARTIAL:
            return
        loss, weight = instruction.outputs
        summands = self.held[loss]
        quotient = (summands[PARTIAL], self.get(weight, WHOLE))
        summands[PARTIAL] = self.graph.call_function(aten.div.Tensor, quotient)

    # Between forms

    def _converted(self, tensor: str, source: Form, target: Form) -> fx.Node:
        name, node = collective(source, target), self.held[tensor].get(source)
        assert name is not None, f"{tensor}: no collective makes {target} of {source}"
        assert node is not None, f"{tensor} is not held as {source}"
        calls = {
            SLICE: (lancet.take_shard.default, (target.dimension,)),
            "all_gather": (lancet.all_gather.default, (source.dimension,)),
            "all_to_all": (lancet.exchange_shards.default, (source.dimension, target.dimension)),
            "all_reduce": (lancet.all_reduce.default, ()),
            "reduce_scatter": (lancet.reduce_scatter.default, (target.dimension,)),
        }
        op, dimensions = calls[name]
        arguments, own_name = (node, *dimensions, self.group), f"{tensor.replace('.', '_')}_{name}"
        return self.graph.create_node("call_function", op, arguments, name=own_name)

    def _result(self, node: fx.Node) -> fx.Node:
        """A result, whole on every rank, with one gradient for all of them (`ops.comm.collectives`)."""
        (tensor,) = tensor_names(node)
        self._ensure_held(tensor)
        held = self.held[tensor]
        if WHOLE in held:
            return self.graph.call_function(lancet.share_gradient.default, (held[WHOLE], self.group))
        if PARTIAL in held:
            return self.graph.call_function(lancet.all_reduce.default, (held[PARTIAL], self.group, True))
        form, shard = next(iter(held.items()))
        return self.graph.call_function(lancet.all_gather.default, (shard, form.dimension, self.group, True))
