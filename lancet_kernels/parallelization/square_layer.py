"""A linear layer whose weight, gradient, input and output are divided over 4^k ranks.

    q  ranks along a side, 2^k

Rank r * q + c has tile (r, c) of the input and of the output (*straight*), or (r, (r + c) % q) (*skewed*),
so that several layers, with element-wise functions between them, can follow each other. No activation and no
weight is replicated; tiles are shifted between ranks while GEMMs run (PrimePar, ASPLOS '24;
`ops.square_linear`, `graph.rules.slices`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lancet_kernels.errors import UserError, check_name
from lancet_kernels.graph.rules.slices import (
    FORWARD,
    PHASES,
    Partition,
    Primitive,
    SliceIndex,
    home_square,
    moves,
)
from lancet_kernels.ops.comm.groups import AnyGroups, expert_group_name, group_size
from lancet_kernels.parallelization.partitioned_linear import (
    Neighbour,
    PartitionedLinear,
    there_and_back,
)

STRAIGHT, SKEWED = TILES = ("straight", "skewed")


class SquareLinear(PartitionedLinear):
    """y = x W^T + b, as `nn.Linear`, divided over the ranks of a group.

        layer = SquareLinear(1024, 4096)
        tile = layer.scatter(x)                 # [..., 1024] on every rank -> [rows, 1024 / q]
        y = layer.gather(layer(tile), x.shape[:-1])

    A rank has no tile of the weight but its own, except while it multiplies; of the bias it has the slice of
    its features.

    A product needs one of input and output skewed. Where both are straight, the narrower one travels once
    more in the forward and in the backward; nothing does between layers that alternate:

        fc1 = SquareLinear(1024, 4096, takes="skewed")  # gives straight tiles
        fc2 = SquareLinear(4096, 1024, gives="skewed")  # takes them, and gives what the next fc1 takes

    Args:
        in_features, out_features: of the whole layer, multiples of 2^k.
        groups: 4^k ranks (1, 4, 16, ...) that share it; None: all ranks.
        bias: as of `nn.Linear`.
        takes, gives: "straight" or "skewed", which tile of input and output rank r * q + c has. A layer must
            take what the one before gives; `scatter` and `gather` do. Where the tile of the weight lies
            depends on it: load state dicts into layers that were made alike.
        linear: a layer of these sizes that every rank has, whose weights it takes.
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
        self._scatter = there_and_back(self.whole, before.ends(FORWARD, -1))
        self._gather = there_and_back(after.ends(FORWARD, 0), self.whole)
        self._side = 1 << exponent

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        groups: AnyGroups | None = None,
        takes: str = STRAIGHT,
        gives: str = STRAIGHT,
    ) -> SquareLinear:
        """The layer with the weights of a linear layer that every rank has."""
        return cls(linear.in_features, linear.out_features, groups, takes=takes, gives=gives, linear=linear)

    def to_linear(self) -> nn.Linear:
        """The whole layer, on every rank. Collective over the ranks of the group."""
        whole, has_bias = self.whole_parameters(), self.bias is not None
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
        Args: leading: the leading dimensions of what was scattered; None: one with the rows of all tiles,
            including those that `scatter` added where q does not divide them.
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
                do="give the leading dimensions of what was scattered",
            )
        return whole[:rows].view(*leading, self.out_features)

    def shifts(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Each shift of a forward and backward in which something travels: its phase or end, the tensor of
        which tiles travel (x, weight, y, dy, dx), and their sources."""
        yield from self._movements.every()
        for end, tensors, way in (("enter", ("x", "dx"), self.enter), ("leave", ("y", "dy"), self.leave)):
            for tensor, plan in zip(tensors, (way.there, way.back), strict=True):
                assert plan.sources is not None, "tiles go as they are"
                if moves(plan.sources):
                    yield end, tensor, plan.sources

    def extra_repr(self) -> str:
        """Sizes of the whole layer, and the number of ranks."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        ends = (("takes", self._before), ("gives", self._after))
        more = "".join(f', {name}="{SKEWED}"' for name, of in ends if SKEWED in str(of.partition))
        return f"{sizes}, bias={self.bias is not None}, ranks={self.partition.devices}{more}"


def skewed_dimension(in_features: int, out_features: int, takes: str, gives: str) -> str:
    """The argument of `home_square` with which the fewest features travel before or behind it, "n" or "k"."""
    travelling = {
        "n": in_features * (takes != SKEWED) + out_features * (gives != STRAIGHT),
        "k": in_features * (takes != STRAIGHT) + out_features * (gives != SKEWED),
    }
    return min(travelling, key=lambda d: travelling[d])


def _tiles_of(exponent: int, name: str, how: str) -> Neighbour:
    """What stands before (`takes`) or behind (`gives`) a layer. Raises: UserError for another word."""
    check_name(f"{name} of SquareLinear", how, TILES)
    tile = {"m": SliceIndex(row=1), "k": SliceIndex(row=int(how == SKEWED), column=1)}
    primitive = Primitive(how, exponent, exponent, 1, dict.fromkeys(PHASES, tile))
    return Neighbour(Partition((primitive,)))
