"""O = I W on the ranks of a partition (PrimePar). P(2^k x 2^k) needs 2^k steps, no collective, no replica.

    q  ranks along a side, 2^k      m, n, k  rows, features in and features out of a tile (1 / q of the whole)
    p  elements of a bias piece (1 / q of k)

Per step a rank multiplies the tiles it has, while those of the next step travel: each phase starts its
shifts before the GEMM that hides them and waits for them behind it. Who sends what to whom is an argument
(`Movements`), and so is what has to be summed where a partition splits M, N or K (`Sums`):
`graph.tile_layouts` derives both.

Weight and bias keep their place. A piece of the bias belongs to the weight tile of the same slices and
travels with it; over the steps of the forward all pieces of a column pass every rank of it.

With what does a phase begin? Under `home_square` with the tiles that the forward began with: a rank keeps
those of input and weight, and steps of backward and gradient alternate, so that two GEMMs hide a shift. Under
`square`, that of the slides, with the tiles that the phase before ended with: a rank keeps these, and the
gradient comes behind the backward, which hands it dO.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lancet_kernels.ops.all_reduce import start_all_reduce
from lancet_kernels.ops.pending import Here, Started
from lancet_kernels.ops.shift import shift, start_shift

Sources = tuple[int, ...]
PendingTiles = Started[list[Tensor]]


class Movements(NamedTuple):
    """Where tiles come from, for each place of the group (`ops.shift`); of several, one between each step and
    the next. Hand-overs in which nothing travels cost nothing."""

    x_to_forward: Sources
    """Input, from its place to the first step."""
    forward_x: tuple[Sources, ...]
    forward_weight: tuple[Sources, ...]
    y_from_forward: Sources
    """Result, from the last step to its place."""
    weight_to_backward: Sources
    dy_to_backward: Sources
    backward_dy: tuple[Sources, ...]
    backward_weight: tuple[Sources, ...]
    dx_from_backward: Sources
    """Gradient of the input, from the last step to the input's place."""
    dy_to_gradient: Sources
    dy_directly: Sources
    """The same from the output's place, if the gradient of the input is not needed."""
    x_to_gradient: Sources
    gradient_x: tuple[Sources, ...]
    gradient_dy: tuple[Sources, ...]
    gradient_dweight: tuple[Sources, ...]
    dweight_to_weight: Sources
    begins_at_home: bool
    """Do backward and gradient begin with the tiles that the forward, and for dO the backward, began with?"""

    def every(self) -> Iterator[tuple[str, str, Sources]]:
        """Each shift of a forward and backward in which something travels: its field, the tensor of which
        tiles travel (x, weight, y, dy, dx, dweight), their sources."""
        for name, sources in self._asdict().items():
            if name in ("dy_directly", "begins_at_home"):
                continue
            steps = sources if sources and isinstance(sources[0], tuple) else (sources,)
            # Names are `tensor_to_phase`, `tensor_from_phase`, or `phase_tensor`.
            words = name.split("_")
            tensor = words[0] if len(words) == 3 else words[1]
            yield from ((name, tensor, step) for step in steps if _moves(step))


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

    def both_gradients(
        self,
        x: Tensor,
        dy: Tensor,
        weight: Tensor,
        columns: Tensor | None,
        moves: Movements,
        on_dx: Callable[[Tensor], None],
    ) -> list[Tensor]:
        """-> as `weight_gradient`; `on_dx` gets dI as soon as it is complete. Phases must begin at home."""


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
        (x,) = start_if_it_moves([x], movements.x_to_forward, phases.group, "I to the forward").wait()
        y, last_x, last_weight = phases.forward(x, weight, bias, order, movements)
        if not movements.begins_at_home:
            x, weight = last_x, last_weight
        ctx.save_for_backward(x, weight, columns, real_weight, real_piece)
        ctx.movements, ctx.phases, ctx.sums = movements, phases, sums
        (y,) = _summed(y, sums.y).wait()
        (y,) = start_if_it_moves([y], movements.y_from_forward, phases.group, "O to its place").wait()
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, columns, real_weight, real_piece = ctx.saved_tensors
        moves, phases, group = ctx.movements, ctx.phases, ctx.phases.group
        needs_dx, needs_dweight, *_ = ctx.needs_input_grad
        leaving: list[PendingTiles] = []

        def handed_over(tile: Tensor, sources: Sources, what: str) -> Tensor:
            return start_if_it_moves([tile], sources, group, what).wait()[0]

        def leave(dx: Tensor) -> None:
            # A gradient that is summed has no other place to go to.
            leaving.append(
                start_all_reduce([dx], ctx.sums.dx)
                if ctx.sums.dx
                else start_if_it_moves([dx], moves.dx_from_backward, group, "dI of the backward to its place")
            )

        dweight = dbias = None
        gradients: list[Tensor] = []
        if needs_dx:
            dy = handed_over(dy, moves.dy_to_backward, "dO to the backward")
        if needs_dx and needs_dweight and moves.begins_at_home:
            gradients = phases.both_gradients(x, dy, weight, columns, moves, leave)
        else:
            sources = moves.dy_directly
            if needs_dx:
                weight = handed_over(weight, moves.weight_to_backward, "W, forward to backward")
                dx, dy = phases.input_gradient(dy, weight, moves)
                leave(dx)
                sources = moves.dy_to_gradient
            if needs_dweight:
                dy = handed_over(dy, sources, "dO, backward to gradient")
                x = handed_over(x, moves.x_to_gradient, "I, forward to gradient")
                gradients = phases.weight_gradient(x, dy, columns, moves)
        if gradients:
            what = "dW to the place of W"
            dweight, *pieces = start_if_it_moves(gradients, moves.dweight_to_weight, group, what).wait()
            dbias = pieces[0] if pieces else None
            (dweight,) = _summed(dweight, ctx.sums.dweight).wait()
            if real_weight is not None:
                dweight = dweight * real_weight
                dbias = dbias * real_piece if pieces else None
        dx = leaving[0].wait()[0] if leaving else None
        return dx, dweight, dbias, *[None] * 7


class _Operands:
    """The operands of a phase: the tiles of a step, and the shifts that bring those of the next.

    Args: tiles: by name, what travels together. sources: of these, between each step and the next. after: a
        tensor before which no shift may begin in a captured graph.
    """

    def __init__(
        self,
        group: str,
        phase: str,
        tiles: dict[str, list[Tensor]],
        sources: dict[str, tuple[Sources, ...]],
        after: Tensor | None = None,
    ) -> None:
        self._group, self._phase, self._after = group, phase, after
        self._tiles, self._sources = tiles, sources
        self._coming: dict[str, PendingTiles] = {}

    def at(self, t: int) -> list[list[Tensor]]:
        """The tiles of step t, waited for; those of the next one start to travel. Steps come in order."""
        for name, shift_under_way in self._coming.items():
            self._tiles[name] = shift_under_way.wait()
        self._coming = {
            name: start_if_it_moves(
                self._tiles[name],
                sources[t],
                self._group,
                f"{name}, {self._phase} step {t + 1}",
                self._after if name in ("I", "W") else None,
            )
            for name, sources in self._sources.items()
            if t < len(sources)
        }
        tiles = list(self._tiles.values())
        if not self._coming:
            self._tiles = {}  # their memory is the caller's to free
        return tiles


class _InputGradient:
    """dI += dO W, step by step."""

    def __init__(self, dy: Tensor, weight: Tensor, moves: Movements, group: str) -> None:
        self.dx = dy.new_empty(0)
        self._operands = _Operands(
            group,
            "backward",
            {"dO": [dy], "W": [weight]},
            {"dO": moves.backward_dy, "W": moves.backward_weight},
            dy,
        )

    def step(self, t: int) -> Tensor:
        """-> dO of this step. Raises: CommunicationError."""
        (dy,), (weight,) = self._operands.at(t)
        self.dx = dy @ weight if t == 0 else self.dx.addmm_(dy, weight)
        return dy


class _WeightGradient:
    """dW += dO^T I, step by step, and the gradient of the piece of the bias if `columns` are given.

    A sum that moves on does so behind the GEMM of the step it moves to.
    """

    def __init__(self, x: Tensor, dy: Tensor, columns: Tensor | None, moves: Movements, group: str) -> None:
        self.sums: list[Tensor] = []
        self._columns, self._sum_sources, self._group = columns, moves.gradient_dweight, group
        self._operands = _Operands(
            group,
            "gradient",
            {"I": [x], "dO": [dy]},
            {"I": moves.gradient_x, "dO": moves.gradient_dy},
            dy,
        )

    def step(self, t: int) -> None:
        """Raises: CommunicationError."""
        (x,), (dy,) = self._operands.at(t)
        dbias = [] if self._columns is None else [dy.sum(0)[self._columns[t]]]
        travels = t > 0 and _moves(self._sum_sources[t - 1])
        if t == 0:
            self.sums = [dy.T @ x, *dbias]
        elif travels:
            what = f"dW, gradient step {t}"
            coming = start_if_it_moves(self.sums, self._sum_sources[t - 1], self._group, what)
            added = [dy.T @ x, *dbias]
            self.sums = [new.add_(total) for new, total in zip(added, coming.wait(), strict=True)]
        else:
            # One launch multiplies and adds.
            product = self.sums[0].addmm_(dy.T, x)
            self.sums = [product, *(total.add_(new) for total, new in zip(self.sums[1:], dbias, strict=True))]


@dataclass(frozen=True)
class ShiftedPhases:
    """Each phase step by step: a GEMM, and beside it the shifts of the tiles for the next step."""

    group: str

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor | None, moves: Movements
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> O; I and W of the last step. Raises: CommunicationError."""
        y, passed = x.new_empty(0), []
        operands = _Operands(
            self.group,
            "forward",
            {"I": [x], "W": [weight] if bias is None else [weight, bias]},
            {"I": moves.forward_x, "W": moves.forward_weight},
        )
        for t in range(len(moves.forward_x) + 1):
            (x,), (weight, *pieces) = operands.at(t)
            y = x @ weight.T if t == 0 else y.addmm_(x, weight.T)
            passed += pieces
        if bias is not None:
            y += torch.cat(passed)[order]
        return y, x, weight

    def input_gradient(self, dy: Tensor, weight: Tensor, moves: Movements) -> tuple[Tensor, Tensor]:
        """-> dI; dO of the last step. Raises: CommunicationError."""
        backward = _InputGradient(dy, weight, moves, self.group)
        for t in range(len(moves.backward_dy) + 1):
            dy = backward.step(t)
        return backward.dx, dy

    def weight_gradient(
        self, x: Tensor, dy: Tensor, columns: Tensor | None, moves: Movements
    ) -> list[Tensor]:
        """-> dW, and the gradient of the piece of the bias. Raises: CommunicationError."""
        gradient = _WeightGradient(x, dy, columns, moves, self.group)
        for t in range(len(moves.gradient_x) + 1):
            gradient.step(t)
        return gradient.sums

    def both_gradients(
        self,
        x: Tensor,
        dy: Tensor,
        weight: Tensor,
        columns: Tensor | None,
        moves: Movements,
        on_dx: Callable[[Tensor], None],
    ) -> list[Tensor]:
        """Their steps alternate: two GEMMs stand beside every shift. Raises: CommunicationError."""
        backward = _InputGradient(dy, weight, moves, self.group)
        gradient = _WeightGradient(x, dy, columns, moves, self.group)
        steps = len(moves.backward_dy) + 1
        for t in range(steps):
            backward.step(t)
            if t + 1 == steps:
                on_dx(backward.dx)
            gradient.step(t)
        return gradient.sums


def _summed(tile: Tensor, group: str) -> PendingTiles:
    """An all-reduce in two halves; nothing where the tile is complete."""
    return start_all_reduce([tile], group) if group else Here([tile])


def _moves(sources: Sequence[int]) -> bool:
    return any(source != place for place, source in enumerate(sources))


def start_if_it_moves(
    tiles: list[Tensor], sources: Sequence[int], group: str, what: str, after: Tensor | None = None
) -> PendingTiles:
    """A shift in two halves; in a graph that is captured in one piece, which a plan takes apart.

    after: the gradient behind which it belongs, where it reads none: else it would go into the forward.
    """
    if not _moves(sources):
        return Here(tiles)
    if torch.compiler.is_compiling():
        return Here(shift(tiles, list(sources), group, what, after))
    return start_shift(tiles, sources, group, what)
