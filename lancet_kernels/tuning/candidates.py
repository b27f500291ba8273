"""Candidate configurations of a kernel: which are compiled, and the result for each."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from lancet_kernels.kernels.launch_model import Facts, Hardware
from lancet_kernels.kernels.tuned_entry import Entry, config_fields
from lancet_kernels.tuning.tune_cost import CostOutcome
from lancet_kernels.tuning.tune_tasks import Task

# The model is accurate enough for factors of two, not for 5 %.
PRUNE_ABOVE = 1.5


@dataclass
class Candidate:
    """A configuration, its modelled time, and the reason if it was pruned."""

    config: Any
    model_ms: float
    reason: str | None = None
    facts: Facts | None = None
    ms: float | None = None

    def as_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"config": config_fields(self.config), "model_ms": self.model_ms}
        if self.facts is not None:
            fields |= {"registers": self.facts.registers, "shared_bytes": self.facts.shared_bytes}
        if self.ms is not None:
            fields["ms"] = self.ms
        return fields | ({"pruned": self.reason} if self.reason else {})


@dataclass
class Outcome:
    """The result of a task.

    Attributes:
        status: "tuned", "known" (it was in the cache), "left" (not done in time), "failed", "dry-run".
        cost: the cost of the winner's fused launches; None for other kinds, or without a winner.
    """

    task: Task
    key: str
    status: str
    candidates: list[Candidate] = field(default_factory=list)
    winner: Candidate | None = None
    known: Entry | None = None
    cost: CostOutcome | None = None

    @property
    def kept(self) -> list[Candidate]:
        return [c for c in self.candidates if c.reason is None]

    @property
    def default(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None

    @property
    def config(self) -> Any:
        """The winner's configuration, from this run or from the cache; in a dry run the default."""
        if self.known is not None:
            return self.known.configuration()
        candidate = self.default if self.status == "dry-run" else self.winner
        return None if candidate is None else candidate.config


def rank_candidates(task: Task, hardware: Hardware, keep: int) -> list[Candidate]:
    """All candidates with their modelled times, the default first; all but the best `keep` are pruned.

    The default is never pruned here. Of candidates that differ only in the group order, one is kept. Only a
    few candidates with the same tile are kept, because the model errs alike for all of them.
    """
    tunable = task.tunable
    candidates = [
        Candidate(c, tunable.model_ms(task, c, hardware, None)) for c in tunable.candidates(task, hardware)
    ]
    default, best = candidates[0], min(c.model_ms for c in candidates)
    seen, places = {_twin(default.config): default}, keep - 1
    families = Counter([_family(default.config)])
    few = max(2, keep // 4)
    usual = getattr(default.config, "group_m", None)
    by_time = sorted(candidates[1:], key=lambda c: (c.model_ms, getattr(c.config, "group_m", None) != usual))
    for candidate in by_time:
        twin = seen.setdefault(_twin(candidate.config), candidate)
        if candidate.model_ms > PRUNE_ABOVE * best:
            candidate.reason = f"model: {candidate.model_ms / best:.2f} times the best"
        elif twin is not candidate:
            candidate.reason = "model: the same tile with another group order is kept"
        elif families[_family(candidate.config)] >= few:
            candidate.reason = f"model: {few} with the same tile are kept"
        elif places <= 0:
            candidate.reason = f"model: not among the best {keep}"
        else:
            places -= 1
            families[_family(candidate.config)] += 1
    return candidates


def _twin(config: Any) -> str:
    fields = config_fields(config)
    fields.pop("group_m", None)
    return json.dumps(fields, sort_keys=True)


def _family(config: Any) -> object:
    tile = getattr(config, "gemm", config)
    sides = getattr(tile, "block_m", None), getattr(tile, "block_n", None)
    # Configurations without a tile of a GEMM are each a family.
    return config if sides == (None, None) else (sides, getattr(config, "split", None))
