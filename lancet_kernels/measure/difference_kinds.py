"""Classifies how a rank's numbers differ from those of a step on one rank.

missing sum          the gradient has the tokens of some ranks only
factor               right but for a factor
stale                the value of the previous step, alone or added
routed otherwise     tokens chose other experts
swapped experts      experts have each other's values, or only tokens of certain experts are wrong
other values         none of these
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

_TOLERANCES = {torch.float64: 1e-8, torch.float32: 2e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Relative to a tensor's norm: the order of summation changes rounding."""
OTHER = "other values"
KEPT = "right in the first step, and not with other weights: something is kept from it"
_MOST_ELEMENTS = 1 << 20
"""Elements of a gradient that enter the least squares fit of `_shares`."""


@dataclass
class Call:
    """A submodule in a forward. values: its floating-point outputs. choices: the integers among its inputs
    and outputs, and those of its gate."""

    name: str
    values: list[Tensor] = field(default_factory=list)
    choices: list[Tensor] = field(default_factory=list)


class Kind(NamedTuple):
    """kind: a row of the table above. what: details for the user."""

    kind: str
    what: str


def is_close(own: Tensor, expected: Tensor, largest: float = 0.0) -> bool:
    """Whether rounding explains the difference.

    Args: largest: norm of the largest gradient; its rounding may show in a gradient that should be 0.
    """
    tolerance = _TOLERANCES.get(expected.dtype, 2e-3)
    rounding = 64 * torch.finfo(expected.dtype).eps * largest
    own, expected = own.double(), expected.double()
    return bool((own - expected).norm() <= tolerance * expected.norm() + rounding)


def kind_of_gradient(
    own: Tensor, expected: Tensor, slices: Sequence[Tensor], before: Sequence[Tensor], whole: Tensor
) -> Kind:
    """Classify a gradient that is wrong.

    Args: slices: the gradients of the ranks' slices of the batch on one rank, whose mean is right. before:
        those of the previous step. whole: the gradient of which this rank should have a part.
    """
    if not own.isfinite().all():
        return Kind(OTHER, "not finite")
    if not own.any():
        return Kind("missing sum", "there is none")
    shares = _shares(own, slices)
    if shares is not None:
        return _kind_of_sum(shares)
    shares = _shares(own, [*slices, *before]) if before else None
    present = [rank for rank, share in (shares or {}).items() if abs(share) >= 0.05]
    if old := [rank - len(slices) for rank in present if rank >= len(slices)]:
        now = any(rank < len(slices) for rank in present)
        source = f"of rank(s) {', '.join(map(str, old))} in the step before"
        return Kind("stale", f"that {source} {'is still in it' if now else 'in its place'}")
    if swapped := _swapped(own, expected, whole):
        return Kind("swapped experts", swapped)
    return Kind(OTHER, f"{_distance(own, expected):.2g} of its norm")


def _kind_of_sum(shares: dict[int, float]) -> Kind:
    """Classify a sum of the ranks' gradients by the coefficient of each."""
    values, lacking = [*shares.values()], [rank for rank, share in shares.items() if abs(share) < 0.05]
    rest = [share for share in values if abs(share) >= 0.05]
    is_one_factor = max(rest) - min(rest) < 0.05 * abs(max(rest))
    if lacking:
        times = f", and {rest[0]:.4g} times the rest" if is_one_factor and abs(rest[0] - 1) > 0.05 else ""
        return Kind("missing sum", f"without the part of rank(s) {', '.join(map(str, lacking))}{times}")
    if is_one_factor:
        return Kind("factor", f"{sum(values) / len(values):.4g} times what it should be")
    times = ", ".join(f"{share:.3g}" for share in values)
    return Kind("factor", f"the parts of ranks {', '.join(map(str, shares))} times {times}")


def _shares(own: Tensor, slices: Sequence[Tensor]) -> dict[int, float] | None:
    """The coefficients of the ranks' gradients in `own`, each 1 if right; None: no linear combination."""
    with_part = [rank for rank, part in enumerate(slices) if part.any()]
    if not with_part:
        return None
    step = max(1, own.numel() // _MOST_ELEMENTS)
    columns = torch.stack([slices[rank].flatten()[::step].double() for rank in with_part], 1)
    value = own.flatten()[::step].double()
    share = torch.linalg.lstsq(columns, value[:, None], driver="gelsd").solution
    if not is_close((columns @ share)[:, 0].to(own.dtype), value.to(own.dtype)):
        return None
    return {rank: float(share[i]) * len(slices) for i, rank in enumerate(with_part)}


def _swapped(own: Tensor, expected: Tensor, whole: Tensor) -> str:
    """Matrices of a stack with the values of others: `expert 2 has that of expert 5`; else ""."""
    if own.dim() < 3 or own.shape[1:] != whole.shape[1:]:
        return ""
    rows = {}
    for row in (i for i in range(len(own)) if not is_close(own[i], expected[i])):
        same = [
            other for other in range(len(whole)) if whole[other].any() and is_close(own[row], whole[other])
        ]
        home = [i for i in range(len(whole)) if torch.equal(whole[i], expected[row])]
        if not same:
            return ""
        rows[home[0] if home else row] = same[0]
    return ", ".join(f"expert {row} has that of expert {other}" for row, other in rows.items())


def kind_of_output(own: Call, expected: Call, before: Call) -> Kind | None:
    """Classify a submodule's output in the forward; None if it is right, or has another shape.

    Args: before: the expected call of the previous step.
    """
    for mine, right in zip(own.choices, expected.choices, strict=False):
        if mine.shape == right.shape and not torch.equal(mine, right):
            return Kind("routed otherwise", f"{int((mine != right).sum())} of {mine.numel()} choices")
    for mine, right, earlier in zip(own.values, expected.values, before.values, strict=False):
        if mine.shape != right.shape or is_close(mine, right):
            continue
        if not mine.isfinite().all():
            return Kind(OTHER, "not finite")
        if earlier.shape == right.shape and is_close(mine, earlier) and not is_close(earlier, right):
            return Kind("stale", "that of the step before")
        factor = float((mine.double() * right.double()).sum() / right.double().square().sum())
        if is_close(mine, factor * right):
            return Kind("factor", f"{factor:.4g} times what it should be")
        if experts := _wrong_experts(mine, right, expected.choices):
            names = ", ".join(map(str, experts))
            return Kind("swapped experts", f"tokens of experts {names} and of no others")
        return Kind(OTHER, f"{_distance(mine, right):.2g} of its norm")
    return None


def _wrong_experts(own: Tensor, expected: Tensor, choices: Sequence[Tensor]) -> list[int]:
    """Experts whose tokens are all wrong, if no other tokens are; else []."""
    rows = own.reshape(-1, own.shape[-1]), expected.reshape(-1, expected.shape[-1])
    wrong_T = torch.tensor([not is_close(a, b) for a, b in zip(*rows, strict=True)])
    for expert_TK in choices:
        if expert_TK.dim() != 2 or len(expert_TK) != len(wrong_T) or wrong_T.all():
            continue
        right = {*expert_TK[~wrong_T].flatten().tolist()}
        experts = sorted({*expert_TK[wrong_T].flatten().tolist()} - right)
        if experts and all(({*row} - right) for row in expert_TK[wrong_T].tolist()):
            return experts
    return []


def _distance(own: Tensor, expected: Tensor) -> float:
    own, expected = own.double(), expected.double()
    return float((own - expected).norm() / expected.norm().clamp_min(1e-300))
