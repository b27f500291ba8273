"""What does `"t d, d f -> t f"` say? Dimension names per operand, and what a cut of each name means.

Grammar, beside einsum's names separated by spaces:

    ...      any number of leading dimensions, broadcast from the right; they get names of their own
    1        a dimension of size one: there is nothing to cut
    name!    must not be cut (the op mixes all of its elements: a softmax, a norm)
    name+    appears in inputs only; cutting it gives partial results that add up to the whole one
    (a b)    one dimension that holds a and b, a slowest: a cut of `a` cuts it in contiguous pieces
    -        a scalar, or an operand without dimensions that matter: always whole
    *        a result that means nothing beyond its part (a seed that nobody uses): the last part's will do

A plain name that appears in inputs only is a contraction whose partial sums are not worth having in a
pipeline; `contractions` still lists it, because tensor-parallel layouts follow from it.
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
    """Parsed: for each operand the name of each dimension, None where nothing can be cut there."""

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
        """Names in inputs that no output has: a cut gives partial sums."""
        return _names(self.inputs) - _names(self.outputs) - self.whole

    @property
    def cuttable(self) -> list[str]:
        """Names a part of the op can be taken along: not `!`, and in every output with names (or marked
        `+`)."""
        named = [o for o in self.outputs if any(n is not None for n in o)]
        everywhere = [n for n in sorted(_names(named)) if all(n in o for o in named)]
        found = [n for n in everywhere if n not in self.whole and n in _names(self.inputs)]
        return found + sorted(self.summed - self.whole)

    def axis(self, operand: tuple[str | None, ...], name: str) -> int | None:
        """The dimension of an operand that has this name."""
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
    """Broadcast from the right; a dimension of size one that is stretched stays whole.

    Example: `elementwise([(4, 8), (8,)], [(4, 8)])` is `"b a, a -> b a"`.
    """
    result = outputs[0]

    def operand(shape: Shape) -> str:
        sizes = zip(reversed(shape), reversed(result), strict=False)
        names = [_letter(n) if size == full and size != 1 else "1" for n, (size, full) in enumerate(sizes)]
        return " ".join(reversed(names)) or "-"

    return _join([operand(s) for s in inputs], [operand(s) for s in outputs])


def view(source: Shape, target: Shape) -> str:
    """Dimensions that a view keeps, splits or joins, matched from the left by their products.

    Example: `view((4, 8, 6), (32, 6))` is `"(a b) c -> ..."` turned around: `"a b c -> (a b) c"`.
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
    """The dimensions of one side of a matched block. Only the slowest one of size > 1 shares a name."""
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
    """Dimension n of the result is dimension `order[n]` of the source."""
    names = [_letter(n) for n in range(rank)]
    return _join([" ".join(names) or "-"], [" ".join(names[d] for d in order) or "-"])


def along(inputs: Sequence[Shape], outputs: Sequence[Shape], dim: int) -> str:
    """An op that works along one dimension (cat, split, slice, softmax, sum): every other one may be cut.

    Outputs may lack the dimension (`keepdim=False`) or have another size there.
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
