"""Candidate configurations of a kernel, and the result for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lancet_kernels.kernels.tuned_entry import Entry, config_fields
from lancet_kernels.tuning.place import Place
from lancet_kernels.tuning.tune_cost import CostOutcome
from lancet_kernels.tuning.tune_tasks import Task

# Configurations of a shape that are timed; the lists of the kinds are no longer than that.
MOST_CANDIDATES = 20


@dataclass
class Candidate:
    """A configuration, its median time, or the reason why it has none."""

    config: Any
    reason: str | None = None
    ms: float | None = None

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"config": config_fields(self.config)}
        if self.ms is not None:
            found["ms"] = self.ms
        return found | ({"dropped": self.reason} if self.reason else {})


@dataclass
class Outcome:
    """The result of a task.

    Attributes:
        status: "tuned", "known" (the cache has it), "left" (time was up), "failed", "dry-run".
        candidates: the default first.
        cost: of the winner's fused launches; None for other kinds, and where there is no winner.
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
        """The winner's configuration, now or before; in a dry run the default's."""
        if self.known is not None:
            return self.known.configuration()
        found = self.default if self.status == "dry-run" else self.winner
        return None if found is None else found.config


def candidates_of(task: Task, place: Place, most: int = MOST_CANDIDATES) -> list[Candidate]:
    """The first `most` of the configurations that are worth timing, the heuristic default first."""
    return [Candidate(config) for config in task.tunable.candidates(task, place)[:most]]
