"""The form in which a part, or a rank, holds a tensor. Rules, plans and files all use it.

whole        the whole tensor (HiDup: Full)
cut n        a slice along dimension n (HiDup: Gather(n))
sliced n     computed whole; parts read slices along dimension n
partial      a summand of full size; the whole tensor is the sum (HiDup: Reduce)
irregular    some of the rows; their number is only known at run time (Lancet: A_irr)
window       the rows in a window of each expert's slots, the same window on every rank (Tutel)
carried      passed from part to part; the last part's is the whole batch's (Lancet, section 2.3)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from lancet_kernels.errors import UserError


@dataclass(frozen=True)
class Form:
    """`dimension` is the dimension of the slice, for the kinds "cut" and "sliced"; None for the others."""

    kind: str
    dimension: int | None = None

    @property
    def is_cut(self) -> bool:
        """Do parts have a slice along a dimension?"""
        return self.dimension is not None

    @property
    def is_made_in_parts(self) -> bool:
        """Does the op that computes such a tensor run part by part?"""
        return self.kind not in ("whole", "sliced")

    @property
    def of_reader(self) -> Form:
        """The form in which a part reads a tensor of this form."""
        return cut_along(self.dimension) if self.kind == "sliced" and self.dimension is not None else self

    def __str__(self) -> str:
        """The text in JSON. Example: `cut 0`."""
        return self.kind if self.dimension is None else f"{self.kind} {self.dimension}"

    @classmethod
    def parse(cls, text: str) -> Form:
        """The form from the text of `str`. Raises: UserError."""
        kind, _, dimension = str(text).partition(" ")
        if kind in ("cut", "sliced") and dimension.isdigit():
            return Form(kind, int(dimension))
        if text in _PLAIN:
            return _PLAIN[text]
        raise UserError(
            "form of a tensor",
            got=repr(text),
            expected=f"cut N, sliced N, {', '.join(_PLAIN)}",
            do="plan again",
        )


WHOLE = Form("whole")
PARTIAL = Form("partial")
IRREGULAR = Form("irregular")
WINDOW = Form("window")
CARRIED = Form("carried")
_PLAIN = {form.kind: form for form in (WHOLE, PARTIAL, IRREGULAR, WINDOW, CARRIED)}

Forms = Mapping[str, Form]
"""Forms by tensor name; a tensor without an entry is whole."""


@cache
def cut_along(dimension: int) -> Form:
    """The form "cut": a slice along a dimension."""
    return Form("cut", dimension)


def sliced(dimension: int) -> Form:
    """The form "sliced": computed whole; parts read slices along a dimension."""
    return Form("sliced", dimension)


def any_made_in_parts(forms: Forms, tensors: Iterable[str]) -> bool:
    """Is any of these tensors computed part by part?"""
    return any(forms.get(t, WHOLE).is_made_in_parts for t in tensors)
