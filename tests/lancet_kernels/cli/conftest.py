"""Fixtures of the tests of the command `lancet`."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from unittest import mock

import pytest

from lancet_kernels.__main__ import main
from lancet_kernels.predict import simulate


@pytest.fixture(autouse=True, scope="module")
def planned_once() -> Iterator[None]:
    """Most tests of a file look at the same plans."""
    with mock.patch.object(simulate, "simulate_setting", lru_cache(simulate.simulate_setting)):
        yield


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line that `lancet` says when it refuses arguments."""

    def said(*arguments: object) -> str:
        try:
            code = main([*map(str, arguments)])
        except SystemExit as leave:
            code = leave.code
        out, err = capfd.readouterr()
        assert code not in (0, None)
        assert err.startswith("lancet: " if code == 1 else "lancet ")
        assert out == ""
        assert err.count("\n") == 1, err
        return err

    return said
