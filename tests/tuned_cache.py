"""A cache of tuned configurations for tests, on a machine that has an H100 that nobody may touch."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lancet_kernels.kernels import tuning
from lancet_kernels.kernels.tuning import TunedCache

GPU = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TunedCache]:
    """The user's cache, empty."""
    monkeypatch.setenv(tuning.CACHE_VARIABLE, str(tmp_path / "user" / "tuned.json"))
    monkeypatch.setattr(tuning, "device_name", lambda device: (GPU, 90))
    tuning.forget()
    yield TunedCache(tuning.default_cache())
    tuning.forget()
