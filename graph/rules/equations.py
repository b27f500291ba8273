"""Equations such as `"t d, d f -> t f"`: the names of each operand's dimensions, and which may be cut.

Grammar, in addition to einsum's names, which are separated by spaces:

    ...      any number of leading dimensions, broadcast from the right; they get names of their own
    1        a dimension of size one, which cannot be cut
    name!    must not be cut, because the op mixes all of its elements (a softmax, a norm)
    name+    appears in inputs only; a cut gives partial results, whose sum is the whole result
    (a b)    one dimension that is the product of a and b, a the slowest: a cut of `a` gives contiguous pieces
    -        a scalar, or an operand that is always whole
    *        a result that is unused outside its part (a seed): the last part's replaces the whole one

A plain name that appears in inputs only is a contraction. Pipelines do not cut it, because adding its partial
sums costs too much; `contractions` lists it for tensor-parallel layouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lancet_kernels.errors import UserError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Equation:
    """A parsed equation: for each operand the names of its dimensions; None for one that cannot be cut."""

    inputs: tuple[tuple[str | None, ...], ...]
    outputs: tuple[tuple[str | None, ...], ...]
    whole: frozenset[str]
    """Names marked `!`."""
    summed: frozenset[str]
    """Names marked `+`."""
    any_part: tuple[int, ...] = ()
    """Positions of the outputs marked `*`."""

    @property
    def contractions(self) -> frozenset[str]:
        """Names that appear in inputs only: a cut gives partial sums."""
        return _names(self.inputs) - _names(self.outputs) - self.whole

    @property
    def cuttable(self) -> list[str]:
        """Names along which a pipeline may cut the op: those in every output that has names, and those marked
        `+`; without those marked `!`."""
        named = [o for o in self.outputs if any(n is not None for n in o)]
        everywhere = [n for n in sorted(_names(named)) if all(n in o for o in named)]
        cut_names = [n for n in everywhere if n not in self.whole and n in _names(self.inputs)]
        return cut_names + sorted(self.summed - self.whole)

    def axis(self, operand: tuple[str | None, ...], name: str) -> int | None:
        """The dimension of an operand that has this name, or None."""
        return operand.index(name) if name in operand else None


def _names(operands: Sequence[tuple[str | None, ...]]) -> frozenset[str]:
    return frozenset(n for operand in operands for n in operand if n is not None)


@lru_cache(maxsize=4096)
def parse(text: str, ranks: tuple[int, ...]) -> Equation:
    """The equation for operands of these ranks (inputs, then outputs).

    Example: `parse("... d, f d -> ... f", (3, 2, 3))` names the inputs (.1 .0 d) and (f d).

    Raises:
        UserError: operands or ranks do not match the text.
    """
    sides = text.split("->")
    if len(sides) != 2:
        raise UserError("equation", got=text, expected="one ->", do="write it as inputs -> outputs")
    inputs, outputs = ([o.strip() for o in side.split(",")] for side in sides)
    if len(inputs) + len(outputs) != len(ranks):
        raise UserError(
            f"operands of {text}",
            got=len(ranks),
            expected=len(inputs) + len(outputs),
            do="give a rank for each operand",
        )
    whole: set[str] = set()
    summed: set[str] = set()
    operands = [
        _operand(text, o, rank, whole, summed) for o, rank in zip([*inputs, *outputs], ranks, strict=True)
    ]
    split = len(inputs)
    any_part = tuple(n for n, o in enumerate(outputs) if o == "*")
    return Equation(
        tuple(operands[:split]), tuple(operands[split:]), frozenset(whole), frozenset(summed), any_part
    )


def _operand(text: str, operand: str, rank: int, whole: set[str], summed: set[str]) -> tuple[str | None, ...]:
    if operand in ("-", "*"):
        return (None,) * rank
    tokens = operand.replace("(", " ( ").replace(")", " ) ").split()
    names: list[str | None] = []
    group: list[str | None] | None = None
    for token in tokens:
        if token == "(":
            group = []
        elif token == ")":
            names.append(group[0] if group else None)
            # Only the slowest name of a group can be cut into contiguous pieces.
            whole.update(name for name in (group or [])[1:] if name is not None)
            group = None
        else:
            bare = token.rstrip("!+")
            if token.endswith("!"):
                whole.add(bare)
            if token.endswith("+"):
                summed.add(bare)
            (names if group is None else group).append(None if bare == "1" else bare)
    if "..." in names:
        at = names.index("...")
        free = rank - (len(names) - 1)
        names[at : at + 1] = [f".{n}" for n in reversed(range(free))]
    if len(names) != rank:
        raise UserError(f"operand {operand} of {text}", got=f"rank {rank}", expected=len(names), do="fix it")
    return tuple(names)


def elementwise(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> str:
    """The equation of an elementwise op, broadcast from the right; a broadcast dimension of size one stays
    whole.

    Example: `elementwise([(4, 8), (8,)], [(4, 8)])` is `"b a, a -> b a"`.
    """
    result = outputs[0]

    def operand(shape: Shape) -> str:
        sizes = zip(reversed(shape), reversed(result), strict=False)
        names = [_letter(n) if size == full and size != 1 else "1" for n, (size, full) in enumerate(sizes)]
        return " ".join(reversed(names)) or "-"

    return _join([operand(s) for s in inputs], [operand(s) for s in outputs])


def view(source: Shape, target: Shape) -> str:
    """The equation of a view. Dimensions that it keeps, splits or joins are matched from the left by their
    products. Example: `view((4, 8, 6), (32, 6))` is `"x0 x2! x4 -> x0 x4"`: the 32 is cut where the 4 is.
    """
    left: list[str] = []
    right: list[str] = []
    i = j = used = 0
    while i < len(source) or j < len(target):
        a = [source[i]] if i < len(source) else []
        b = [target[j]] if j < len(target) else []
        i, j = i + len(a), j + len(b)
        while math.prod(a) != math.prod(b):
            if math.prod(a) < math.prod(b) and i < len(source):
                a.append(source[i])
                i += 1
            elif j < len(target):
                b.append(target[j])
                j += 1
            else:
                return _join(["-"], ["-"])
        first = _letter(used)
        used += 1
        left += _group(a, first, used)
        right += _group(b, first, used + len(a))
        used += len(a) + len(b)
    return _join([" ".join(left) or "-"], [" ".join(right) or "-"])


def _group(sizes: list[int], first: str, used: int) -> list[str]:
    """Names of the dimensions of one side of a matched block. Only the slowest one of size > 1 is shared."""
    names: list[str] = []
    shared = False
    for n, size in enumerate(sizes):
        if size == 1:
            names.append("1")
        elif shared:
            names.append(_letter(used + n) + "!")
        else:
            names.append(first)
            shared = True
    return names


def permute(rank: int, order: Sequence[int]) -> str:
    """The equation of a permute: dimension n of the result is dimension `order[n]` of the source."""
    names = [_letter(n) for n in range(rank)]
    return _join([" ".join(names) or "-"], [" ".join(names[d] for d in order) or "-"])


def along(inputs: Sequence[Shape], outputs: Sequence[Shape], dim: int) -> str:
    """The equation of an op along one dimension (cat, split, slice, softmax, sum): every other one may be
    cut.

    Outputs may lack the dimension (`keepdim=False`), or have another size there.
    """
    rank = max(len(s) for s in inputs)
    dim %= max(rank, 1)
    names = [_letter(n) + ("!" if n == dim else "") for n in range(rank)]

    def operand(shape: Shape) -> str:
        if len(shape) == rank:
            return " ".join(names) or "-"
        return " ".join(names[:dim] + names[dim + 1 :]) or "-" if len(shape) == rank - 1 else "-"

    return _join([operand(s) for s in inputs], [operand(s) for s in outputs])


def _letter(n: int) -> str:
    return f"x{n}"


def _join(inputs: list[str], outputs: list[str]) -> str:
    return f"{', '.join(inputs)} -> {', '.join(outputs)}"
