"""In which form does a part, or a rank, hold a tensor? One value for every rule, plan and file.

whole        all of it (HiDup: Full)
cut n        a slice along dimension n (HiDup: Gather(n))
sliced n     made whole; parts read slices along dimension n
partial      a summand of full size; the whole is their sum (HiDup: Reduce)
irregular    some of the rows, how many is known when running (Lancet: A_irr)
window       of the rows for each expert a window of the slots, alike on every rank (Tutel)
carried      handed on from part to part; the whole is what the last one hands out (Lancet, section 2.3)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from lancet_kernels.errors import UserError


@dataclass(frozen=True)
class Form:
    """`dimension` is that of the slice, of the kinds "cut" and "sliced"; other kinds have none."""

    kind: str
    dimension: int | None = None

    @property
    def is_cut(self) -> bool:
        """A slice along a dimension."""
        return self.dimension is not None

    @property
    def is_made_in_parts(self) -> bool:
        """Does the op that makes such a tensor run part by part?"""
        return self.kind not in ("whole", "sliced")

    @property
    def of_reader(self) -> Form:
        """In which form a part reads a tensor of this form."""
        return cut(self.dimension) if self.kind == "sliced" and self.dimension is not None else self

    def __str__(self) -> str:
        """As in JSON. Example: `cut 0`."""
        return self.kind if self.dimension is None else f"{self.kind} {self.dimension}"

    @classmethod
    def parse(cls, text: str) -> Form:
        """The form that `str` wrote. Raises: UserError."""
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
"""Of tensors by name; one that is not named is whole."""


@cache
def cut(dimension: int) -> Form:
    """A slice along a dimension."""
    return Form("cut", dimension)


def sliced(dimension: int) -> Form:
    """Made whole; parts read slices along a dimension."""
    return Form("sliced", dimension)


def any_made_in_parts(forms: Forms, tensors: Iterable[str]) -> bool:
    """Is any of these tensors made part by part?"""
    return any(forms.get(t, WHOLE).is_made_in_parts for t in tensors)
