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

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lancet_kernels.ops.comm.collectives import all_reduce, start_sum
from lancet_kernels.ops.comm.link_group import Pending
from lancet_kernels.ops.comm.redistribute import shift, start_shift

Sources = tuple[int, ...]


class Movements(NamedTuple):
    """Where tiles of each operand of each phase come from between each step and the next, for each place of
    the group (`ops.comm.redistribute`)."""

    forward_x: tuple[Sources, ...]
    forward_weight: tuple[Sources, ...]
    backward_dy: tuple[Sources, ...]
    backward_weight: tuple[Sources, ...]
    gradient_x: tuple[Sources, ...]
    gradient_dy: tuple[Sources, ...]


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
        operands = {"I": (x, movements.forward_x), "W": (weight, movements.forward_weight)}
        *_, product = _sums("forward", operands, lambda x, weight: (x, weight.T), group)
        y = _start_sum(product, sums.y).wait()
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x, weight), moves, sums = ctx.saved_tensors, ctx.movements, ctx.sums
        needs_dx, needs_dweight, needs_dbias, *_ = ctx.needs_input_grad
        dx = dweight = dbias = None
        if needs_dbias:
            dbias = _start_sum(dy.sum(0), sums.dbias)
        dx_sums = _sums(
            "backward",
            {"dO": (dy, moves.backward_dy), "W": (weight, moves.backward_weight)},
            lambda dy, weight: (dy, weight),
            ctx.group,
            dy,
        )
        dweight_sums = _sums(
            "gradient",
            {"I": (x, moves.gradient_x), "dO": (dy, moves.gradient_dy)},
            lambda x, dy: (dy.T, x),
            ctx.group,
            dy,
        )
        steps = len(moves.backward_dy) + 1
        for t in range(steps):
            is_last = t + 1 == steps
            if needs_dx:
                product = next(dx_sums)
                dx = _start_sum(product, sums.dx) if is_last else None
            if needs_dweight:
                product = next(dweight_sums)
                dweight = _start_sum(product, sums.dweight) if is_last else None
        gradients = [None if started is None else started.wait() for started in (dx, dweight, dbias)]
        return *gradients, None, None, None


def _sums(
    name: str,
    operands: Mapping[str, tuple[Tensor, tuple[Sources, ...]]],
    factors: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    group: str,
    after: Tensor | None = None,
) -> Iterator[Tensor]:
    """The sum of products behind each step of a phase; while one is multiplied, the tiles of the next travel.

    Args: operands: by name, the tile of the first step, and its sources between each step and the next.
        factors: matrices to multiply, from the tiles. after: a tensor before which no shift may begin in a
        captured graph.
    Raises: CommunicationError.
    """
    started = {what: Pending.here([tile]) for what, (tile, _) in operands.items()}
    sources = [steps for _, steps in operands.values()]
    total: Tensor | None = None
    for t in range(len(sources[0]) + 1):
        tiles = {what: of.wait()[0] for what, of in started.items()}
        # Behind the last step nothing keeps the tiles.
        started = {}
        if t < len(sources[0]):
            for steps, (what, tile) in zip(sources, tiles.items(), strict=True):
                # A gradient is in the backward by itself.
                behind = None if what == "dO" else after
                started[what] = _travelling(tile, steps[t], group, f"{what}, {name} step {t + 1}", behind)
        a, b = factors(*tiles.values())
        total = a @ b if total is None else total.addmm_(a, b)
        del tiles, a, b
        yield total


def _travelling(
    tile: Tensor, sources: Sources, group: str, name: str, after: Tensor | None
) -> Pending[list[Tensor]]:
    """A shift in two halves; in a captured graph one op, which a plan splits."""
    if tuple(sources) == tuple(range(len(sources))):
        return Pending.here([tile])
    if torch.compiler.is_compiling():
        return Pending.here(shift([tile], list(sources), group, name, after))
    return start_shift([tile], sources, group, name)


def _start_sum(summand: Tensor, group: str) -> Pending[Tensor]:
    """An all-reduce in two halves, like a shift; none where the tensor is complete."""
    if not group:
        return Pending.here(summand)
    if torch.compiler.is_compiling():
        return Pending.here(all_reduce(summand, group))
    total = summand.clone(memory_format=torch.contiguous_format)
    return start_sum(total, group, lambda: total)
