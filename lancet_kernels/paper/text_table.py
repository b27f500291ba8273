"""Tables as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def table(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Lines of a table, indented. Columns are as wide as their widest cell; names to the left, numbers to the
    right.

    Args: columns: heading -> format of its cells, with the keys of a row: {"GPUs": "{gpus}"}.
    """
    cells = [list(columns), *([form.format_map(row) for form in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = [all(not cell[:1].isdigit() for cell in column[1:]) for column in zip(*cells, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.ljust(w) if to_left else cell.rjust(w)
            for cell, w, to_left in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in cells
    ]
