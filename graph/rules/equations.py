"""Equations such as `"t d, d f -> t f"`: the names of each operand's dimensions, and which may be cut.

Grammar, in addition to einsum's names, which are separated by spaces:

    ...      any number of leading dimensions, broadcast from the right; they get names of their own
    1        a dimension of size one, which cannot be cut
    name!    must not be cut, because the op mixes all of its elements (a softmax, a norm)
    name+    appears in inputs only; a cut gives partial results, whose sum is the whole result
    -        a scalar, or an operand that is always whole
    *        a result that is unused outside its part (a seed): the last part's replaces the whole one

A plain name that appears in inputs only is a contraction. Pipelines do not cut it, because adding its partial
sums costs too much; `contractions` lists it for tensor-parallel layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

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


def _names(operands: Sequence[tuple[str | None, ...]]) -> frozenset[str]:
    return frozenset(n for operand in operands for n in operand if n is not None)


@lru_cache(maxsize=4096)
def parse(text: str, ranks: tuple[int, ...]) -> Equation:
    """The equation for operands of these ranks (inputs, then outputs).

    Example: `parse("... d, f d -> ... f", (3, 2, 3))` names the inputs (.1 .0 d) and (f d).
    """
    sides = text.split("->")
    assert len(sides) == 2, f"{text}: not inputs -> outputs"
    inputs, outputs = ([o.strip() for o in side.split(",")] for side in sides)
    assert len(inputs) + len(outputs) == len(ranks), f"{text}: {len(ranks)} operands"
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
    names: list[str | None] = []
    for token in operand.split():
        bare = token.rstrip("!+")
        if token.endswith("!"):
            whole.add(bare)
        if token.endswith("+"):
            summed.add(bare)
        names.append(None if bare == "1" else bare)
    if "..." in names:
        at = names.index("...")
        free = rank - (len(names) - 1)
        names[at : at + 1] = [f".{n}" for n in reversed(range(free))]
    assert len(names) == rank, f"{text}: operand {operand} of rank {rank}"
    return tuple(names)
