"""Linear layers of a transformer's attention and MLP blocks, partitioned over the ranks of a group.

    norm -> qkv -> attention -> projection -> add -> norm -> fc1 -> activation -> fc2 -> add

PrimePar's search (`schedules.shard.segments`) or Megatron's rule gives the partition of each operator of a
block; the linear layers are replaced in place, and redistributions between operators are derived. The code in
between stays the model's own: additions and norms are whole on every rank, attention is cut along heads,
activations along rows and features.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from lancet_kernels.errors import UserError, check_name
from lancet_kernels.graph.costs.clusters import Cluster, load_cluster
from lancet_kernels.graph.rules.slices import FORWARD, Partition, replicate
from lancet_kernels.graph.rules.tile_layouts import is_executable
from lancet_kernels.ops.comm.groups import (
    AnyGroups,
    expert_group_name,
    from_first_rank,
    group_rank,
    group_size,
)
from lancet_kernels.optimization.guards import as_arguments
from lancet_kernels.parallelization.square_layer import LeadingDimensions, Neighbour, PartitionedLinear
from lancet_kernels.schedules.shard.partition_costs import linear, pointwise
from lancet_kernels.schedules.shard.segments import Problem, home_squares, megatron, solve_apart

LINEAR_STRATEGIES = ("primepar", "megatron")
DEFAULT_CLUSTER = "p3dn"
"""The paper's."""


@dataclass(frozen=True)
class Names:
    """Names of the linear layers of a block in their module. kinds: a fused layer's output has this many
    kinds of features, in each of them the heads (3: queries, keys, values of GPT-2's c_attn)."""

    inner: tuple[str, ...]
    outer: str
    kinds: int = 1


ATTENTION = (
    Names(("c_attn",), "c_proj", kinds=3),  # GPT-2
    Names(("q_proj", "k_proj", "v_proj"), "out_proj"),  # OPT
    Names(("q_proj", "k_proj", "v_proj"), "o_proj"),  # Llama
    Names(("query_key_value",), "dense"),  # Bloom
)
MLP = (
    Names(("c_fc",), "c_proj"),
    Names(("fc1",), "fc2"),
    Names(("gate_proj", "up_proj"), "down_proj"),
    Names(("dense_h_to_4h",), "dense_4h_to_h"),
)
OPERATORS = ("qkv", "attention", "projection", "fc1", "activation", "fc2")
HEAD_COUNTS = ("num_heads", "n_head", "n_heads", "num_attention_heads")
CUT_WITH_HEADS = (*HEAD_COUNTS, "num_key_value_heads", "split_size", "embed_dim")
"""Numbers of an attention module that are divided when heads are cut."""


@dataclass(frozen=True)
class _Block:
    """Linear layers before (`inner`) and behind (`outer`) attention or an activation, in `module`."""

    name: str
    module: nn.Module
    names: Names
    heads: int = 0
    """0: of an MLP."""
    key_value_heads: int = 0

    @property
    def inner_layers(self) -> list[nn.Module]:
        return [getattr(self.module, name) for name in self.names.inner]

    @property
    def outer_layer(self) -> nn.Module:
        return getattr(self.module, self.names.outer)

    @property
    def layers(self) -> list[nn.Module]:
        return [*self.inner_layers, self.outer_layer]

    @property
    def operators(self) -> tuple[str, ...]:
        """Names of the inner layers together, of attention or activation, and of the outer layer."""
        return OPERATORS[:3] if self.heads else OPERATORS[3:]

    @property
    def sizes(self) -> tuple:
        """Blocks of equal sizes are partitioned alike."""
        return self.names, self.heads, self.key_value_heads, *map(_shape, self.layers)


def parallelize_linears(
    model: nn.Module,
    example_inputs: Tensor | Sequence[object] | Mapping[str, object],
    groups: AnyGroups | None = None,
    strategy: str = "primepar",
    *,
    cluster: str | Path | Cluster = DEFAULT_CLUSTER,
    partitions: Mapping[str, Partition] | None = None,
    memory_gb: float | None = None,
) -> nn.Module:
    """Replace, in place, the linear layers of every attention and MLP block (GPT-2, OPT, Llama, Bloom, by
    their names) by layers of which each rank holds a part. (PrimePar, ASPLOS '24)

    Every rank has the whole model, with the same parameters, and afterwards gives it the same inputs; outputs
    and gradients are those of one device. Parameters keep their names; `whole_state_dict` gives whole ones.
    Create the optimizer afterwards.

    Args:
        model: anything but the linear layers of such blocks stays whole on every rank.
        example_inputs: of the model; one forward without gradients tells the rows of a batch.
        groups: 2^n ranks; None: all.
        strategy: "primepar" searches; "megatron" splits columns, then rows.
        cluster: a name or a TOML file; the search minimizes the time on it.
        partitions: of operators by name (qkv, attention, projection, fc1, activation, fc2), instead of those
            of the strategy.
        memory_gb: 10^9 bytes on each rank for the linear layers of all blocks and the operators between them,
            as the search counts: 16 bytes for each parameter (float16, gradient, Adam), 2 for each number
            that the backward needs. None: no limit.
    Returns: the model.
    Raises: UserError (no such block, a weight that modules share, sizes or heads that ranks cannot divide,
        another strategy, nothing that fits into the memory).
    """
    check_name("strategy", strategy, LINEAR_STRATEGIES)
    name = expert_group_name(groups)
    ranks = group_size(name)
    if ranks & (ranks - 1):
        raise UserError("ranks of a partition", got=ranks, expected="2^n", do="give a group of so many")
    blocks = list(_blocks(model))
    if not blocks:
        raise UserError(
            f"linear layers of {type(model).__name__}",
            got="no module with those of an attention or MLP block",
            expected="; ".join(", ".join((*n.inner, n.outer)) for n in (*ATTENTION, *MLP)),
            do="give them these names, or use SquareLinear",
        )
    if unknown := set(partitions or {}) - set(OPERATORS):
        raise UserError(
            "partitions", got=", ".join(unknown), expected=", ".join(OPERATORS), do="correct the name"
        )
    _check_unshared(model, blocks)
    # All ranks have to use one result, also where a search ends in a tie.
    rows, sequence = from_first_rank(_rows(model, example_inputs, blocks[0]), name, "rows of a batch")
    by_sizes: dict[tuple, list[_Block]] = {}
    for one in blocks:
        by_sizes.setdefault(one.sizes, []).append(one)
    prices = load_cluster(cluster)
    problems = [
        (_problem(prices, alike[0], rows, sequence, ranks, strategy, partitions or {}), len(alike))
        for alike in by_sizes.values()
    ]
    solutions = solve_apart(problems, None if memory_gb is None else 1e9 * memory_gb)
    # Activations between blocks are whole, so equal blocks have equal partitions.
    own = {
        sizes: {o.name: p for o, p in zip(problem.operators, solution.partitions, strict=False)}
        for sizes, (problem, _), solution in zip(by_sizes, problems, solutions, strict=True)
    }
    chosen = from_first_rank(own, name, "partitions")
    for one in blocks:
        _replace(one, chosen[one.sizes], groups)
    return model


def _blocks(model: nn.Module) -> Iterator[_Block]:
    """In the order of the model's modules."""
    for name, module in list(model.named_modules()):
        for names in (*ATTENTION, *MLP):
            if all(_is_linear(getattr(module, layer, None)) for layer in (*names.inner, names.outer)):
                heads = _heads(name, module, names) if names in ATTENTION else (0, 0)
                yield _Block(name, module, names, *heads)


def _is_linear(layer: object) -> bool:
    """transformers' Conv1D is a linear layer with the weight transposed. A layer that computes more (LoRA),
    or its weight (weight norm), stays as it is."""
    is_plain = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
    is_kind = is_plain or type(layer).__name__ == "Conv1D"
    return isinstance(layer, nn.Module) and is_kind and "weight" in layer._parameters


def _check_unshared(model: nn.Module, blocks: Sequence[_Block]) -> None:
    """Raise UserError for a parameter that a layer shares: its tiles would be trained apart from the rest."""
    layers = [layer for one in blocks for layer in one.layers]
    others = [module for module in model.modules() if module not in layers]
    holders = Counter(id(p) for module in (*layers, *others) for p in module._parameters.values())
    shared = sum(holders[id(p)] > 1 for layer in layers for p in layer.parameters())
    if shared:
        raise UserError(
            f"linear layers of {type(model).__name__}",
            got=f"{shared} parameters that other modules have, too",
            expected="parameters of one layer each",
            do="let modules share the whole block, or copy the parameters",
        )


def _shape(layer: nn.Module) -> tuple[int, int]:
    """Features out and in."""
    out, into = layer.get_parameter("weight").shape
    return (out, into) if isinstance(layer, nn.Linear) else (into, out)


def _heads(name: str, module: nn.Module, names: Names) -> tuple[int, int]:
    """Numbers of heads: of queries, and of keys and values."""
    places = [module, getattr(module, "config", None)]
    counts = [getattr(place, count) for place in places for count in HEAD_COUNTS if hasattr(place, count)]
    width = _shape(getattr(module, names.outer))[1]
    if not counts or width % counts[0]:
        raise UserError(
            f"attention {name}",
            got=f"no number of heads that divides {width} features",
            expected=f"an attribute {' or '.join(HEAD_COUNTS)} of it or of its config",
            do="add one",
        )
    key_value = _shape(getattr(module, names.inner[-1]))[0] if len(names.inner) == 3 else width
    return counts[0], key_value * counts[0] // width


def _rows(model: nn.Module, example_inputs: Tensor | Sequence | Mapping, first: _Block) -> tuple[int, int]:
    """Rows of a batch, and of a sequence, at the first block."""
    shapes: list[torch.Size] = []
    hook = getattr(first.module, first.names.inner[0]).register_forward_pre_hook(
        lambda _, inputs: shapes.append(inputs[0].shape)
    )
    try:
        with torch.no_grad():
            examples = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
            inputs, by_name = as_arguments(examples)
            model(*inputs, **by_name)
    finally:
        hook.remove()
    if not shapes:
        raise UserError(
            "example inputs",
            got=f"a forward that does not call {first.name}.{first.names.inner[0]}",
            expected="one that runs every block",
            do="give the inputs of a training step",
        )
    shape = shapes[0]
    return shape[:-1].numel(), shape[-2] if len(shape) > 1 else 1


def _problem(
    cluster: Cluster,
    one: _Block,
    rows: int,
    sequence: int,
    ranks: int,
    strategy: str,
    explicit: Mapping[str, Partition],
) -> Problem:
    """A block between two additions, with the partitions of each operator that can run here: the explicit
    one, or that of Megatron's rule, or all.

    Raises: UserError for an operator that no partition, or not the explicit one, can run.
    """
    first, between, last = one.operators
    shapes = [_shape(layer) for layer in one.inner_layers]
    features, width = [out for out, _ in shapes], shapes[0][1]
    out, middle = _shape(one.outer_layer)
    if one.heads:
        flops = 2.0 * rows * sequence * middle
        mixed = pointwise(between, 1, rows, middle, splits="h", passes=4, flops=flops)
    else:
        mixed = pointwise(between, 1, rows, middle, splits="mk", passes=1 + len(one.names.inner))
    add = pointwise("add", 1, rows, width, splits="k", passes=3)
    inner = linear(first, 1, rows, width, sum(features))
    operators = (add, inner, mixed, linear(last, 1, rows, middle, out), add)
    edges = tuple(pairwise(range(len(operators))))
    every = Problem.over(cluster, operators, edges, ranks, home_squares)
    # The dimensions that may be cut, and the numbers that their slices have to divide.
    inner_width = math.gcd(*features) // one.names.kinds
    heads = math.gcd(one.heads, one.key_value_heads)
    limits = {
        first: {"m": rows, "n": width, "k": inner_width},
        between: {"h": heads} if one.heads else {"m": rows, "k": inner_width},
        last: {"m": rows, "n": middle, "k": out},
    }
    whole = Partition((replicate(),) * (ranks.bit_length() - 1))
    choices: dict[str, tuple[Partition, ...]] = {o.name: (whole,) for o in operators}
    for operator, partitions in zip(operators, every.choices, strict=True):
        if sizes := limits.get(operator.name):
            choices[operator.name] = tuple(p for p in partitions if _can_run(p, sizes, ranks))
            if not choices[operator.name]:
                raise UserError(
                    f"partition of {operator.name} of {one.name} over {ranks} ranks",
                    got=f"sizes {sizes}",
                    expected="sizes that some partition divides evenly",
                    do="use fewer ranks, or another batch",
                )
    fixed = dict(explicit)
    if strategy == "megatron":
        rule = megatron(operators, 0, ranks.bit_length() - 1)
        fixed = {o.name: p for o, p in zip(operators, rule, strict=True)} | fixed
    for name, sizes in limits.items():
        if name in fixed and not _can_run(fixed[name], sizes, ranks):
            slices = ", ".join(f"{d} = {n}" for d, n in sizes.items())
            raise UserError(
                f"partition of {name} of {one.name}",
                got=str(fixed[name]),
                expected=f"one over {ranks} ranks whose slices divide {slices}",
                do="use fewer ranks, another batch, or strategy primepar without partitions",
            )
    return every.restricted(choices | {name: (p,) for name, p in fixed.items() if name in choices})


def _can_run(partition: Partition, limits: Mapping[str, int], ranks: int) -> bool:
    cut = {d for primitive in partition.primitives for d in primitive.dimensions}
    divides = cut <= limits.keys() and all(limits[d] % partition.slices(d) == 0 for d in cut)
    return partition.devices == ranks and divides and ("n" not in limits or is_executable(partition))


def _replace(one: _Block, partitions: Mapping[str, Partition], groups: AnyGroups | None) -> None:
    """Replace the linear layers of a block by partitioned ones."""
    inner, between, outer = one.operators
    middle = Neighbour(partitions[between], "h" if one.heads else "k")
    around, leading = Neighbour(partitions["add"]), LeadingDimensions()
    for name, layer in zip(one.names.inner, one.inner_layers, strict=True):
        own = PartitionedLinear(layer, partitions[inner], around, middle, groups, leading, one.names.kinds)
        setattr(one.module, name, own)
    last = PartitionedLinear(one.outer_layer, partitions[outer], middle, around, groups, leading)
    setattr(one.module, one.names.outer, last)
    if one.heads:
        _cut_heads(one.module, middle, one.heads, group_rank(expert_group_name(groups)))


def _cut_heads(module: nn.Module, attention: Neighbour, heads: int, rank: int) -> None:
    """Let an attention module compute this rank's heads."""
    slices = attention.partition.slices("h")
    for name in CUT_WITH_HEADS:
        if isinstance(getattr(module, name, None), int):
            setattr(module, name, getattr(module, name) // slices)
    own = attention.partition.slice(FORWARD, "h", rank, 0) if slices > 1 else 0

    def own_alibi(_module, inputs, by_name):
        """Bloom's distances, [batch * heads, ...], one for each head."""
        if isinstance(alibi := by_name.get("alibi"), Tensor):
            by_head = alibi.unflatten(0, (-1, heads))
            by_name["alibi"] = by_head.chunk(slices, dim=1)[own].flatten(0, 1)
        return inputs, by_name

    if slices > 1 and "alibi" in signature(module.forward).parameters:
        module.register_forward_pre_hook(own_alibi, with_kwargs=True)
