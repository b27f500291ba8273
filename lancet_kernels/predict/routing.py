"""How a router spreads tokens over experts, an input of predictions: balanced, skewed, or counted in a run.

All ranks of an expert group wait for each other in every exchange, so that the rank that gets most rows sets
the time of a layer's exchanges and experts, in each layer another one; memory is that of the rank with most
rows in all layers together. A capacity cuts what an expert gets, and with it both.

Example: two ranks with two experts each, layers with 3 1 2 2 and 1 1 3 3 choices: ranks get 4 4 and 2 6 rows,
the busiest 1 and 1.5 times the mean. Times are those of 1.25 times the rows, memory that of 10 / 8 = 1.25.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lancet_kernels.errors import UserError

BALANCED = "balanced"
_EXPECTED = (
    "balanced, zipf:1.2 or the path of counts.json, with ,capacity:1.25 behind it for a capacity factor"
)


@dataclass(frozen=True)
class Load:
    """Rows of the busiest rank, relative to the mean of all ranks.

    time: in each layer, the mean over layers. memory: in all layers together. dropped: share of the choices
    that a capacity drops.
    """

    time: float = 1.0
    memory: float = 1.0
    dropped: float = 0.0


@dataclass(frozen=True)
class Routing:
    """counts: choices by layer and expert. capacity: the most that an expert takes, relative to an even
    share; None: dropless."""

    counts: tuple[tuple[float, ...], ...]
    capacity: float | None = None

    @classmethod
    def of(cls, spec: str, experts: int, layers: int) -> Routing:
        """From `balanced`, `zipf:S` (expert r of a random order gets 1 / r**S, in each layer another one) or
        the path of a file of `layer.routing_counts`.

        Raises: UserError for another text, and for counts of another number of experts.
        """
        kind, _, capacity = spec.partition(",capacity:")
        if kind == BALANCED:
            counts: Sequence[Sequence[float]] = [[1.0] * experts]
        elif kind.startswith("zipf:"):
            counts = [_zipf(_number(kind[5:], spec), experts, layer) for layer in range(layers)]
        elif kind.endswith(".json"):
            counts = _read(kind, experts)
        else:
            raise _unreadable(spec)
        return cls(tuple(map(tuple, counts)), _number(capacity, spec) if capacity else None)

    def load(self, ranks: int) -> Load:
        """The load of `ranks` ranks with as many consecutive experts each."""
        by_layer, chosen, kept = [], 0.0, 0.0
        for layer in self.counts:
            share = sum(layer) / len(layer)
            taken = layer if self.capacity is None else [min(n, self.capacity * share) for n in layer]
            each = len(layer) // ranks
            # In even shares of a rank, so that every layer has the same weight.
            by_layer.append([sum(taken[r * each : (r + 1) * each]) / (share * each) for r in range(ranks)])
            chosen, kept = chosen + len(layer), kept + sum(taken) / share
        together = map(sum, zip(*by_layer, strict=True))
        layers = len(by_layer)
        return Load(sum(map(max, by_layer)) / layers, max(together) / layers, 1 - kept / chosen)


def _zipf(exponent: float, experts: int, layer: int) -> list[float]:
    counts = [(1 + n) ** -exponent for n in range(experts)]
    random.Random(layer).shuffle(counts)
    return counts


def _read(path: str, experts: int) -> list[list[float]]:
    try:
        counts = json.loads(Path(path).read_text(encoding="utf-8"))["assigned"]
        layers = [[float(n) for n in layer] for layer in counts]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            "--routing",
            got=f"{path} ({error})",
            expected="a file that RoutingCounts wrote",
            do="write it anew",
        ) from error
    if not layers or any(len(layer) != experts or min(layer) < 0 or not sum(layer) for layer in layers):
        raise UserError(
            "--routing", got=f"{path} with {sorted({len(layer) for layer in layers})} experts in its layers",
            expected=f"counts of {experts} experts in each", do="count with this model",
        )  # fmt: skip
    return layers


def _number(text: str, spec: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise _unreadable(spec) from None
    if not 0 <= number < float("inf"):
        raise _unreadable(spec)
    return number


def _unreadable(spec: str) -> UserError:
    return UserError("--routing", got=repr(spec), expected=_EXPECTED, do="correct it")
