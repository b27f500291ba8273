"""Puts the collectives of FSDP into a joint graph that was captured with whole parameters.

    placeholder  whole w [n, ..]        ->  shard [n/W, ..], gathered into w before its first reader
    output       gradient of w [n, ..]  ->  reduce-scattered and divided: that of the shard [n/W, ..]

Contract:

1. A gradient among the outputs is that of the shard, summed, scaled and in the shard's dtype.
2. A placeholder of a sharded parameter is the shard, and every reader reads the gathered parameter, or a view
   or cast of it, made anew.
3. A unit is gathered once in the forward, and again in the backward where FSDP frees it in between.
4. It is gathered at the earliest when the first computation with the unit before has run
   (`graph.meta.not_before`): so at most two units are whole at a time, whatever order is planned,
   as with FSDP's own prefetching.
5. Small parameters of a unit share a collective.
6. The order is FSDP2's: a unit's messages start as early as 4 allows, and are unpacked where the unit is
   first read; sums of gradients start when these are there, and what has arrived is scaled and cast when the
   next unit's gradients are there. So both run beside the computation of one unit.

Example: two ranks, w [3, 4]: each has a shard [2, 4], of which the second one's last row is padding; gathered
[4, 4], of which w is the first 3 rows. Its gradient [3, 4] is padded to [4, 4] before it is scattered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from lancet_kernels.graph.capture.captured_graph import fake_mode_of, set_value, state_name
from lancet_kernels.graph.capture.fsdp_parameters import ShardedParameter, Twin
from lancet_kernels.graph.from_fx import is_view, op_name
from lancet_kernels.graph.meta import IN_BACKWARD, UNIT, forward_nodes
from lancet_kernels.ops.comm.collectives import Accumulation, cut_into_buckets
from lancet_kernels.ops.comm.groups import group_size
from lancet_kernels.ops.comm.waiting import waiting
from lancet_kernels.schedules.rewrite.buckets import BUCKET_BYTES, Inserter

aten, functional = torch.ops.aten, torch.ops._c10d_functional
_CASTS = ("aten._to_copy", "prims.convert_element_type")


@dataclass(frozen=True)
class Shards:
    """The FSDP shards of a step.

    twin: the captured one. scale_of: the factor of the sums of a parameter's gradients. cost_group: as of
    `Inserter`.
    """

    twin: Twin
    scale_of: Callable[[ShardedParameter], float]
    cost_group: Mapping[str, str]


def insert_gathers(module: fx.GraphModule, shards: Shards, parameter_of_output: Mapping[int, str]) -> None:
    """Shard the parameters of a joint graph.

    Args: parameter_of_output: position among the outputs -> parameter (`Captured.parameter_of_gradient`).
    """
    sharding = _Sharding(module, shards.cost_group)
    by_name, names = {parameter.name: parameter for parameter in shards.twin.parameters}, shards.twin.names
    placeholders = module.graph.find_nodes(op="placeholder")
    parameters = {
        node: by_name[name] for node in placeholders if (name := names.get(state_name(node) or "")) in by_name
    }
    gradients = {
        i: by_name[names[name]] for i, name in parameter_of_output.items() if names.get(name) in by_name
    }
    sharding.scatter(gradients, shards.scale_of)  # 1
    sharding.gather(parameters)  # 2
    module.graph.lint()
    module.recompile()


def sum_held(shards: Shards, accumulation: Accumulation) -> None:
    """Sum what backwards without sums hold, and add it to `.grad`: before a step that runs without its plan,
    in which FSDP sums only its own gradients. Collective."""
    by_name = {parameter.name: parameter for parameter in shards.twin.parameters}
    for (kind, *names), total in accumulation.take_held():
        parameters = [by_name[name] for name in names]
        first = parameters[0]
        if kind == "copies" and first.group:
            continue  # zeros: the sum before it holds the gradients
        if first.group:
            ranks = group_size(first.group)
            total = _arrived(functional.reduce_scatter_tensor(total, "sum", ranks, first.group))
        if first.replicas:
            total = _arrived(functional.all_reduce(total, "sum", first.replicas))
        if first.reduce_dtype is not torch.float16:  # else they are scaled already
            total = total * shards.scale_of(first)
        if len(parameters) == 1:
            first.add_gradient(total)
            continue
        shapes = [[p.shard_size, *p.shape[1:]] for p in parameters]
        parts = total.flatten().split([math.prod(shape) for shape in shapes])
        for parameter, shape, part in zip(parameters, shapes, parts, strict=True):
            parameter.add_gradient(part.view(shape))


def _arrived(started: Tensor) -> Tensor:
    with waiting("sums of gradients of earlier microbatches"):
        return functional.wait_tensor(started)


class _Sharding(Inserter):
    def __init__(self, module: fx.GraphModule, cost_group: Mapping[str, str]) -> None:
        super().__init__(module.graph, cost_group)
        self.module = module
        self._behind: list[fx.Node] = []
        """New nodes behind the last start of a message."""

    def call(self, target: Any, *args: object, **kwargs: object) -> fx.Node:
        node = super().call(target, *args, **kwargs)
        self._behind.append(node)
        return node

    def start(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().start(*args, **kwargs)
        self._behind = []
        return node

    def _gathered(self, shard: fx.Node, dim: int, group: str) -> fx.Node:
        """The shards of all ranks along a dimension."""
        shape, ranks = list(shard.meta["val"].shape), group_size(group)
        joined = self.arrived(
            self.start(functional.all_gather_into_tensor.default, shard, ranks, group=group)
        )
        if not dim:
            return joined
        order = [*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1)]
        by_rank = self.call(aten.permute.default, self.shaped(joined, [ranks, *shape]), order)
        return self.shaped(by_rank, [*shape[:dim], ranks * shape[dim], *shape[dim + 1 :]])

    def _summed(self, summand: fx.Node, dim: int, group: str, names: Sequence[str]) -> fx.Node:
        """This rank's shard along a dimension of the sum over the ranks."""
        shape, ranks = list(summand.meta["val"].shape), group_size(group)
        shape[dim] //= ranks
        if dim:
            by_rank = self.shaped(summand, [*shape[:dim], ranks, *shape[dim:]])
            order = [dim, *range(dim), *range(dim + 1, len(shape) + 1)]
            summand = self.shaped(
                self.call(aten.permute.default, by_rank, order), [ranks * shape[0], *shape[1:]]
            )
        op, key = functional.reduce_scatter_tensor.default, ("scatter", *names)
        return self.arrived(self.start(op, summand, "sum", ranks, group=group, gradients_of=key))

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return (
            node if node.meta["val"].dtype is dtype else self.call(aten._to_copy.default, node, dtype=dtype)
        )

    def _rows(self, node: fx.Node, dim: int, begin: int, end: int) -> fx.Node:
        if (begin, end) == (0, node.meta["val"].shape[dim]):
            return node
        return self.call(aten.slice.Tensor, node, dim, begin, end)

    # Gradients.

    def scatter(
        self, gradients: Mapping[int, ShardedParameter], scale_of: Callable[[ShardedParameter], float]
    ) -> None:
        """Replace gradients among the outputs by those of the shards."""
        output = self.module.graph.output_node()
        results = list(output.args[0])
        in_order = sorted((i for i in gradients if isinstance(results[i], fx.Node)), key=results.__getitem__)
        arrived: list[tuple[fx.Node, int, list[fx.Node]]] = []
        for bucket in _buckets(in_order, gradients.__getitem__, lambda p: p.reduce_dtype):
            last = max(results[i] for i in bucket)
            self._behind = []
            with self.graph.inserting_before(last.next):
                summed = self._scattered(
                    [results[i] for i in bucket], [gradients[i] for i in bucket], scale_of
                )
            arrived.append((last, gradients[bucket[0]].unit, self._behind))
            for i, shard in zip(bucket, summed, strict=True):
                results[i] = shard
        output.args = (results,)
        arrived.sort(key=lambda one: one[0])
        for k, (_, unit, behind) in enumerate(arrived):  # 6
            following = (last.next for last, other, _ in arrived[k + 1 :] if other != unit)
            where = next(following, output)
            for node in behind:
                where.prepend(node)

    def _scattered(
        self,
        gradients: Sequence[fx.Node],
        parameters: Sequence[ShardedParameter],
        scale_of: Callable[..., float],
    ) -> list[fx.Node]:
        first = parameters[0]
        ranks, names = group_size(first.group), [p.name for p in parameters]
        scale = scale_of(first)
        wide = [self._cast(g, first.reduce_dtype) for g in gradients]
        if first.reduce_dtype is torch.float16:  # its sums overflow
            wide, scale = [self.call(aten.mul.Tensor, g, scale) for g in wide], 1.0
        padded = [self._padded(g, p.dim, ranks * p.shard_size) for g, p in zip(wide, parameters, strict=True)]
        if len(padded) == 1:
            summed = padded[0]
            if first.group:
                summed = self._summed(summed, first.dim, first.group, names)
        else:
            rows = [self.shaped(g, [ranks, g.meta["val"].numel() // ranks]) for g in padded]
            summed = self._summed(self.call(aten.cat.default, rows, 1), 0, first.group, names)
        if first.replicas:
            op, key = functional.all_reduce.default, ("copies", *names)
            start = self.start(op, summed, "sum", group=first.replicas, gradients_of=key)
            summed = self.arrived(start)
        if scale != 1.0:
            summed = self.call(aten.mul.Tensor, summed, scale)
        if len(padded) == 1:
            return [self._cast(summed, first.dtype)]
        shards, begin = [], 0
        for gradient, parameter in zip(padded, parameters, strict=True):
            end = begin + gradient.meta["val"].numel() // ranks
            shape = [parameter.shard_size, *parameter.shape[1:]]
            shards.append(self._cast(self.shaped(self._rows(summed, 1, begin, end), shape), parameter.dtype))
            begin = end
        return shards

    def _padded(self, node: fx.Node, dim: int, size: int) -> fx.Node:
        value = node.meta["val"]
        missing = size - value.shape[dim]
        if not missing:
            return node
        return self.call(aten.constant_pad_nd.default, node, [0, 0] * (value.dim() - 1 - dim) + [0, missing])

    # Parameters.

    def gather(self, parameters: Mapping[fx.Node, ShardedParameter]) -> None:
        """Make placeholders shards, which are gathered before they are read."""
        forward = forward_nodes(list(self.graph.nodes))
        derived = _derived(parameters, forward)
        source_of = {n: n.all_input_nodes[0] for n in derived if n.op != "placeholder"}
        reads: dict[bool, list[_Read]] = {False: [], True: []}
        for source, placeholder in derived.items():
            one = parameters[placeholder]
            if not one.group and one.compute_dtype is one.dtype and source is placeholder:
                continue  # What one rank has as it is read needs nothing.
            for user in source.users:
                if user not in derived:
                    # 3
                    late = one.regathers and user.op != "output" and user not in forward
                    reads[late].append(_Read(user, source, placeholder, one))
        for placeholder, one in parameters.items():
            _make_shard(placeholder, one)
        for in_backward, of_phase in reads.items():
            self._gather_units(of_phase, source_of, in_backward)
        for node in reversed(source_of):
            if not node.users:
                self.graph.erase_node(node)

    def _gather_units(
        self, reads: Sequence[_Read], source_of: Mapping[fx.Node, fx.Node], in_backward: bool
    ) -> None:
        by_unit: dict[int, list[_Read]] = {}
        for read in sorted(reads, key=lambda read: read.user):
            by_unit.setdefault(read.parameter.unit, []).append(read)
        before: fx.Node | None = None
        for unit, unit_reads in by_unit.items():
            first = unit_reads[0].user
            self.marks = {  # 4
                UNIT.key: ("backward" if in_backward else "forward", unit),
                **({IN_BACKWARD.key: True} if in_backward else {}),
            }
            parameters = {read.placeholder: read.parameter for read in unit_reads}
            sources = {read.source for read in unit_reads}
            with self.graph.inserting_before(first if before in (None, first) else before.next):
                whole, unpacking = self._whole(parameters)
            for node in unpacking:  # 6
                first.prepend(node)
            with self.graph.inserting_before(first):
                for node in _with_sources(sources, source_of):
                    source = whole[source_of[node]]
                    if in_backward:
                        whole[node] = self.graph.node_copy(
                            node, {node.all_input_nodes[0]: source}.__getitem__
                        )
                    else:
                        first.prepend(node)
                        node.replace_input_with(source_of[node], source)
                        whole[node] = node
                    whole[node].meta.update(self.marks)
            self.marks = {}
            for read in unit_reads:
                read.user.replace_input_with(read.source, whole[read.source])
            before = first

    def _whole(
        self, parameters: Mapping[fx.Node, ShardedParameter]
    ) -> tuple[dict[fx.Node, fx.Node], list[fx.Node]]:
        """By placeholder, the gathered parameter; and the nodes that unpack what was gathered."""
        whole: dict[fx.Node, fx.Node] = {}
        unpacking: list[fx.Node] = []
        for bucket in _buckets(parameters, parameters.__getitem__, lambda p: p.compute_dtype):
            first = parameters[bucket[0]]
            group, ranks = first.group, group_size(first.group)
            self._behind = []
            shards = [self._cast(node, parameters[node].compute_dtype) for node in bucket]
            if len(bucket) == 1:
                all_rows = self._gathered(shards[0], first.dim, group) if group else shards[0]
                whole[bucket[0]] = self._rows(all_rows, first.dim, 0, first.shape[first.dim])
                unpacking += self._behind
                continue
            flat = [self.shaped(shard, [shard.meta["val"].numel()]) for shard in shards]
            joined = self._gathered(self.call(aten.cat.default, flat), 0, group)
            by_rank = self.shaped(joined, [ranks, joined.meta["val"].numel() // ranks])
            begin = 0
            for node, shard in zip(bucket, flat, strict=True):
                end, one = begin + shard.meta["val"].numel(), parameters[node]
                shape = [ranks * one.shard_size, *one.shape[1:]]
                rows = self.shaped(self._rows(by_rank, 1, begin, end), shape)
                whole[node] = self._rows(rows, 0, 0, one.shape[0])
                begin = end
            unpacking += self._behind
        return whole, unpacking


class _Read(NamedTuple):
    """A node that reads a sharded parameter: the placeholder itself, or a view or cast of it."""

    user: fx.Node
    source: fx.Node
    placeholder: fx.Node
    parameter: ShardedParameter


def _make_shard(placeholder: fx.Node, parameter: ShardedParameter) -> None:
    shape = list(parameter.shape)
    shape[parameter.dim] = parameter.shard_size
    whole = placeholder.meta["val"]
    with fake_mode_of(placeholder):
        shard = torch.empty(shape, dtype=parameter.dtype, device=whole.device)
    set_value(placeholder, shard.requires_grad_(whole.requires_grad))


def _derived(placeholders: Collection[fx.Node], forward: Collection[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The placeholders, and the forward's views and casts of one alone, each with its placeholder, in the
    order of the graph: where the backward reads one, it is repeated there instead of kept."""
    derived = {placeholder: placeholder for placeholder in placeholders}
    for node in next(iter(derived)).graph.nodes if derived else ():
        if node.op == "call_function" and node in forward and len(node.all_input_nodes) == 1:
            (source,) = node.all_input_nodes
            if source in derived and (is_view(node) or op_name(node) in _CASTS):
                derived[node] = derived[source]
    return derived


def _with_sources(nodes: Collection[fx.Node], source_of: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    """The nodes and what they are derived from, placeholders excluded, in the order of the graph."""
    needed = set()
    for node in nodes:
        while node in source_of:
            needed.add(node)
            node = source_of[node]
    return [node for node in source_of if node in needed]


def _buckets(
    items: Iterable[Any],
    parameter_of: Callable[[Any], ShardedParameter],
    dtype_of: Callable[[ShardedParameter], torch.dtype],
) -> list[list[Any]]:
    """Items whose parameters share a collective: small ones of one unit, sharded along dimension 0."""
    # 5
    alone, small = [], []
    for item in items:
        parameter = parameter_of(item)
        size = math.prod(parameter.shape) * dtype_of(parameter).itemsize
        if size >= BUCKET_BYTES or parameter.dim or not parameter.group:
            alone.append([item])
        else:
            key = f"{parameter.unit} {parameter.dtype} {parameter.divide_by} {parameter.group}"
            small.append((item, dtype_of(parameter), key, size))
    return alone + [bucket for _, bucket in cut_into_buckets(small, BUCKET_BYTES)]
