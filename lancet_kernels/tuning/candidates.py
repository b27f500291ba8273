"""Candidate configurations of a kernel, and the result of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lancet_kernels.kernels.tuned_entry import Entry, config_fields
from lancet_kernels.tuning.place import Place
from lancet_kernels.tuning.tune_tasks import MOST_CANDIDATES, Task


@dataclass
class Candidate:
    """A configuration, its median time, or the reason why it has none."""

    config: Any
    reason: str | None = None
    ms: float | None = None

    def as_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"config": config_fields(self.config)}
        if self.ms is not None:
            fields["ms"] = self.ms
        return fields | ({"dropped": self.reason} if self.reason else {})


@dataclass
class Outcome:
    """The result of a task.

    Attributes:
        status: "tuned", "known" (it was in the cache), "left" (not done in time), "failed", "dry-run".
        candidates: the default first.
    """

    task: Task
    key: str
    status: str
    candidates: list[Candidate] = field(default_factory=list)
    winner: Candidate | None = None
    cached: Entry | None = None

    @property
    def kept(self) -> list[Candidate]:
        return [c for c in self.candidates if c.reason is None]

    @property
    def default(self) -> Candidate | None:
        return self.candidates[0] if self.candidates else None

    @property
    def config(self) -> Any:
        """The winner's configuration, from this run or from the cache; in a dry run the default."""
        if self.cached is not None:
            return self.cached.configuration()
        candidate = self.default if self.status == "dry-run" else self.winner
        return None if candidate is None else candidate.config


def candidates_of(task: Task, place: Place, most: int = MOST_CANDIDATES) -> list[Candidate]:
    """The first `most` of the configurations that are worth timing, the heuristic default first."""
    return [Candidate(config) for config in task.tunable.candidates(task, place)[:most]]
