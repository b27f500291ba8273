"""What goes into a pass through the fused experts and comes out of it; letters as in `kernels.overlap`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lancet_kernels.kernels.exchange import Use
from lancet_kernels.kernels.overlap_tiles import NN, NT, TN

DENSE_KINDS = {"nn": NN.value, "nt": NT.value, "tn": TN.value}


@dataclass(frozen=True)
class Routing:
    """Where the tokens of this PE go (a gate's decision and its inverse).

    Attributes:
        expert, slot: int64 [T, K]; slot >= C: dropped. weight: float32 [T, K].
        token, choice: int32 [E, C], which token sits in each slot, by which of its choices.
        count: int64 [E], how many slots are taken: the first ones. Beyond them token and choice mean nothing.
    """

    expert: Tensor
    slot: Tensor
    weight: Tensor
    token: Tensor
    choice: Tensor
    count: Tensor

    def weight_of_slot(self) -> Tensor:
        """float32 [E, C]: the weight of the choice that sits in each slot; anything where none does."""
        if self.weight.numel() == 0:
            return self.weight.new_zeros(self.token.shape)
        index = self.token.long() * self.weight.shape[1] + self.choice
        return self.weight.reshape(-1)[index.clamp_(0, self.weight.numel() - 1)]


@dataclass(frozen=True)
class Experts:
    """The experts of this PE: w1 [L, D, H], b1 [L, H] or None, w2 [L, F, D], b2 [L, D] or None."""

    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None
    activation: str

    @property
    def hidden(self) -> int:
        return self.w2.shape[1]


@dataclass(frozen=True)
class DenseGemm:
    """c = a @ b ("nn"), a @ b^T ("nt") or a^T @ b ("tn"); contiguous, of the launch's dtype."""

    kind: str
    a: Tensor
    b: Tensor
    c: Tensor

    def row(self) -> list[int]:
        """Its row in the kernel's table: kind, a, b, c, M, N, K."""
        contraction = self.a.shape[0] if self.kind == "tn" else self.a.shape[1]
        pointers = [t.data_ptr() for t in (self.a, self.b, self.c)]
        return [DENSE_KINDS[self.kind], *pointers, *self.c.shape, contraction]


@dataclass
class SavedPass:
    """What the backward needs of a forward pass: its use of the exchange, the value before the activation
    [W, L, C, H] and after it [W, L, C, F]. The rows are still in the exchange."""

    use: Use
    pre: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class ExpertGradients:
    """dx [T, D], of this PE's tokens; dweight float32 [T, K]; the others like the experts' parameters."""

    dx: Tensor
    dweight: Tensor
    dw1: Tensor
    db1: Tensor | None
    dw2: Tensor
    db2: Tensor | None
