"""Looks up tuned configurations of kernels, in the package's table and in the user's cache.

`tuned(kind, shape, dtype, device)` uses the first of these that it finds:

    1. the package's table (`tuned.json` beside this file, once it is measured; measured entries only)
    2. the user's cache, an entry that was measured on a device of this name
    3. None: the launcher takes its heuristic default

An entry that is unreadable, has the wrong key, or is not valid on the device is ignored with a warning.
`lancet tune` writes the cache. All ranks of a job must have the same entries: the same file, or files written
by the same collective `lancet tune`.

Entries of older versions that are labelled "modelled" are not measured, and are ignored without a warning.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from lancet_kernels.atomic import locked
from lancet_kernels.cache_file import CacheFile, cache_folder
from lancet_kernels.kernels.tuned_entry import (
    MEASURED,
    Entry,
    Shape,
    is_usable,
    key_of,
)

FORMAT = "lancet-tuned-configurations"
VERSION = 1
PACKAGE_TABLE = Path(__file__).with_name("tuned.json")
# Environment variable with another path of the user's cache.
CACHE_VARIABLE = "LANCET_TUNED"


def default_cache() -> Path:
    """The user's cache of tuned configurations, or the file that LANCET_TUNED names."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) if named else cache_folder() / "tuned.json"


def cache_file(path: str | Path) -> CacheFile:
    """A file of tuned configurations; it may have other sections."""
    return CacheFile(path, FORMAT, VERSION)


class TunedCache:
    """Entries in a JSON file. Several processes may write it; no entry is lost."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = cache_file(path)

    def entries(self) -> dict[str, Entry]:
        """All valid entries by key, from the current file."""
        return self._file.records("entries", "tuned configuration", _from_json)

    def check_writable(self) -> None:
        """Raise UserError if the file cannot be written; called before hours of tuning."""
        with locked(self.path):
            pass

    def put(self, new: Iterable[Entry]) -> None:
        """Add or replace. Raises UserError if the file cannot be written."""
        with self._file.changed() as sections:
            entries = self.entries() | {entry.key: entry for entry in new}
            sections["entries"] = {key: dataclasses.asdict(entries[key]) for key in sorted(entries)}
        forget()


def _from_json(raw: Any) -> Entry | None:
    """The entry; None for one that an older version modelled. Raises if it is not valid."""
    if raw["how"] == "modelled":
        return None
    entry = Entry(**{**raw, "shape": tuple(raw["shape"])})
    if entry.how != MEASURED:
        raise ValueError(f"how is {entry.how!r}")
    if not all(math.isfinite(t) and t >= 0 for t in (entry.milliseconds, entry.default_milliseconds)):
        raise ValueError("a time that is not a number >= 0")
    entry.configuration()
    return entry


@functools.lru_cache(maxsize=4096)
def tuned(kind: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> Any | None:
    """The tuned configuration, or None; always None on a CPU, where kernels only run for tests.

    Args: kind, shape: see KINDS. Files are read once per process, or again after `forget`.
    """
    if device.type != "cuda":
        return None
    name, arch = device_name(device)
    key = key_of(kind, shape, str(dtype).removeprefix("torch."), name)
    for entries in (_package_table(), _user_cache()):
        entry = entries.get(key)
        if entry is None:
            continue
        config = entry.configuration()
        if is_usable(kind, config, shape, dtype, arch):
            return config
        warnings.warn(
            f"tuned configuration {entry.key!r} cannot run on sm_{arch} and is ignored", stacklevel=2
        )
    return None


def forget() -> None:
    """Read the files again at the next lookup."""
    for cached in (tuned, _package_table, _user_cache):
        cached.cache_clear()


@functools.cache
def _package_table() -> dict[str, Entry]:
    return TunedCache(PACKAGE_TABLE).entries()


@functools.cache
def _user_cache() -> dict[str, Entry]:
    return TunedCache(default_cache()).entries()


def device_name(device: torch.device) -> tuple[str, int]:
    """(name of the GPU, compute capability: 90 for 9.0)."""
    properties = torch.cuda.get_device_properties(device)
    return properties.name, 10 * properties.major + properties.minor
