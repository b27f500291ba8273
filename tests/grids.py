"""Which cases of a grid run by default; the others are `long` (`make test-all`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few_of(cases: Iterable[Any], *chosen: int) -> list[Any]:
    """For `pytest.mark.parametrize`: those at the positions `chosen` (or the first one) run by default."""
    chosen = chosen or (0,)
    cases = list(cases)
    positions = {position % len(cases) for position in chosen}
    return [case if number in positions else _long(case) for number, case in enumerate(cases)]


def _long(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.long)
