"""A pass for graphs of any tracer: orders computation so that it hides collectives.

The time of a node is the caller's, or that on a cluster (not on this machine): a roofline for computation;
for a collective a formula of its process group: ranks on a node, nodes, and groups that share the network
cards.

Unlike captures of this library, such graphs have symbolic sizes, numbers among the results
(`_local_scalar_dense`), and forward and backward without tangents.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import sympy
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._inductor import config
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from lancet_kernels.errors import UserError, check_name, class_name
from lancet_kernels.graph.costs.clusters import (
    Cluster,
    CommunicationModel,
    grouped_all_reduce_ms,
    grouped_all_to_all_ms,
    load_cluster,
)
from lancet_kernels.graph.costs.costs import CostModel, collective_of
from lancet_kernels.graph.from_fx import is_instruction, is_wait, op_name, program_from_graph
from lancet_kernels.graph.ops import argument_names
from lancet_kernels.graph.program import Instruction, Kind, Phase, Program, bitset
from lancet_kernels.ops.comm.link_group import plain_group
from lancet_kernels.schedules import STRATEGY_NAMES
from lancet_kernels.schedules.order.best_order import OrderSearch
from lancet_kernels.schedules.order.ordering import read_late
from lancet_kernels.schedules.rewrite.walk import UNPLANNED, Step, order, wait_late, walk
from lancet_kernels.schedules.strategies import MORE_MEMORY
from lancet_kernels.schedules.time.peak_memory import peak_memory

_IN_BACKWARD = "autograd_backward"
"""Key of `meta` of nodes that autograd ran; torch sets it."""
_ALL_TO_ALL = "_c10d_functional.all_to_all_single"


def read_graph(graph: fx.Graph) -> Program:
    """The Program of a traced graph.

    A symbolic size has its value in the traced batch; a data-dependent output of an all-to-all has as many
    rows as are sent; any other data-dependent size is torch's `unbacked_symint_fallback`.

    Raises: UserError: a call of a module or method, a mutation without a schema, or a node without a fake
    result.
    """
    _check(graph)
    with _sizes_as_numbers(graph):
        program = program_from_graph(graph)
    backward = {node.name for node in _backward_nodes(graph)}
    instructions = tuple(
        replace(i, phase=Phase.BACKWARD if i.name in backward else Phase.FORWARD)
        for i in program.instructions
    )
    return _with_urgent_sums(replace(program, instructions=instructions))


def _check(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op in ("call_module", "call_method"):
            raise UserError(
                "graph of overlap_pass",
                got=f"{node.name}, a {node.op} of {node.target}",
                expected="calls of ops, whose schemas say what they overwrite",
                do="trace it with make_fx or AOTAutograd first",
            )
        if is_instruction(node) and node.users and "val" not in node.meta:
            raise UserError(
                "graph of overlap_pass",
                got=f'{node.name} without meta["val"]',
                expected="a fake result of every node, for its size",
                do="trace on fake tensors, or run torch.fx.passes.fake_tensor_prop.FakeTensorProp first",
            )
        if isinstance(node.target, torch._ops.HigherOrderOperator) and "mutation" in node.target.name():
            raise UserError(
                "graph of overlap_pass",
                got=f"{node.name}, a {node.target.name()}, which does not say what it overwrites",
                expected="ops with schemas",
                do="run the pass before kernels are put into the graph",
            )


@contextlib.contextmanager
def _sizes_as_numbers(graph: fx.Graph) -> Iterator[None]:
    """A context in which all tensors of `meta["val"]` have sizes that are numbers, and any other value is a
    scalar tensor, so that a Program has an edge to its readers."""
    values = {node: node.meta["val"] for node in graph.nodes if "val" in node.meta}
    hint = _Hints(values)
    try:
        for node, value in values.items():
            if isinstance(value, (tuple, list)):
                node.meta["val"] = [_plain(v, hint) for v in value]
            elif is_instruction(node) or isinstance(value, Tensor):
                node.meta["val"] = _plain(value, hint)
        yield
    finally:
        for node, value in values.items():
            node.meta["val"] = value


def _plain(value: object, hint: _Hints) -> object:
    if value is None:
        return None
    if not isinstance(value, Tensor):
        return torch.empty((), dtype=torch.int64, device="meta")
    if all(type(n) is int for n in value.shape):
        return value
    return torch.empty([hint(n) for n in value.shape], dtype=value.dtype, device="meta")


class _Hints:
    """Numbers for symbolic sizes."""

    def __init__(self, values: dict[fx.Node, Any]) -> None:
        self._of_data: dict[sympy.Symbol, int] = {}
        for node, value in values.items():
            if op_name(node) != _ALL_TO_ALL or type(value.shape[0]) is int:
                continue
            unknown = free_unbacked_symbols(value.shape[0]) - self._of_data.keys()
            sent = self(values[node.args[0]].shape[0])
            self._of_data.update(dict.fromkeys(unknown, max(1, sent // max(1, len(unknown)))))

    def __call__(self, size: int | torch.SymInt) -> int:
        if not isinstance(size, torch.SymInt):
            return size
        shapes: ShapeEnv = size.node.shape_env
        # The name in torch 2.11 is deprecated in 2.13.
        traced = shapes.backed_var_to_val if hasattr(shapes, "backed_var_to_val") else shapes.var_to_val
        number = size.node.expr.xreplace(self._of_data).xreplace(dict(traced))
        fallback = sympy.Integer(config.unbacked_symint_fallback)
        return int(number.xreplace(dict.fromkeys(number.free_symbols, fallback)))


def _backward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that autograd ran, those that read a tangent, and what depends on either."""
    backward = {
        node
        for node in graph.nodes
        if node.meta.get(_IN_BACKWARD) or (node.op == "placeholder" and node.name.startswith("tangents"))
    }
    for node in graph.nodes:
        if not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
    return backward


def _with_urgent_sums(program: Program) -> Program:
    """Makes all-reduces on which a matrix product depends (tensor parallelism) ordinary messages: schedules
    give sums of gradients a lower priority than those."""
    products = bitset([i for i, instruction in enumerate(program.instructions) if instruction.flops])

    def urgent(i: int, instruction: Instruction) -> Instruction:
        if instruction.kind is not Kind.ALL_REDUCE or not program.descendants[i] & products:
            return instruction
        attributes = {**instruction.attributes, "collective": Kind.ALL_REDUCE.value}
        return replace(instruction, kind=Kind.OTHER_COMMUNICATION, attributes=attributes)

    return replace(program, instructions=tuple(urgent(i, x) for i, x in enumerate(program.instructions)))


CLUSTER = "dgx-h100"
_STRATEGIES = ("none", "lancet-dw")
NodeCosts = Callable[[fx.Node], float | None]
"""Milliseconds of a node; None: unknown."""


def overlap_pass(
    gm: fx.GraphModule,
    example_inputs: Sequence[object] | None = None,
    *,
    costs: NodeCosts | None = None,
    cluster: str | Path | Cluster = CLUSTER,
    memory_limit: float | None = MORE_MEMORY,
    strategy: str = "lancet-dw",
) -> fx.GraphModule:
    """Orders a traced graph so that computation hides its collectives; its results stay the same.

    The graph is a forward, a backward, a joint graph of both, or a whole step, with functional collectives
    (`torch.ops._c10d_functional`) and fake results (`meta["val"]`). All-gathers and all-to-alls start early,
    weight gradients and other work off the critical path fill the gaps, and each `wait_tensor` comes right
    before the first reader of its result. No node is added, removed or changed, `meta` included; run the pass
    after those that recompute, offload or bucket.

    All ranks must get the same order, or they deadlock: the same graph, and costs that depend on shapes
    alone, as those of a cluster do, or that the ranks have agreed on. On gloo, two concurrent functional
    all-gathers of one group end the process (a fault of torch 2.13).

    Args:
        gm: changed in place.
        example_inputs: unused; passes of GraphTrainer and inductor get them.
        costs: milliseconds of a node, or None for the time on `cluster`.
        cluster: a name or a .toml file; ranks fill node after node.
        memory_limit: for the predicted peak memory of the order, relative to that of the unchanged graph;
            None: no limit.
        strategy: "lancet-dw", or "none", which leaves the graph unchanged. The others cut batches, for which
            a functional all-to-all has no rule.
    Returns: `gm`.
    Raises: UserError: a graph that it cannot read; the graph is then unchanged.
    """
    if not isinstance(gm, fx.GraphModule):
        name = class_name(gm)
        raise UserError(
            "graph of overlap_pass", got=name, expected="an fx.GraphModule", do="trace it, or optimize() it"
        )
    check_name("strategy", strategy, STRATEGY_NAMES)
    if strategy not in _STRATEGIES:
        raise UserError(
            "strategy of overlap_pass",
            got=repr(strategy),
            expected=f"{' or '.join(_STRATEGIES)}: no rule cuts a batch through functional all-to-alls",
            do="call optimize() on the model for the others",
        )
    if memory_limit is not None and not memory_limit >= 1:
        raise UserError(
            "memory_limit of overlap_pass",
            got=memory_limit,
            expected="a number from 1, in peaks of the graph as it is, or None",
            do="give 1.1 for a tenth more",
        )
    where = load_cluster(cluster)
    if strategy == "none" or not any(map(is_wait, gm.graph.nodes)):
        return gm
    program = read_graph(gm.graph)
    ms = milliseconds(gm.graph, program, costs, where)
    names = tuple(program.instructions[i].name for i in _order(program, ms, memory_limit))
    return walk(Step(gm, program), replace(UNPLANNED, order=names), (order, wait_late)).module


def _order(program: Program, ms: Sequence[float], memory_limit: float | None) -> list[int]:
    """Positions of the instructions in the best order."""
    ms_of = dict(zip((i.name for i in program.instructions), ms, strict=True))
    limit = None if memory_limit is None else memory_limit * peak_memory(program)
    best = OrderSearch(program, lambda i, _tensors: ms_of[i.name]).best(limit, search=True).order
    late = read_late(program, best, float("inf") if limit is None else limit)
    program.reordered(late)  # raises where an instruction would run before one that it depends on
    return late


def milliseconds(graph: fx.Graph, program: Program, costs: NodeCosts | None, cluster: Cluster) -> list[float]:
    """The time of each instruction: that of `costs`, or where that is None, the cluster's."""
    nodes = {node.name: node for node in graph.nodes}
    computation = CostModel(cluster, CommunicationModel({}))
    result = []
    for instruction in program.instructions:
        node = nodes[instruction.name]
        ms = None if costs is None else costs(node)
        if ms is None and instruction.kind.is_communication:
            collective, placement = collective_of(instruction), _placement(node, cluster)
            if collective in ("all_to_all", "point_to_point"):
                ms = grouped_all_to_all_ms(cluster, instruction.bytes, *placement)
            else:
                # An all-reduce is a reduce-scatter and an all-gather, which take the same time.
                halves = 2 if collective == "all_reduce" else 1
                ms = grouped_all_reduce_ms(cluster, instruction.bytes, *placement) * halves / 2
        result.append(computation(instruction, program.tensors) if ms is None else ms)
    return result


def _placement(node: fx.Node, cluster: Cluster) -> tuple[int, int, int]:
    """For a collective's group: ranks on a node, nodes, and groups that share a node's network. A group that
    this process does not have counts as consecutive ranks."""
    arguments = {**dict(zip(argument_names(node.target), node.args, strict=False)), **node.kwargs}
    splits = arguments.get("output_split_sizes")
    count = len(splits) if isinstance(splits, (list, tuple)) else arguments.get("group_size", 2)
    ranks = _ranks(arguments.get("group_name")) or range(count)
    nodes = len({rank // cluster.gpus_per_node for rank in ranks})
    local = math.ceil(len(ranks) / nodes)
    return local, nodes, (max(1, cluster.gpus_per_node // local) if nodes > 1 else 1)


def _ranks(group: object) -> list[int] | None:
    if isinstance(group, str) and dist.is_initialized():
        try:
            group = _resolve_process_group(plain_group(group))  # type: ignore[arg-type]
        except RuntimeError:
            return None
    return dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else None
