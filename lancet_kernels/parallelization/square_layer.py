"""Linear layers under PrimePar's partitions: `SquareLinear`, whose weight, gradient, input and output are
divided over 4^k ranks, and any partition of its space.

    q  ranks along a side, 2^k

Rank r * q + c has tile (r, c) of the input and of the output (*straight*), or (r, (r + c) % q) (*skewed*), so
layers, with element-wise functions between them, can follow each other. Nothing is replicated; tiles are
shifted between ranks while GEMMs run (PrimePar, ASPLOS '24; `ops.square_linear`, `graph.rules.slices`).

The partition of a `PartitionedLinear` is a sequence of splits of M, N and K, and of P(2^k x 2^k). A rank
holds the tile of the weight with which its forward begins, and the slice of the bias of its features. Layouts
of the operators before and behind, shifts and all-reduces follow from slice indices
(`graph.rules.tile_layouts`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.functional import pad

from lancet_kernels.errors import UserError, check_name
from lancet_kernels.graph.rules.slices import (
    BACKWARD,
    FORWARD,
    PHASES,
    Partition,
    Primitive,
    SliceIndex,
    Tile,
    home_square,
)
from lancet_kernels.graph.rules.tile_layouts import (
    UNCUT,
    Layout,
    layout_of,
    movements,
    redistribution,
    summing_groups,
)
from lancet_kernels.layer.expert_states import ShardedModule
from lancet_kernels.layer.gradients import set_gradient_group
from lancet_kernels.ops.base import cast
from lancet_kernels.ops.comm.groups import (
    AnyGroups,
    expert_group_name,
    group_rank,
    group_ranks,
    group_size,
    subgroup,
)
from lancet_kernels.ops.comm.redistribute import Way, check_alike, moved
from lancet_kernels.ops.square_linear import Sums, square_linear

TILES_OF = {"weight": (("k", "n"), 0), "bias": (("k", UNCUT), -1)}
"""Dimensions of a parameter, and the time step of the forward whose tile a rank holds."""


@dataclass
class LeadingDimensions:
    """Shared by the linear layers of one block: where rows are cut between them, the result of the last one
    gets the leading dimensions of the input of the first one."""

    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Neighbour:
    """The operator before or behind a linear layer: its partition, and the name of its last dimension."""

    partition: Partition
    features: str = "k"

    def ends(self, phase: str, t: int):
        """Layout of its activation (or the gradient of it) at a step of a phase."""
        return layout_of(self.partition, phase, ("m", self.features), t)


class PartitionedLinear(ShardedModule):
    """y = x W^T + b on the ranks of a partition. Parameters are tiles of the original layer's, which state
    dicts hold as DTensors.

    Args:
        linear: an `nn.Linear`, or transformers' `Conv1D`, alike on every rank.
        partition: over as many devices as the group has ranks, without `b`: rows are cut as `m`.
        before, after: the neighbouring operators.
        groups: None: all ranks.
        leading: of its block.
        kinds: of output features, which are ordered by kind (GPT-2's queries, keys, values); ranks get their
            part of each, and state dicts have a dimension for the kinds.
    Raises: UserError (sizes that the slices do not divide).
    """

    def __init__(
        self,
        linear: nn.Module,
        partition: Partition,
        before: Neighbour,
        after: Neighbour,
        groups: AnyGroups | None = None,
        leading: LeadingDimensions | None = None,
        kinds: int = 1,
    ) -> None:
        super().__init__()
        self._group, self.partition = expert_group_name(groups), partition
        self._is_transposed, self._kinds = not isinstance(linear, nn.Linear), kinds
        weight = linear.get_parameter("weight")
        weight_KN = weight.T if self._is_transposed else weight
        self.out_features, self.in_features = weight_KN.shape
        # Where there are kinds, tiles are cut from features by piece, then by kind: any tile, of this layer
        # or of the operator behind, has whole pieces.
        own, behind = partition.slices("k"), after.partition.slices(after.features)
        self._pieces = max(own, behind)
        self._own_pieces, self._pieces_behind = self._pieces // own, self._pieces // behind
        self._check_partition()
        self._before, self._after = before, after
        # Before and behind: whether rows are cut.
        self._cuts_rows = tuple(one.partition.slices("m") > 1 for one in (before, after))
        self._movements = movements(partition)
        self._leading = leading or LeadingDimensions()
        self._compared: set[tuple[int, torch.dtype]] = set()
        self._width = self.in_features // before.partition.slices(before.features)
        bias = getattr(linear, "bias", None)
        summing = summing_groups(partition)
        self._sums = Sums(*map(self._own_group, summing if bias is not None else summing[:3]))
        self.enter = _edge(before, Neighbour(partition, "n"), into=True)
        self.leave = _edge(after, Neighbour(partition, "k"), into=False)
        self.weight = nn.Parameter(self.part("weight", weight), weight.requires_grad)
        self.bias = None if bias is None else nn.Parameter(self.part("bias", bias), bias.requires_grad)
        # The backward sums gradients itself: nothing else may.
        set_gradient_group(self, None)

    def forward(self, x: Tensor) -> Tensor:
        """[..., features] in the layout before -> [..., features] in the layout behind.

        Raises: UserError (a shape that ranks cannot divide, or another one on another rank),
        CommunicationError.
        """
        x, weight = cast(x), self._by_piece(cast(self.weight), self._own_pieces)
        bias = None if self.bias is None else self._by_piece(cast(self.bias), self._own_pieces)
        if x.dim() < 1 or x.shape[-1] != self._width or x.dtype != weight.dtype:
            raise UserError(
                f"input tile of {type(self).__name__}",
                got=f"{tuple(x.shape)} of {_name(x.dtype)}",
                expected=f"[..., {self._width}] of {_name(weight.dtype)}",
                do="give what the operator before has on this rank, in the dtype of the weight",
            )
        self._compare(x)
        if not self._cuts_rows[0]:
            self._leading.shape = tuple(x.shape[:-1])
        tile = self.enter(x.reshape(-1, x.shape[-1]), self._group, "I")
        y = square_linear(tile, weight, bias, self._movements, self._sums, self._group)
        y = self.leave(y, self._group, "O")
        # In the order of the model's own code.
        y = _regrouped(y, 1, self._pieces_behind, self._kinds)
        return y.view(*self._leading_of(y, x), y.shape[-1])

    def _compare(self, x: Tensor) -> None:
        """Raise on all ranks if one has another layer or number of rows; compared once for each number."""
        rows = x.shape[:-1].numel()
        if torch.compiler.is_compiling() or not self._group or (rows, x.dtype) in self._compared:
            return
        own = f"{rows} rows of {_name(x.dtype)}, {self.extra_repr()}"
        do = "give every rank the same layer, and the same inputs or tiles of them"
        check_alike(own, self._group, x.device, type(self).__name__, do)
        self._compared.add((rows, x.dtype))

    @torch.no_grad()
    def whole_parameter(self, name: str) -> Tensor:
        """The weight or the bias of the original layer. Collective over the group."""
        tile = getattr(self, name).detach()
        by_piece = self._by_piece(tile, self._own_pieces)
        by_piece = moved(by_piece.view(len(by_piece), -1), self._from_whole(name).back, self._group, name)
        return self._by_kind(by_piece, self._pieces, tile.dim())

    def layout(self, name: str) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
        if self.partition.devices == 1 or name not in TILES_OF:
            return None
        parameter = self.get_parameter(name)
        kind = "cpu" if parameter.is_meta else parameter.device.type
        tiles = layout_of(self.partition, FORWARD, *TILES_OF[name])
        features = self._feature_dimension(parameter.dim()) + (self._kinds > 1)
        inputs: Placement = Replicate()
        if parameter.dim() > 1:
            inputs = Shard(0 if self._is_transposed else features + 1)
        mesh = _mesh_of_tiles(kind, tiles, tuple(group_ranks(self._group)), dist.get_rank())
        return mesh, (Shard(features), inputs, Replicate())

    def in_states(self, name: str, own: Tensor) -> Tensor:
        features = self._feature_dimension(own.dim())
        return own if self._kinds == 1 else own.unflatten(features, (self._kinds, -1))

    def gathered(self, name: str, shards: DTensor) -> Tensor:
        if self.partition.devices == 1:
            return super().gathered(name, shards)
        raise UserError(
            f"{name} of {type(self).__name__}",
            got="tiles of another partition",
            expected="those of this one, or the whole tensor",
            do="use torch.distributed.checkpoint, or whole_state_dict(model)",
        )

    def part(self, name: str, whole: Tensor) -> Tensor:
        shape = torch.Size([self.out_features, self.in_features] if name == "weight" else [self.out_features])
        shape = shape[::-1] if self._is_transposed else shape
        in_states = self.in_states(name, torch.empty(shape, device="meta")).shape
        if whole.shape not in (shape, in_states):
            raise UserError(
                f"{name} of {type(self).__name__}",
                got=list(whole.shape),
                expected=f"the whole tensor, {list(shape)}",
                do="give the state dict of the whole model",
            )
        by_piece = self._by_piece(whole.detach().reshape(shape), self._pieces)
        own = moved(by_piece.view(len(by_piece), -1), self._from_whole(name).there, self._group, name)
        return self._by_kind(own, self._own_pieces, len(shape))

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, partition={self.partition}"

    def _check_partition(self) -> None:
        into, out = self.partition.slices("n"), self._kinds * self._pieces
        if self.in_features % into or self.out_features % out:
            raise UserError(
                f"partition {self.partition} of a linear layer",
                got=f"{self.in_features} features in and {self.out_features} out",
                expected=f"multiples of {into} and {out}",
                do="choose another partition",
            )

    def _own_group(self, groups: tuple[tuple[int, ...], ...]) -> str:
        rank = group_rank(self._group)
        own = [group for group in groups if rank in group]
        return subgroup(own[0], self._group) if own else ""

    def _feature_dimension(self, dim: int) -> int:
        """Where a parameter with so many dimensions has the output features."""
        return int(self._is_transposed and dim == 2)

    def _by_piece(self, parameter: Tensor, pieces: int) -> Tensor:
        """A parameter as [features out, ...], by piece, then by kind."""
        features_first = parameter.T if self._feature_dimension(parameter.dim()) else parameter
        return _regrouped(features_first, 0, self._kinds, pieces)

    def _by_kind(self, by_piece: Tensor, pieces: int, dim: int) -> Tensor:
        """The inverse, of a parameter with so many dimensions, from a matrix."""
        matrix = _regrouped(by_piece, 0, pieces, self._kinds)
        parameter = matrix.flatten() if dim == 1 else matrix.movedim(0, self._feature_dimension(dim))
        return parameter.clone(memory_format=torch.contiguous_format)

    def _from_whole(self, name: str) -> Way:
        """From the whole parameter on every rank to the tiles of a step of the forward, and back."""
        return there_and_back(self.uncut, layout_of(self.partition, FORWARD, *TILES_OF[name]))

    @property
    def uncut(self) -> Layout:
        """The layout of a tensor that is whole on every rank."""
        return layout_of(self.partition, FORWARD, (UNCUT, UNCUT), 0)

    def _leading_of(self, y: Tensor, x: Tensor) -> tuple[int, ...]:
        """Leading dimensions of the result; where rows are cut, ones and the number of this rank's rows."""
        if len(y) == x.shape[:-1].numel():
            return x.shape[:-1]
        return (*(1,) * (x.dim() - 2), len(y)) if self._cuts_rows[1] else self._leading.shape


def _regrouped(x: Tensor, dim: int, outer: int, inner: int) -> Tensor:
    """A dimension [outer * inner * width] by inner, then by outer."""
    if min(outer, inner) == 1:
        return x
    return x.unflatten(dim, (outer, inner, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)


@lru_cache(maxsize=1000)
def _mesh_of_tiles(device_type: str, tiles: Layout, ranks: tuple[int, ...], _rank: int) -> DeviceMesh:
    """The ranks by slice of the rows, slice of the features, and copy, as seen from a rank. It has no
    communicators: torch's would have the ranks in another order."""
    holders: dict[Tile, list[int]] = defaultdict(list)
    for tile, rank in zip(tiles.tiles, ranks, strict=True):
        holders[tile].append(rank)
    rows, columns = map(range, tiles.slices)
    return DeviceMesh(device_type, [[holders[r, c] for c in columns] for r in rows], _init_backend=False)


def _edge(other: Neighbour, own: Neighbour, into: bool) -> Way:
    """From the operator before (`into`) or to the one behind: of the activation, and of its gradient."""
    producer, consumer = (other, own) if into else (own, other)
    there = redistribution(producer.ends(FORWARD, -1), consumer.ends(FORWARD, 0))
    return Way(there, redistribution(consumer.ends(BACKWARD, -1), producer.ends(BACKWARD, 0)))


def there_and_back(one: Layout, other: Layout) -> Way:
    """Between two layouts that an activation and its gradient share."""
    return Way(redistribution(one, other), redistribution(other, one))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def whole_parameters(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """For each parameter of partitioned layers, a function that gathers it. Collective over their groups."""
    layers = [(f"{n}." if n else "", m) for n, m in model.named_modules(remove_duplicate=False)]
    return {
        before + name: partial(module.whole_parameter, name)
        for before, module in layers
        if isinstance(module, PartitionedLinear)
        for name in TILES_OF
        if getattr(module, name) is not None
    }


def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """`model.state_dict()` with the parameters of linear layers as without partitions, on every rank.
    Collective over their groups."""
    return model.state_dict() | {name: gather() for name, gather in whole_parameters(model).items()}


STRAIGHT, SKEWED = TILES = ("straight", "skewed")


class SquareLinear(PartitionedLinear):
    """y = x W^T + b, as `nn.Linear`, divided over the ranks of a group.

        layer = SquareLinear(1024, 4096)
        tile = layer.scatter(x)                 # [..., 1024] on every rank -> [rows, 1024 / q]
        y = layer.gather(layer(tile), x.shape[:-1])

    A rank has only its own tile of the weight, except while it multiplies, and the slice of the bias of its
    features.

    A product needs either its input or its output skewed. Where both are straight, the narrower one is sent
    once more in the forward and in the backward; between layers that alternate nothing is:

        fc1 = SquareLinear(1024, 4096, takes="skewed")  # gives straight tiles
        fc2 = SquareLinear(4096, 1024, gives="skewed")  # takes them, and gives what the next fc1 takes

    Args:
        in_features, out_features: of the whole layer, multiples of 2^k.
        groups: 4^k ranks (1, 4, 16, ...) that share it; None: all ranks.
        bias: as of `nn.Linear`.
        takes, gives: "straight" or "skewed", the tiles of input and output on the ranks. A layer must take
            what the one before gives; `scatter` and `gather` do.
        linear: a layer of these sizes, the same on every rank, whose weights are used.
    Raises: UserError for another number of ranks, and for other sizes.

    Its initial parameters are those of an `nn.Linear` created with the same state of torch's random
    generator, which must be the same on all ranks; each rank holds the whole weight temporarily.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        groups: AnyGroups | None = None,
        bias: bool = True,
        *,
        takes: str = STRAIGHT,
        gives: str = STRAIGHT,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        linear: nn.Linear | None = None,
    ) -> None:
        ranks = group_size(expert_group_name(groups))
        exponent = (ranks.bit_length() - 1) // 2
        if 4**exponent != ranks:
            raise UserError(
                "ranks of SquareLinear",
                got=ranks,
                expected="1, 4, 16, 64, ...",
                do="give a group of so many ranks, or use nn.Linear",
            )
        before, after = (_tiles_of(exponent, *item) for item in (("takes", takes), ("gives", gives)))
        skewed = skewed_dimension(in_features, out_features, takes, gives)
        source = linear or nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        super().__init__(source, Partition((home_square(exponent, skewed),)), before, after, groups)
        self._scatter = there_and_back(self.uncut, before.ends(FORWARD, -1))
        self._gather = there_and_back(after.ends(FORWARD, 0), self.uncut)
        self._side = 1 << exponent

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        groups: AnyGroups | None = None,
        takes: str = STRAIGHT,
        gives: str = STRAIGHT,
    ) -> SquareLinear:
        """The layer with the weights of a linear layer that is the same on every rank."""
        return cls(linear.in_features, linear.out_features, groups, takes=takes, gives=gives, linear=linear)

    def to_linear(self) -> nn.Linear:
        """The whole layer, on every rank. Collective over the ranks of the group."""
        whole, has_bias = whole_state_dict(self), self.bias is not None
        weight = whole["weight"]
        linear = nn.Linear(
            self.in_features, self.out_features, has_bias, device=weight.device, dtype=weight.dtype
        )
        linear.load_state_dict(whole)
        return linear

    def scatter(self, x: Tensor) -> Tensor:
        """[..., in_features], the same on every rank -> this rank's tile [rows, in_features / q].

        Differentiable: every rank gets the whole gradient.
        Raises: UserError for another number of features.
        """
        if x.shape[-1:] != (self.in_features,):
            raise UserError(
                "input of SquareLinear.scatter",
                got=tuple(x.shape),
                expected=f"[..., {self.in_features}]",
                do="give the whole input",
            )
        rows = x.reshape(-1, self.in_features)
        filled = pad(rows, (0, 0, 0, -len(rows) % self._side))
        return self._scatter(filled, self._group, "whole input")

    def gather(self, y: Tensor, leading: Sequence[int] | None = None) -> Tensor:
        """This rank's tile [rows, out_features / q] -> the whole [*leading, out_features] on every rank.

        Differentiable: what follows is the same on every rank, so each takes its tile of the gradient.
        Args: leading: the leading dimensions of the scattered input; None: one with the rows of all tiles,
            including the padding of `scatter`.
        Raises: UserError if the tiles do not have so many rows.
        """
        whole = self._gather(y.reshape(-1, y.shape[-1]), self._group, "whole output")
        if leading is None:
            return whole
        rows = math.prod(leading)
        if not len(whole) - self._side < rows <= len(whole):
            raise UserError(
                "leading dimensions of SquareLinear.gather",
                got=f"{tuple(leading)}, {rows} rows",
                expected=f"those of the {len(whole)} rows of all tiles",
                do="give the leading dimensions of the scattered input",
            )
        return whole[:rows].view(*leading, self.out_features)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        ends = (("takes", self._before), ("gives", self._after))
        more = "".join(f', {name}="{SKEWED}"' for name, end in ends if SKEWED in str(end.partition))
        return f"{sizes}, bias={self.bias is not None}, ranks={self.partition.devices}{more}"


def skewed_dimension(in_features: int, out_features: int, takes: str, gives: str) -> str:
    """The argument of `home_square`, "n" or "k", with which the fewest features are sent before or behind."""
    travelling = {
        "n": in_features * (takes != SKEWED) + out_features * (gives != STRAIGHT),
        "k": in_features * (takes != STRAIGHT) + out_features * (gives != SKEWED),
    }
    return min(travelling, key=lambda d: travelling[d])


def _tiles_of(exponent: int, name: str, how: str) -> Neighbour:
    """The neighbour before (`takes`) or behind (`gives`) a layer. Raises: UserError for another `how`."""
    check_name(f"{name} of SquareLinear", how, TILES)
    tile = {"m": SliceIndex(row=1), "k": SliceIndex(row=int(how == SKEWED), column=1)}
    primitive = Primitive(how, exponent, exponent, 1, dict.fromkeys(PHASES, tile))
    return Neighbour(Partition((primitive,)))
