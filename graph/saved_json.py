"""Reads JSON files with a format and a version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lancet_kernels.errors import UserError


def read_json(path: str | Path, kind: str, expected: str, do: str) -> Any:
    """The JSON value in a file. Raises: UserError, which names the `kind` of file, if it cannot be read."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{kind} file", got=f"{path} ({error})", expected=expected, do=do) from error


def versioned_fields(data: Any, kind: str, version: tuple[str, int], do: str) -> dict[str, Any]:
    """The fields of a JSON object without its format and version. Raises: UserError if these do not match."""
    actual = (data.get("format"), data.get("version")) if isinstance(data, dict) else type(data).__name__
    if actual != version:
        raise UserError(f"{kind} JSON", got=actual, expected=version, do=do)
    return {k: v for k, v in data.items() if k not in ("format", "version")}
