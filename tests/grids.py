"""Which cases of a grid run by default; the others are `long` (`make test-all`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few_of(cases: Iterable[Any], *chosen: int) -> list[Any]:
    """For `pytest.mark.parametrize`: those at the positions `chosen` (or the first one) run by default.

    A tuple has the values of several parameters; where it is one value, it comes as `pytest.param(tuple)`.
    """
    cases = list(cases)
    positions = {position % len(cases) for position in chosen or (0,)}
    return [case if number in positions else _long(case) for number, case in enumerate(cases)]


def _long(case: Any) -> Any:
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.long], id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
