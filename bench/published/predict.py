"""The prediction and its error for each row."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from bench.published.layers import predicted_layer
from bench.published.rows import CONFIGS, Row, load_rows
from lancet_kernels.predict.answer import Answer, answer
from lancet_kernels.predict.question import Question


@dataclass(frozen=True)
class Checked:
    """A row with its prediction. None: not simulated."""

    row: Row
    predicted: float | None

    @property
    def error(self) -> float | None:
        """(predicted - measured) / measured, as a fraction; for the gain of an overlap, which is a fraction
        itself, the difference."""
        if self.predicted is None:
            return None
        difference = self.predicted - self.row.measured
        return difference if self.row.quantity == "gain" else difference / self.row.measured

    def to_json(self) -> dict[str, Any]:
        """The row as JSON values, with `predicted` and `error`."""
        row = asdict(self.row)
        row["configuration"], row["assumed"] = dict(self.row.configuration), list(self.row.assumed)
        return {**row, "predicted": self.predicted, "error": self.error}


def check(rows: Sequence[Row] | None = None) -> list[Checked]:
    """All rows, or these, with their predictions."""
    rows = load_rows() if rows is None else rows
    return [Checked(row, None if row.not_simulated else predict(row)) for row in rows]


def predict(row: Row) -> float:
    """The prediction of a row's quantity."""
    if row.configuration["kind"] == "layer":
        return predicted_layer(row.configuration)[row.quantity]
    result = answer_of(row)
    if row.quantity == "gain":
        return 1 - result.strategies[row.strategy].step_ms / result.strategies["none"].step_ms
    if row.quantity == "exchange_ms":
        return result.strategies["none"].exposed_ms["all_to_all"]  # where nothing hides them
    return float(result.figures(row.strategy)[row.quantity])  # type: ignore[arg-type]


def answer_of(row: Row) -> Answer:
    """The answer that a row of a step is predicted from."""
    items = {name: value for name, value in row.configuration.items() if name != "kind"}
    return _answer(tuple(sorted(items.items())), row.strategy)


@lru_cache(maxsize=32)
def _answer(items: tuple[tuple[str, Any], ...], strategy: str) -> Answer:
    configuration: Mapping[str, Any] = dict(items)
    hf = str(CONFIGS / f"{configuration['model']}.json")
    return answer(
        Question(hf, **{k: v for k, v in configuration.items() if k != "model"}),
        tuple(dict.fromkeys(("none", strategy))),
    )


def summary(checked: Sequence[Checked]) -> dict[str, dict[str, float]]:
    """Mean, median and worst absolute error of times and of memory, fitted and predicted apart."""
    result = {}
    for fitted in (True, False):
        for what in ("time", "memory"):
            errors = [
                abs(one.error)
                for one in checked
                if one.error is not None
                and one.row.fitted is fitted
                and one.row.quantity != "gain"
                and ("memory" in one.row.quantity) is (what == "memory")
            ]
            if errors:
                name = f"{'fitted' if fitted else 'predicted'} {what}"
                result[name] = {
                    "rows": len(errors),
                    "mean": statistics.fmean(errors),
                    "median": statistics.median(errors),
                    "worst": max(errors),
                }
    return result
