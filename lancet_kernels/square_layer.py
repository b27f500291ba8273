"""A linear layer whose weight, bias, gradients, input and output are divided over 4^k ranks.

    q  ranks along a side, 2^k      m, n, k  rows, features in and features out of a tile

Rank r * q + c has tile (r, c) of the input and of the output (*straight*), or (r, (r + c) % q) (*skewed*),
so that several layers, with element-wise functions between them, can follow each other. Nothing is replicated
and there are no collectives; tiles are shifted between ranks while GEMMs run (PrimePar, ASPLOS '24;
`ops.square_linear`, `graph.slices`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from lancet_kernels.errors import UserError
from lancet_kernels.graph.slices import FORWARD, GRADIENT, Partition, Tile, home_square
from lancet_kernels.graph.tile_layouts import movements
from lancet_kernels.ops.groups import group_name, group_size
from lancet_kernels.ops.shift import check_alike
from lancet_kernels.ops.square_fused import FusedPhases
from lancet_kernels.ops.square_linear import (
    Movements,
    Padding,
    Phases,
    Pieces,
    ShiftedPhases,
    square_linear,
)
from lancet_kernels.ops.tiles import gather_tiles, row_of_rank, scatter_tiles
from lancet_kernels.training.gradients import set_gradient_group

_SLICES_NEEDED = ((FORWARD, "n"), (FORWARD, "k"), (GRADIENT, "n"))
BACKENDS = ("torch", "fused")
STRAIGHT, SKEWED = TILES = ("straight", "skewed")
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class SquareLinear(nn.Module):
    """y = x W^T + b, as `nn.Linear`, divided over the ranks of a group.

        layer = SquareLinear(1024, 4096)
        tile = layer.scatter(x)                 # [..., 1024] on every rank -> [rows, 1024 / q]
        y = layer.gather(layer(tile), x.shape[:-1])

    Sizes that the ranks do not divide are padded with zeros, which stay zero. A rank has no tile of the
    weight but its own, except while it multiplies.

    A product needs one of input and output skewed. Where both are straight, the narrower one travels once
    more in the forward and in the backward; nothing does between layers that alternate:

        fc1 = SquareLinear(1024, 4096, takes="skewed")  # gives straight tiles
        fc2 = SquareLinear(4096, 1024, gives="skewed")  # takes them, and gives what the next fc1 takes

    Args:
        in_features, out_features: of the whole layer.
        group: 4^k ranks (1, 4, 16, ...) that share it; None: all ranks.
        bias: as of `nn.Linear`.
        backend: "torch": a shift and a GEMM for each step. "fused": one persistent Triton launch for each
            phase, in which tiles of a step are multiplied while those of the next one are put (ranks that
            reach each other by pointers; in the interpreter for proof, not speed).
        takes, gives: "straight" or "skewed", which tile of input and output rank r * q + c has. A layer must
            take what the one before gives; `scatter` and `gather` do. Where the tile of the weight lies
            depends on it: load state dicts into layers that were made alike.
    Raises: UserError for another number of ranks.

    Its initial parameters are those of an `nn.Linear` created with the same state of torch's random
    generator, which must be the same on all ranks; each rank holds the whole weight temporarily.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: dist.ProcessGroup | None = None,
        bias: bool = True,
        *,
        backend: str = "torch",
        takes: str = "straight",
        gives: str = "straight",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        linear = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
        self._initialize(linear, group, backend, takes, gives)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        group: dist.ProcessGroup | None = None,
        backend: str = "torch",
        takes: str = "straight",
        gives: str = "straight",
    ) -> SquareLinear:
        """The layer with the weights of a linear layer that every rank has."""
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._initialize(linear, group, backend, takes, gives)
        return layer

    def to_linear(self) -> nn.Linear:
        """The whole layer, on every rank. Collective over the ranks of the group."""
        with torch.no_grad():
            whole = self._gathered(self.weight, self._weight_tiles)
            linear = nn.Linear(
                self.in_features,
                self.out_features,
                self.bias is not None,
                device=whole.device,
                dtype=whole.dtype,
            )
            linear.weight.copy_(whole[: self.out_features, : self.in_features])
            if self.bias is not None:
                rows = self._gathered(self.bias[None], self._weight_tiles)[:, : len(self.weight)]
                linear.bias.copy_(rows.reshape(-1)[: self.out_features])
        return linear

    def forward(self, x: Tensor) -> Tensor:
        """This rank's tile: [..., in_features / q] -> [..., out_features / q], as many rows on every rank.

        Raises: UserError (shape or dtype wrong, or another one on another rank), CommunicationError.
        """
        self._check(x)
        rows = x.reshape(-1, x.shape[-1])
        pieces = self._pieces() if self.bias is not None else None
        padding = self._padding() if self._is_padded else None
        y = square_linear(rows, self.weight, self.bias, pieces, padding, self.movements, self._phases)
        return y.view(*x.shape[:-1], y.shape[-1])

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
        return self._scattered(x.reshape(-1, self.in_features), self._input_tiles)

    def gather(self, y: Tensor, leading: Sequence[int] | None = None) -> Tensor:
        """This rank's tile [rows, out_features / q] -> the whole [*leading, out_features] on every rank.

        Differentiable: what follows is the same on every rank, so each takes its tile of the gradient.
        Args: leading: the leading dimensions of what was scattered; None: one with the rows of all tiles,
            including those that `scatter` added where q does not divide them.
        Raises: UserError if the tiles do not have so many rows.
        """
        whole = self._gathered(y.reshape(-1, y.shape[-1]), self._output_tiles)[:, : self.out_features]
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

    def extra_repr(self) -> str:
        """Sizes of the whole layer, and the number of ranks."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        more = ', backend="fused"' if self.backend == "fused" else ""
        more += "".join(f', {n}="{t}"' for n, t in self._tiles.items() if t != STRAIGHT)
        return f"{sizes}, bias={self.bias is not None}, ranks={self._side**2}{more}"

    def _initialize(
        self, linear: nn.Linear, group: dist.ProcessGroup | None, backend: str, takes: str, gives: str
    ) -> None:
        self._group = group_name(group)
        ranks = group_size(self._group)
        exponent = (ranks.bit_length() - 1) // 2
        if 4**exponent != ranks:
            raise UserError(
                "ranks of SquareLinear",
                got=ranks,
                expected="1, 4, 16, 64, ...",
                do="give a group of so many ranks, or use nn.Linear",
            )
        if backend not in BACKENDS:
            raise UserError(
                "backend of SquareLinear",
                got=repr(backend),
                expected=" or ".join(BACKENDS),
                do="check the name",
            )
        self._tiles = {"takes": takes, "gives": gives}
        for name, given in self._tiles.items():
            if given not in TILES:
                raise UserError(
                    f"{name} of SquareLinear",
                    got=repr(given),
                    expected=" or ".join(TILES),
                    do="check the name",
                )
        self.backend = backend
        is_fused = backend == "fused" and ranks > 1
        phases = FusedPhases if is_fused else ShiftedPhases
        self._phases: Phases = phases(self._group)
        self._side = side = 1 << exponent
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._seen: set[tuple[int, torch.dtype]] = set()
        skewed = skewed_dimension(self.in_features, self.out_features, takes, gives)
        self.movements = derived_movements(exponent, skewed, takes, gives)
        partition = Partition((home_square(exponent, skewed),))
        self._input_tiles, self._output_tiles = (
            [row * side + column for _, row, column in activation_tiles(side, how)] for how in (takes, gives)
        )
        self._weight_tiles = _tile_numbers(partition, ("k", "n"))
        self._slices_of_steps = {key: _slices(partition, *key) for key in _SLICES_NEEDED}
        self._is_padded = bool(self.in_features % self._side or self.out_features % self._side**2)
        with torch.no_grad():
            self.weight = nn.Parameter(self._scattered(linear.weight, self._weight_tiles))
            self.bias = None if linear.bias is None else nn.Parameter(self._bias_piece(linear.bias))
        # No other rank has the same.
        set_gradient_group(self, None)

    def _pieces(self) -> Pieces:
        """This rank's piece of the bias: for the weight tile of slices (N, K), piece N of slice K."""
        k, p, device = *self._tile_sizes(), self.weight.device
        piece_of_step_S = self._own_slices(FORWARD, "n")
        step_of_piece_S = piece_of_step_S.argsort()
        element_K = torch.arange(k, device=device)
        order_K = step_of_piece_S[element_K // p] * p + element_K % p
        columns_SP = self._own_slices(GRADIENT, "n")[:, None] * p + torch.arange(p, device=device)
        return Pieces(order_K, columns_SP.clamp(max=k - 1))

    def _padding(self) -> Padding:
        k, p, device = *self._tile_sizes(), self.weight.device
        row, column = self._own_slices(FORWARD, "k")[0], self._own_slices(FORWARD, "n")[0]
        element_K = torch.arange(k, device=device)
        element_N = torch.arange(self.weight.shape[1], device=device)
        element_P = column * p + torch.arange(p, device=device)
        real_K = row * k + element_K < self.out_features
        real_N = column * len(element_N) + element_N < self.in_features
        real_P = (element_P < k) & (row * k + element_P < self.out_features)
        return Padding(real_K[:, None] & real_N, real_P)

    def _own_slices(self, phase: str, dimension: str) -> Tensor:
        """[q] int64: the slice of this rank at each step."""
        return row_of_rank(self._slices_of_steps[phase, dimension], self._group, self.weight)

    def _tile_sizes(self) -> tuple[int, int]:
        """Rows k of the weight tile, elements p of the bias piece."""
        k = self.weight.shape[0]
        return k, math.ceil(k / self._side)

    def _bias_piece(self, bias: Tensor) -> Tensor:
        """[out_features] -> [p]: the piece of this rank's slice of K that its slice of N numbers."""
        k, q = len(self.weight), self._side
        rows = pad(bias, (0, q * k - len(bias))).view(q, k)
        return self._scattered(rows, self._weight_tiles).view(-1)

    def _scattered(self, whole: Tensor, tile_of: list[int]) -> Tensor:
        rows, columns = whole.shape
        filled = pad(whole, (0, -columns % self._side, 0, -rows % self._side))
        return scatter_tiles(filled, tile_of, self._side, self._group)

    def _gathered(self, tile: Tensor, tile_of: list[int]) -> Tensor:
        return gather_tiles(tile, tile_of, self._side, self._group)

    def _check(self, x: Tensor) -> None:
        width = self.weight.shape[1]
        if x.dim() < 1 or x.shape[-1] != width or x.dtype != self.weight.dtype:
            raise UserError(
                "input tile of SquareLinear",
                got=f"{tuple(x.shape)} of {_name(x.dtype)}",
                expected=f"[..., {width}] of {_name(self.weight.dtype)}",
                do="scatter the whole input, or give the output of the layer before",
            )
        if not torch.compiler.is_compiling():
            self._compare(x)
        elif isinstance(self._phases, FusedPhases):
            raise UserError(
                "captured SquareLinear",
                got='backend="fused"',
                expected='backend="torch", whose shifts a plan can move',
                do="do not optimize() it, or make it without a backend",
            )

    def _compare(self, x: Tensor) -> None:
        """Raise UserError on all ranks if layers or numbers of rows differ; checked once per number of
        rows."""
        rows = x.numel() // max(x.shape[-1], 1)
        if not self._group or (rows, x.dtype) in self._seen:
            return
        own = [rows, self.in_features, self.out_features, int(self.bias is not None), _DTYPES.index(x.dtype)]
        own += [TILES.index(how) for how in self._tiles.values()]
        numbers = "rows, features in, features out, bias, dtype, takes, gives"
        do = "give every rank the same layer and tiles of one scattered input"
        check_alike(own, self._group, x.device, "SquareLinear", numbers, do, _described)
        self._seen.add((rows, x.dtype))


def skewed_dimension(in_features: int, out_features: int, takes: str, gives: str) -> str:
    """Of `home_square`: so that the fewest features travel before or behind it, "n" or "k"."""
    travelling = {
        "n": in_features * (takes != SKEWED) + out_features * (gives != STRAIGHT),
        "k": in_features * (takes != STRAIGHT) + out_features * (gives != SKEWED),
    }
    return min(travelling, key=lambda d: travelling[d])


def activation_tiles(side: int, how: str) -> list[Tile]:
    """(batch, row, column) of the tile of each rank."""
    return [(0, r, (r * (how == SKEWED) + c) % side) for r, c in product(range(side), repeat=2)]


@cache
def derived_movements(
    exponent: int, skewed: str = "n", takes: str = STRAIGHT, gives: str = STRAIGHT
) -> Movements:
    """The shifts between 4^exponent ranks, derived from their dimension slice indices."""
    side = 1 << exponent
    partition = Partition((home_square(exponent, skewed),))
    return movements(partition, activation_tiles(side, takes), activation_tiles(side, gives))


def _tile_numbers(partition: Partition, dimensions: tuple[str, str]) -> list[int]:
    """For each rank, the number (row by row) of its tile of a matrix at the start of the forward."""
    tiles = partition.tiles(FORWARD, dimensions, 0)
    return [row * partition.slices(dimensions[0]) + column for row, column in tiles]


def _slices(partition: Partition, phase: str, dimension: str) -> list[int]:
    """A row for each rank with its slice at each step."""
    places = product(range(partition.devices), range(partition.steps))
    return [partition.slice(phase, dimension, device, t) for device, t in places]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _described(header: list[int]) -> tuple:
    tiles = (TILES[n] for n in header[5:])
    return *header[:3], bool(header[3]), _name(_DTYPES[header[4]]), *tiles
