"""Rows of published measurements: one TOML file for each source.

A file has `source`, `commit`, `configuration` and `assumed`, and one table `[[rows]]` for each measured
value.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FOLDER = Path(__file__).parent / "measurements"
CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class Row:
    """One measured value.

    configuration: of the file, with what the row changes. quantity: what was measured ("step_ms",
    "forward_ms", "peak_memory_gib", ...). strategy: in which order. fitted: were constants fitted on it?
    simulated: "" or why the row cannot be simulated. why: what is known of the error.
    """

    name: str
    source: str
    commit: str
    configuration: Mapping[str, Any]
    assumed: tuple[str, ...]
    quantity: str
    measured: float
    strategy: str = "none"
    fitted: bool = False
    not_simulated: str = ""
    why: str = ""


def load_rows() -> list[Row]:
    """All rows, those that were fitted first, then by file."""
    rows = [row for file in sorted(FOLDER.glob("*.toml")) for row in _of_file(file)]
    return sorted(rows, key=lambda row: not row.fitted)


def _of_file(file: Path) -> list[Row]:
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    common = data.get("configuration", {})
    return [
        Row(
            source=data["source"],
            commit=data["commit"],
            assumed=tuple(data.get("assumed", ())),
            configuration={**common, **row.pop("configuration", {})},
            **row,
        )
        for row in data["rows"]
    ]
