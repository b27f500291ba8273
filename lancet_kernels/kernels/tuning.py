"""Which configuration was tuned for this kernel, shape and device? The package's table, the user's file.

`tuned(kind, shape, dtype, device)` answers, in this order:

    1. the package's table (`tuned.json` beside this file, once it is measured; measured entries only)
    2. the user's cache, an entry that was measured on a device of this name
    3. None: the launcher takes its heuristic default

An entry that is unreadable, foreign, filed under the wrong key, or not valid on the device is as good as
absent, and a warning says so. `lancet tune` writes the cache. Ranks of one job must find the same entries
(they have the same file, or the files that one collective `lancet tune` wrote).

Beside the entries the file may have "costs": what fused launches took (`kernels.cost_entry`), which
`measured_cost` looks up. Entries that older versions labelled "modelled" are no measurements: ignored.
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
# The user's cache somewhere else.
CACHE_VARIABLE = "LANCET_TUNED"


def default_cache() -> Path:
    """The user's cache of tuned configurations, or the file that LANCET_TUNED names."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) if named else cache_folder() / "tuned.json"


class TunedCache:
    """Entries in a JSON file. Other processes may write it too: nobody's entries are lost."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._warned: set[str] = set()

    def entries(self) -> dict[str, Entry]:
        """All sound entries by key, as the file is now."""
        raw = self._section("entries")
        return {key: entry for key in raw if (entry := self._entry(key, raw[key])) is not None}

    def costs(self) -> dict[str, CostEntry]:
        """All sound measurements of fused launches by key, as the file is now."""
        raw = self._section("costs")
        return {key: cost for key in raw if (cost := self._cost(key, raw[key])) is not None}

    def check_writable(self) -> None:
        """Raise UserError if the file cannot be written: before hours of tuning, not after them."""
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
        """A part of the file, its records unchecked; empty if there is none, or it cannot be read."""
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
                raise ValueError("a time that is no number")
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
    """The tuned configuration, None if there is none; always None on a CPU, where kernels are for proof only.

    Args: kind, shape: see KINDS. Files are read once per process (`forget` makes it look again).
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
    """What fused launches of a kind of layer took on a device, or None; with words: what it is, or why none.

    The package's table goes first. Points of another device, another number of ranks (another link), another
    configuration than launches have today, or from the interpreter, are never taken.
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
        return None, f"what is measured for {key} is of another configuration than the one tuned last"
    try:
        entry.check_enough()
    except ValueError as error:
        return None, f"too little is measured for {key}: {error}"
    return entry, str(entry)


def forget() -> None:
    """Look into the files again at the next lookup."""
    for remembered in (tuned, _package_table, _user_cache):
        remembered.cache_clear()


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
