"""Looks up tuned configurations of kernels, in the package's table and in the user's cache.

`tuned(kind, shape, dtype, device)` uses the first of these that it finds:

    1. the package's table (`tuned.json` beside this file, once it is measured; measured entries only)
    2. the user's cache, an entry that was measured on a device of this name
    3. None: the launcher takes its heuristic default

An entry that is unreadable, has the wrong key, or is not valid on the device is ignored with a warning.
`lancet tune` writes the cache. All ranks of a job must have the same entries: the same file, or files written
by the same collective `lancet tune`.

The file may also have "costs": measured times of fused launches (`kernels.cost_entry`), which `measured_cost`
looks up. Entries of older versions that are labelled "modelled" are not measured, and are ignored without a
warning.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from lancet_kernels.atomic import locked, write_json_atomically
from lancet_kernels.kernels.cache_folder import cache_folder
from lancet_kernels.kernels.cost_entry import CostEntry, LayerKind
from lancet_kernels.kernels.tuned_entry import (
    KINDS,
    MEASURED,
    Entry,
    Shape,
    config_fields,
    config_from,
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


class TunedCache:
    """Entries in a JSON file. Several processes may write it; no entry is lost."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._warned: set[str] = set()

    def entries(self) -> dict[str, Entry]:
        """All valid entries by key, from the current file."""
        raw = self._section("entries")
        return {key: entry for key in raw if (entry := self._entry(key, raw[key])) is not None}

    def costs(self) -> dict[str, CostEntry]:
        """All valid measurements of fused launches by key, from the current file."""
        raw = self._section("costs")
        return {key: cost for key in raw if (cost := self._cost(key, raw[key])) is not None}

    def check_writable(self) -> None:
        """Raise UserError if the file cannot be written; called before hours of tuning."""
        with locked(self.path):
            pass

    def put(self, new: Iterable[Entry], costs: Iterable[CostEntry] = ()) -> None:
        """Add or replace. Raises UserError if the file cannot be written."""
        with locked(self.path):
            entries = self.entries() | {entry.key: entry for entry in new}
            data = {"format": FORMAT, "version": VERSION, "entries": _as_json(entries)}
            if all_costs := self.costs() | {cost.key: cost for cost in costs}:
                data["costs"] = _as_json(all_costs)
            write_json_atomically(self.path, data)
        forget()

    def _section(self, name: str) -> dict[str, Any]:
        """A section of the file, with unchecked records; empty if it is missing or cannot be read."""
        what = "tuned configurations"
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if (data["format"], data["version"]) != (FORMAT, VERSION):
                raise ValueError(f"format {data['format']}, version {data['version']}")
            entries = dict(data["entries"])
            if name == "entries":
                return entries
            what = f"measured {name}"
            return dict(data.get(name, {}))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self._warn(f"{what} in {self.path} are not readable ({error}); they are ignored")
            return {}

    def _entry(self, key: str, raw: Any) -> Entry | None:
        try:
            if raw["how"] == "modelled":
                return None
            entry = Entry(**{**raw, "shape": tuple(raw["shape"])})
            if entry.key != key:
                raise ValueError(f"its content is {entry.key}")
            if entry.how != MEASURED:
                raise ValueError(f"how is {entry.how!r}")
            if not all(math.isfinite(t) and t >= 0 for t in (entry.milliseconds, entry.default_milliseconds)):
                raise ValueError("a time that is not a number >= 0")
            entry.configuration()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._warn(f"tuned configuration {key!r} in {self.path} is ignored: {error}")
            return None
        return entry

    def _cost(self, key: str, raw: Any) -> CostEntry | None:
        try:
            entry = CostEntry.from_json(raw)
            if entry.key != key:
                raise ValueError(f"its content is {entry.key}")
            config_from("overlap", entry.config)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._warn(f"measured cost {key!r} in {self.path} is ignored: {error}")
            return None
        return entry

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=3)


def _as_json(records: Mapping[str, Any]) -> dict[str, Any]:
    return {key: dataclasses.asdict(records[key]) for key in sorted(records)}


@functools.lru_cache(maxsize=4096)
def tuned(kind: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> Any | None:
    """The tuned configuration, or None; always None on a CPU, where kernels only run for tests.

    Args: kind, shape: see KINDS. Files are read once per process, or again after `forget`.
    """
    if device.type != "cuda":
        return None
    name, arch = device_name(device)
    shape = KINDS[kind].rounded(shape)
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


def measured_cost(kind: LayerKind, device: torch.device) -> tuple[CostEntry | None, str]:
    """The measured times of fused launches for a device, or None; and a text with their source, or the reason
    for None.

    The package's table has priority over the user's cache, as for configurations. Points of another device,
    another number of ranks (another link), another configuration than the tuned one, or from the interpreter
    are never used.
    """
    if device.type != "cuda":
        return None, "nothing is measured on a CPU"
    name, _ = device_name(device)
    key = kind.key(name)
    entries = [TunedCache(path).costs().get(key) for path in (PACKAGE_TABLE, default_cache())]
    entry = next((entry for entry in entries if entry is not None and entry.how == MEASURED), None)
    if entry is None:
        return None, f"nothing is measured for {key}"
    config = tuned("overlap", kind.shape, getattr(torch, kind.dtype), device)
    if config is None or config_fields(config) != entry.config:
        return None, f"the measurements for {key} are of another configuration than the tuned one"
    try:
        entry.check_enough()
    except ValueError as error:
        return None, f"there are too few measurements for {key}: {error}"
    return entry, str(entry)


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
