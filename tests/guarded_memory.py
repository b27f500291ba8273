"""Outputs that show what a kernel forgot to write and where it wrote too far."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

GUARD = 64  # elements on each side, a multiple of every alignment that a kernel may assume
INTEGER_POISON = -(2**30) - 7


def poison(tensor: Tensor) -> Tensor:
    """Fill with NaN, or in integers with nonsense."""
    return tensor.fill_(torch.nan if tensor.is_floating_point() else INTEGER_POISON)


def _is_poison(tensor: Tensor) -> Tensor:
    return tensor.isnan() if tensor.is_floating_point() else tensor == INTEGER_POISON


@contextmanager
def guarded_memory() -> Iterator[None]:
    """Inside, `torch.empty` and `torch.empty_like` give poisoned tensors between poisoned guard bands.

    Raises: AssertionError on leaving, if anything was written into a guard band.
    """
    bands: list[Tensor] = []

    def empty(*size, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Tensor:
        shape = torch.Size(size[0] if size and not isinstance(size[0], int) else size)
        wide = poison(torch.full((shape.numel() + 2 * GUARD,), 0, dtype=dtype, device=device))
        bands.extend((wide[:GUARD], wide[-GUARD:]))
        return wide[GUARD : GUARD + shape.numel()].view(shape)

    def empty_like(tensor: Tensor) -> Tensor:
        return empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        patch.setattr(torch, "empty_like", empty_like)
        yield
    for band in bands:
        assert _is_poison(band).all(), "a kernel wrote beyond its output"
