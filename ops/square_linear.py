"""O = I W on the ranks of a partition (PrimePar). P(2^k x 2^k) needs 2^k steps, no collective, no replica.

    q  ranks along a side, 2^k      m, n, k  rows, features in and features out of a tile (1 / q of the whole)
    p  elements of a bias piece (1 / q of k)

Per step a rank multiplies the tiles it has, while those of the next step travel: each phase starts its
shifts before the GEMM that hides them and waits for them behind it. Who sends what to whom is an argument
(`Movements`), and so is what has to be summed where a partition splits M, N or K (`Sums`):
`graph.tile_layouts` derives both.

Weight and bias keep their place. A piece of the bias belongs to the weight tile of the same slices and
travels with it; over the steps of the forward all pieces of a column pass every rank of it. From the forward
to the backward a rank keeps its last tiles of input and weight: the gradient phase and the backward begin
with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lancet_kernels.ops.all_reduce import PendingAllReduce, start_all_reduce
from lancet_kernels.ops.shift import PendingShift, TilesHere, shift, start_shift

Sources = tuple[int, ...]


class Movements(NamedTuple):
    """Where tiles come from, for each place of the group (`ops.shift`); of several, one between each step and
    the next. Hand-overs in which nothing travels cost nothing."""

    enter: Sources
    """Input, from its place to the first step of the forward."""
    forward_x: tuple[Sources, ...]
    forward_weight: tuple[Sources, ...]
    weight_to_backward: Sources
    dy_to_backward: Sources
    backward_dy: tuple[Sources, ...]
    backward_weight: tuple[Sources, ...]
    leave: Sources
    """Gradient of the input, from the last step of the backward to the place of the input."""
    dy_to_gradient: Sources
    dy_directly: Sources
    """The same from the output's place, if the gradient of the input is not needed."""
    x_to_gradient: Sources
    gradient_x: tuple[Sources, ...]
    gradient_dy: tuple[Sources, ...]
    gradient_dweight: tuple[Sources, ...]
    dweight_to_weight: Sources


class Sums(NamedTuple):
    """Names of the groups that sum this rank's result at the end of a phase; "": it is complete."""

    y: str = ""
    dx: str = ""
    dweight: str = ""


COMPLETE = Sums()
"""Of P(2^k x 2^k): no phase leaves anything to sum."""


class Pieces(NamedTuple):
    """Which part of the bias this rank has when."""

    order_K: Tensor
    """Place of each element of the bias among the pieces of the forward's steps, one after another."""
    columns_SP: Tensor
    """Columns of dO that belong to the piece whose gradient each step of the gradient phase adds to."""


class Padding(NamedTuple):
    """What of this rank's tiles belongs to the layer (bool); gradients of what fills them up are zero."""

    weight_KN: Tensor
    piece_P: Tensor


def naive_square_linear(x: Tensor, weight_KN: Tensor, bias_K: Tensor | None = None) -> Tensor:
    """The reference: x [..., N] on one rank."""
    y = x @ weight_KN.T
    return y if bias_K is None else y + bias_K


class Phases(Protocol):
    """What computes the three phases: `ShiftedPhases` here, or `square_fused.FusedPhases`. Tensors are tiles
    of this rank."""

    @property
    def group(self) -> str:
        """Name of the group of all ranks."""

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor | None, moves: Movements
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> O; I and W of the last step."""

    def input_gradient(self, dy: Tensor, weight: Tensor, moves: Movements) -> tuple[Tensor, Tensor]:
        """-> dI; dO of the last step."""

    def weight_gradient(
        self, x: Tensor, dy: Tensor, columns: Tensor | None, moves: Movements
    ) -> list[Tensor]:
        """-> dW, and the gradient of the piece of the bias if `columns` says what belongs to it."""


def square_linear(
    x_MN: Tensor,
    weight_KN: Tensor,
    bias_P: Tensor | None,
    pieces: Pieces | None,
    padding: Padding | None,
    movements: Movements,
    phases: Phases,
    sums: Sums = COMPLETE,
) -> Tensor:
    """This rank's tile of the product: [m, n] -> [m, k]. Differentiable once.

    Args: weight_KN, bias_P: this rank's tile [k, n] and piece [p], where the forward begins. A bias is for
        P(2^k x 2^k) alone. phases: what computes them, on all ranks of the partition.
    Raises: CommunicationError.
    """
    order, columns = pieces or (None, None)
    real_weight, real_piece = padding or (None, None)
    return _SquareLinear.apply(
        x_MN, weight_KN, bias_P, order, columns, real_weight, real_piece, movements, phases, sums
    )


class _SquareLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, order, columns, real_weight, real_piece, movements, phases, sums):
        (x,) = start_if_it_moves([x], movements.enter, phases.group, "I to the forward").wait()
        y, x, weight = phases.forward(x, weight, bias, order, movements)
        ctx.save_for_backward(x, weight, columns, real_weight, real_piece)
        ctx.movements, ctx.phases, ctx.sums = movements, phases, sums
        return _summed(y, sums.y).wait()[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, columns, real_weight, real_piece = ctx.saved_tensors
        moves, phases, group = ctx.movements, ctx.phases, ctx.phases.group

        def handed_over(tile: Tensor, sources: Sources, what: str) -> Tensor:
            return start_if_it_moves([tile], sources, group, what).wait()[0]

        dx = leaving = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            weight = handed_over(weight, moves.weight_to_backward, "W, forward to backward")
            dy = handed_over(dy, moves.dy_to_backward, "dO to the backward")
            dx, dy = phases.input_gradient(dy, weight, moves)
            # A gradient that is summed has no other place to go to.
            leaving = (
                start_all_reduce([dx], ctx.sums.dx)
                if ctx.sums.dx
                else start_if_it_moves([dx], moves.leave, group, "dI, backward to the input's place")
            )
            sources = moves.dy_to_gradient
        else:
            sources = moves.dy_directly
        if ctx.needs_input_grad[1]:
            dy = handed_over(dy, sources, "dO, backward to gradient")
            x = handed_over(x, moves.x_to_gradient, "I, forward to gradient")
            dweight, *pieces = phases.weight_gradient(x, dy, columns, moves)
            dbias = pieces[0] if pieces else None
            (dweight,) = _summed(dweight, ctx.sums.dweight).wait()
            if real_weight is not None:
                dweight = dweight * real_weight
                dbias = dbias * real_piece if pieces else None
        if leaving is not None:
            (dx,) = leaving.wait()
        return dx, dweight, dbias, *[None] * 7


@dataclass(frozen=True)
class ShiftedPhases:
    """Each phase step by step: a GEMM, and beside it the shifts of the tiles for the next step."""

    group: str

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor | None, moves: Movements
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> O; I and W of the last step. Raises: CommunicationError."""
        tiles, passed = [weight] if bias is None else [weight, bias], []
        y, steps, group = x.new_empty(0), len(moves.forward_x) + 1, self.group
        for t in range(steps):
            if t + 1 < steps:
                next_x = start_if_it_moves([x], moves.forward_x[t], group, f"I, forward step {t + 1}")
                next_tiles = start_if_it_moves(
                    tiles, moves.forward_weight[t], group, f"W, forward step {t + 1}"
                )
            y = x @ tiles[0].T if t == 0 else y.addmm_(x, tiles[0].T)
            passed += tiles[1:]
            if t + 1 < steps:
                (x,), tiles = next_x.wait(), next_tiles.wait()
        if bias is not None:
            y += torch.cat(passed)[order]
        return y, x, tiles[0]

    def input_gradient(self, dy: Tensor, weight: Tensor, moves: Movements) -> tuple[Tensor, Tensor]:
        """-> dI; dO of the last step. Raises: CommunicationError."""
        dx, steps, group = dy.new_empty(0), len(moves.backward_dy) + 1, self.group
        for t in range(steps):
            if t + 1 < steps:
                next_dy = start_if_it_moves([dy], moves.backward_dy[t], group, f"dO, backward step {t + 1}")
                next_weight = start_if_it_moves(
                    [weight], moves.backward_weight[t], group, f"W, backward step {t + 1}", dy
                )
            dx = dy @ weight if t == 0 else dx.addmm_(dy, weight)
            if t + 1 < steps:
                (dy,), (weight,) = next_dy.wait(), next_weight.wait()
        return dx, dy

    def weight_gradient(
        self, x: Tensor, dy: Tensor, columns: Tensor | None, moves: Movements
    ) -> list[Tensor]:
        """-> dW, and the gradient of the piece of the bias. Raises: CommunicationError.

        A sum that moves on does so behind the GEMM of the step it moves to.
        """
        sums: list[Tensor] = []
        steps, group = len(moves.gradient_x) + 1, self.group
        for t in range(steps):
            if t + 1 < steps:
                next_x = start_if_it_moves([x], moves.gradient_x[t], group, f"I, gradient step {t + 1}", dy)
                next_dy = start_if_it_moves([dy], moves.gradient_dy[t], group, f"dO, gradient step {t + 1}")
            travels = t > 0 and _moves(moves.gradient_dweight[t - 1])
            if travels:
                next_sums = start_if_it_moves(
                    sums, moves.gradient_dweight[t - 1], group, f"dW, gradient step {t}"
                )
            dbias = [] if columns is None else [dy.sum(0)[columns[t]]]
            if travels or not sums:
                added = [dy.T @ x, *dbias]
                if travels:
                    sums = next_sums.wait()
                sums = [new.add_(total) for new, total in zip(added, sums, strict=True)] if sums else added
            else:
                # One launch multiplies and adds.
                product = sums[0].addmm_(dy.T, x)
                sums = [product, *(total.add_(new) for total, new in zip(sums[1:], dbias, strict=True))]
            if t + 1 < steps:
                (x,), (dy,) = next_x.wait(), next_dy.wait()
        return start_if_it_moves(sums, moves.dweight_to_weight, group, "dW to the place of W").wait()


def _summed(tile: Tensor, group: str) -> PendingAllReduce | TilesHere:
    """An all-reduce in two halves; nothing where the tile is complete."""
    return start_all_reduce([tile], group) if group else TilesHere([tile])


def _moves(sources: Sequence[int]) -> bool:
    return any(source != place for place, source in enumerate(sources))


def start_if_it_moves(
    tiles: list[Tensor], sources: Sequence[int], group: str, what: str, after: Tensor | None = None
) -> PendingShift | TilesHere:
    """A shift in two halves; in a graph that is captured in one piece, which a plan takes apart.

    after: the gradient behind which it belongs, where it reads none: else it would go into the forward.
    """
    if not _moves(sources):
        return TilesHere(tiles)
    if torch.compiler.is_compiling():
        return TilesHere(shift(tiles, list(sources), group, what, after))
    return start_shift(tiles, sources, group, what)
