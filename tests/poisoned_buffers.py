"""Outputs that show what a kernel forgot to write and where it wrote too far."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

GUARD = 64  # elements on each side, a multiple of every alignment that a kernel may assume
GUARD_VALUE = 1024


@contextmanager
def poisoned_buffers() -> Iterator[None]:
    """Inside, what torch leaves uninitialised is NaN (in integers nonsense), between guard bands.

    Raises: AssertionError on leaving, if anything was written into a guard band.
    """
    bands: list[Tensor] = []

    def new(size: Sequence, dtype: torch.dtype | None, device: torch.device | str | None) -> Tensor:
        shape = torch.Size(size[0] if size and not isinstance(size[0], int) else size)
        buffer = torch.full((shape.numel() + 2 * GUARD,), GUARD_VALUE, dtype=dtype, device=device)
        inside = buffer[GUARD:-GUARD]
        bands.extend((buffer[:GUARD], buffer[-GUARD:]))
        floating = buffer.is_floating_point()
        return inside.fill_(torch.nan if floating else torch.iinfo(buffer.dtype).max // 3).view(shape)

    def empty(*size, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Tensor:
        return new(size, dtype or torch.get_default_dtype(), device)

    def new_empty(self: Tensor, *size, **other) -> Tensor:
        if other:
            return torch._C.TensorBase.new_empty(self, *size, **other)
        return new(size, self.dtype, self.device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        patch.setattr(torch, "empty_like", lambda like: new(like.shape, like.dtype, like.device))
        patch.setattr(torch.Tensor, "new_empty", new_empty)
        yield
    assert all((band == GUARD_VALUE).all() for band in bands), "written beside an output"
