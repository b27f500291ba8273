"""The phases of `ops.square_linear` as one persistent Triton launch each (`kernels.square_kernel`).

Tiles of weight and activations travel by puts inside the launch, beside the GEMM tiles of the step before.
What is small goes as always, point to point between launches: pieces of the bias, and column sums of dO for
its gradient. So does the input, before the forward's first step.

Regions are made by the first pass with a number of rows, for all three phases, and stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lancet_kernels.errors import UserError
from lancet_kernels.kernels.square_launch import SquareConfig, SquarePhase
from lancet_kernels.ops.fused_experts import ALONE_TIMEOUT_S, DTYPES, FusedMemory
from lancet_kernels.ops.groups import group_of, group_timeout_s
from lancet_kernels.ops.square_linear import Movements, start_if_it_moves
from lancet_kernels.ops.waiting import waiting


class FusedPhases:
    """The launches of one layer.

    Args: group: name of the 4^k ranks. config: how launches are cut; None: a default for the device.
        timeout_s: how long a wait for a rank may last; None: as for the group's collectives.
    """

    def __init__(
        self, group: str, config: SquareConfig | None = None, timeout_s: float | None = None
    ) -> None:
        self.group, self.config, self.timeout_s = group, config, timeout_s
        self._of_rows: dict[tuple[int, torch.dtype], tuple[SquarePhase, ...]] = {}
        self._name = ""

    def __reduce__(self):
        # Copies of a layer make regions of their own.
        return type(self), (self.group, self.config, self.timeout_s)

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor | None, moves: Movements
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> tile of O; tiles of I and W of the last step. Raises: UserError, CommunicationError."""
        phase, _, _ = self._phases(x, weight, moves)
        with waiting("forward of SquareLinear", group_of(self.group)):
            y, x, last = phase.run(x, weight)
        if bias is not None:
            pieces = [bias]
            for step, sources in enumerate(moves.forward_weight):
                what = f"bias, forward step {step + 1}"
                pieces += start_if_it_moves([pieces[-1]], sources, self.group, what).wait()
            y = y + torch.cat(pieces)[order]
        return y, x, last

    def input_gradient(self, dy: Tensor, weight: Tensor, moves: Movements) -> tuple[Tensor, Tensor]:
        """-> tile of dI; tile of dO of the last step."""
        _, phase, _ = self._of_rows[len(dy), dy.dtype]
        with waiting("backward of SquareLinear", group_of(self.group)):
            dx, dy, _ = phase.run(dy, weight)
        return dx, dy

    def weight_gradient(
        self, x: Tensor, dy: Tensor, columns: Tensor | None, moves: Movements
    ) -> list[Tensor]:
        """-> tile of dW, and the piece of the bias' gradient if `columns` says what belongs to it."""
        _, _, phase = self._of_rows[len(x), x.dtype]
        with waiting("weight gradient of SquareLinear", group_of(self.group)):
            dweight, _, _ = phase.run(dy, x)
        if columns is None:
            return [dweight]
        sums, piece = dy.sum(0), dy.new_zeros(columns.shape[1])
        for t, own in enumerate(columns):
            if t:
                what = f"sums of dO, gradient step {t}"
                (sums,) = start_if_it_moves([sums], moves.gradient_dy[t - 1], self.group, what).wait()
                what = f"dB, gradient step {t}"
                (piece,) = start_if_it_moves([piece], moves.gradient_dweight[t - 1], self.group, what).wait()
            piece = piece + sums[own]
        return [dweight, piece]

    def both_gradients(
        self,
        x: Tensor,
        dy: Tensor,
        weight: Tensor,
        columns: Tensor | None,
        moves: Movements,
        on_dx: Callable[[Tensor], None],
    ) -> list[Tensor]:
        """One launch behind the other."""
        on_dx(self.input_gradient(dy, weight, moves)[0])
        return self.weight_gradient(x, dy, columns, moves)

    def _phases(self, tile: Tensor, weight: Tensor, moves: Movements) -> tuple[SquarePhase, ...]:
        key = len(tile), tile.dtype
        if key not in self._of_rows:
            if tile.dtype not in DTYPES:
                raise UserError(
                    'SquareLinear(backend="fused")',
                    got=str(tile.dtype),
                    expected="float32, float16 or bfloat16",
                    do='use backend="torch"',
                )
            self._of_rows[key] = self._new_phases(len(tile), weight, moves)
        return self._of_rows[key]

    def _new_phases(self, m: int, weight: Tensor, moves: Movements) -> tuple[SquarePhase, ...]:
        """Forward, backward, gradient for m rows. Collective."""
        k, n = weight.shape
        timeout_s = self.timeout_s or (
            group_timeout_s(group_of(self.group)) if self.group else ALONE_TIMEOUT_S
        )
        shared = FusedMemory.of(self.group, weight.device, timeout_s)
        if not self._name:
            self._name = f"square{shared.layers}"
            shared.layers += 1
        operands: dict[str, tuple[Any, ...]] = {
            "forward": ("nt", (m, n), (k, n), moves.forward_x, moves.forward_weight, ()),
            "backward": ("nn", (m, k), (k, n), moves.backward_dy, moves.backward_weight, ()),
            "gradient": (
                "tn", (m, k), (m, n), moves.gradient_dy, moves.gradient_x, moves.gradient_dweight,
            ),
        }  # fmt: skip
        return tuple(
            SquarePhase(
                shared.memory,
                f"{self._name} {which} of {m} rows {weight.dtype}",
                kind, a_shape, b_shape, weight.dtype, *sources, config=self.config, timeout_s=timeout_s,
            )
            for which, (kind, a_shape, b_shape, *sources) in operands.items()
        )  # fmt: skip
