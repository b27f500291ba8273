"""Buffers with guard bands around them, poisoned with NaN: who reads or writes too far is found out."""

import torch
from torch import Tensor

GUARD = 64  # elements: a multiple of 16 bytes, so that the buffer keeps the alignment of the allocation


class Guarded:
    """A contiguous tensor in the middle of a NaN band.

    Attributes:
        tensor: the view to hand to a kernel.
    """

    def __init__(self, content: Tensor, misalign: int = 0):
        count = content.numel()
        self._whole = content.new_full((count + 2 * GUARD,), float("nan"))
        self._start, self._count = GUARD + misalign, count
        self.tensor = self._whole[self._start : self._start + count].view(content.shape)
        self.tensor.copy_(content)
        self._before = self._whole.clone()

    @staticmethod
    def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> "Guarded":
        """An output: NaN everywhere."""
        return Guarded(torch.full(shape, float("nan"), dtype=dtype, device=device))

    def assert_guards_unchanged(self) -> None:
        whole = self._whole
        assert whole[: self._start].isnan().all(), "written before the buffer"
        assert whole[self._start + self._count :].isnan().all(), "written behind the buffer"

    def assert_unchanged(self) -> None:
        same = (self._whole == self._before) | (self._whole.isnan() & self._before.isnan())
        assert same.all(), "an input was written to"
