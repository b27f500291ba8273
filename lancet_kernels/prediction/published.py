"""Published measurements with their predictions, as `python -m bench.published --save` wrote them."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

FILE = resources.files("lancet_kernels.prediction") / "published.json"


def published_rows() -> list[dict[str, Any]]:
    """Rows with `name`, `quantity`, `measured`, `predicted`, `error` and `fitted`."""
    return json.loads(FILE.read_text(encoding="utf-8"))["rows"]
