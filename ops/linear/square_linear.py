"""O = I W + b on the ranks of a partition (PrimePar). P(2^k x 2^k) needs 2^k steps and no replica of I, W, O.

    m, n, k  rows, features in and features out of this rank's tiles

Per step a rank multiplies the tiles it has, while those of the next step travel: each phase starts its
shifts before the GEMM that hides them and waits for them behind it. Who sends what to whom is an argument
(`Movements`), and so is what has to be summed where a partition splits M, N or K (`Sums`):
`graph.rules.tile_layouts` derives both.

Every phase begins with the tiles that a rank keeps: those of input and weight with which the forward began.
So steps of backward and gradient alternate, and two GEMMs hide a shift.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lancet_kernels.ops.comm.all_reduce import start_sum
from lancet_kernels.ops.comm.pending import Here, Started
from lancet_kernels.ops.comm.shards import all_reduce
from lancet_kernels.ops.comm.shift import shift, start_shift

Sources = tuple[int, ...]


class Movements(NamedTuple):
    """Where tiles of each operand of each phase come from between each step and the next, for each place of
    the group (`ops.comm.shift`)."""

    forward_x: tuple[Sources, ...]
    forward_weight: tuple[Sources, ...]
    backward_dy: tuple[Sources, ...]
    backward_weight: tuple[Sources, ...]
    gradient_x: tuple[Sources, ...]
    gradient_dy: tuple[Sources, ...]

    def every(self) -> Iterator[tuple[str, str, Sources]]:
        """Each shift in which something travels: its phase, the tensor (x, weight, dy), the sources."""
        for name, steps in self._asdict().items():
            yield from ((*name.split("_"), step) for step in steps if _moves(step))


class Sums(NamedTuple):
    """Names of the groups that sum this rank's result at the end of a phase; "": it is complete."""

    y: str = ""
    dx: str = ""
    dweight: str = ""
    dbias: str = ""


def square_linear(
    x_MN: Tensor, weight_KN: Tensor, bias_K: Tensor | None, movements: Movements, sums: Sums, group: str
) -> Tensor:
    """This rank's tile of the product: [m, n] -> [m, k]. Differentiable once.

    Args: weight_KN, bias_K: this rank's tile and slice. group: all ranks of the partition.
    Raises: CommunicationError.
    """
    return _SquareLinear.apply(x_MN, weight_KN, bias_K, movements, sums, group)


class _SquareLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, movements, sums, group):
        ctx.save_for_backward(x, weight)
        ctx.movements, ctx.sums, ctx.group = movements, sums, group
        product = _Phase(
            "forward",
            {"I": (x, movements.forward_x), "W": (weight, movements.forward_weight)},
            lambda x, weight: (x, weight.T),
            group,
        )
        for t in range(len(movements.forward_x) + 1):
            product.step(t)
        y = _start_sum(product.result, sums.y).wait()
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x, weight), moves, sums = ctx.saved_tensors, ctx.movements, ctx.sums
        needs_dx, needs_dweight, needs_dbias, *_ = ctx.needs_input_grad
        dx = dweight = dbias = None
        if needs_dbias:
            dbias = _start_sum(dy.sum(0), sums.dbias)
        of_x = _Phase(
            "backward",
            {"dO": (dy, moves.backward_dy), "W": (weight, moves.backward_weight)},
            lambda dy, weight: (dy, weight),
            ctx.group,
            dy,
        )
        of_weight = _Phase(
            "gradient",
            {"I": (x, moves.gradient_x), "dO": (dy, moves.gradient_dy)},
            lambda x, dy: (dy.T, x),
            ctx.group,
            dy,
        )
        steps = len(moves.backward_dy) + 1
        for t in range(steps):
            if needs_dx:
                of_x.step(t)
                if t + 1 == steps:
                    dx = _start_sum(of_x.result, sums.dx)
            if needs_dweight:
                of_weight.step(t)
        if needs_dweight:
            dweight = _start_sum(of_weight.result, sums.dweight)
        gradients = [None if started is None else started.wait() for started in (dx, dweight, dbias)]
        return *gradients, None, None, None


class _Phase:
    """A sum of products over the steps; while one is multiplied, the tiles of the next travel.

    Args: operands: by name, the tile of the first step, and its sources between each step and the next.
        factors: matrices to multiply, from the tiles. after: a tensor before which no shift may begin in a
        captured graph.
    """

    def __init__(
        self,
        name: str,
        operands: Mapping[str, tuple[Tensor, tuple[Sources, ...]]],
        factors: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        group: str,
        after: Tensor | None = None,
    ) -> None:
        self._name, self._factors, self._group, self._after = name, factors, group, after
        self._tiles: dict[str, Started[list[Tensor]]] = {
            what: Here([tile]) for what, (tile, _) in operands.items()
        }
        self._sources = {what: sources for what, (_, sources) in operands.items()}
        self._sum: Tensor | None = None

    @property
    def result(self) -> Tensor:
        """The sum so far."""
        assert self._sum is not None, "before the first step"
        return self._sum

    def step(self, t: int) -> None:
        """Steps come in order. Raises: CommunicationError."""
        tiles = {what: started.wait()[0] for what, started in self._tiles.items()}
        # Behind the last step nothing keeps the tiles.
        self._tiles = {
            what: self._travelling(what, tile, t)
            for what, tile in tiles.items()
            if t < len(self._sources[what])
        }
        a, b = self._factors(*tiles.values())
        self._sum = a @ b if self._sum is None else self._sum.addmm_(a, b)

    def _travelling(self, what: str, tile: Tensor, t: int) -> Started[list[Tensor]]:
        """A shift in two halves; in a graph that is captured in one piece, which a plan takes apart."""
        sources = self._sources[what][t]
        if not _moves(sources):
            return Here([tile])
        name = f"{what}, {self._name} step {t + 1}"
        if torch.compiler.is_compiling():
            # A gradient is in the backward by itself.
            after = None if what == "dO" else self._after
            return Here(shift([tile], list(sources), self._group, name, after))
        return start_shift([tile], sources, self._group, name)


def _start_sum(summand: Tensor, group: str) -> Started[Tensor]:
    """An all-reduce in two halves, like a shift; nothing where the tensor is complete."""
    if not group:
        return Here(summand)
    if torch.compiler.is_compiling():
        return Here(all_reduce(summand, group))
    total = summand.clone(memory_format=torch.contiguous_format)
    return start_sum(total, group, lambda: total)


def _moves(sources: Sequence[int]) -> bool:
    return any(source != place for place, source in enumerate(sources))
