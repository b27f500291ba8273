"""Which configuration was tuned for this kernel, shape and device? The package's table, the user's file.

`tuned(kind, shape, dtype, device)` answers, in this order:

    1. the package's table (`tuned.json` beside this file, once it is measured; measured entries only)
    2. the user's cache, an entry that was measured on a device of this name
    3. the user's cache, an entry that was modelled for this architecture ("sm_90")
    4. None: the launcher takes its heuristic default

An entry that is unreadable, foreign, filed under the wrong key, or not valid on the device is as good as
absent, and a warning says so. `lancet tune` writes the cache. Ranks of one job must find the same entries
(they have the same file, or the files that one collective `lancet tune` wrote).

Beside the entries the file may have "costs": what fused launches took (`kernels.measured_cost`).
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import math
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lancet_kernels.atomic import locked, write_json_atomically

if TYPE_CHECKING:
    from lancet_kernels.kernels.measured_cost import CostEntry

FORMAT = "lancet-tuned-configurations"
VERSION = 1
MEASURED, MODELLED = "measured", "modelled"
PACKAGE_TABLE = Path(__file__).with_name("tuned.json")
# The user's cache somewhere else.
CACHE_VARIABLE = "LANCET_TUNED"

Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class Kind:
    """A sort of kernel: the names of what its shape is made of, and which of these is a number of rows."""

    names: tuple[str, ...]
    rows: int | None = None

    def rounded(self, shape: Shape) -> Shape:
        """The shape with its number of rows up to a power of two: batches differ a little, tiles do not.

        Example: grouped_gemm_forward (1300, 768, 3072, 1) -> (2048, 768, 3072, 1).
        """
        if self.rows is None:
            return shape
        rows = 1 << max(4, (int(shape[self.rows]) - 1).bit_length())
        return (*shape[: self.rows], rows, *shape[self.rows + 1 :])


_GEMM = ("m", "n", "k", "accumulators")
KINDS = {
    "grouped_gemm_forward": Kind(_GEMM, rows=0),
    "grouped_gemm_dx": Kind(_GEMM, rows=0),
    "grouped_gemm_dw": Kind(_GEMM, rows=2),
    "permute": Kind(("width",)),
    "combine": Kind(("width",)),
    "routing": Kind(("experts", "top_k", "key_bits")),
    "overlap": Kind(("width", "hidden", "activation", "pes_here")),
}


def key_of(kind: str, shape: Shape, dtype: str, device: str) -> str:
    """One readable line; the shape as `Kind.rounded` gives it.

    Example: `grouped_gemm_dx m=2048 n=768 k=3072 accumulators=1 bfloat16 on NVIDIA H100 80GB HBM3`.
    """
    sizes = " ".join(f"{name}={value}" for name, value in zip(KINDS[kind].names, shape, strict=True))
    return f"{kind} {sizes} {dtype} on {device}"


@dataclass(frozen=True)
class Entry:
    """One tuned configuration.

    Attributes:
        kind, shape, dtype, device: what it is for; `device` is a GPU's name, or "sm_90" if modelled.
        config: the fields of the configuration (`config_fields`).
        how: "measured" or "modelled".
        milliseconds, default_milliseconds: of this configuration and of the heuristic default, measured or
            modelled as `how` says.
        triton: its version. date: ISO.
    """

    kind: str
    shape: Shape
    dtype: str
    device: str
    config: dict[str, Any]
    how: str
    milliseconds: float
    default_milliseconds: float
    triton: str
    date: str

    @property
    def key(self) -> str:
        return key_of(self.kind, self.shape, self.dtype, self.device)

    def configuration(self) -> Any:
        """As the kind's dataclass. Raises ValueError for fields that it does not have."""
        return config_from(self.kind, self.config)


def config_class(kind: str) -> type:
    """The dataclass that configures kernels of this kind."""
    # Here, not above: these modules ask this one.
    if kind.startswith("grouped_gemm"):
        from lancet_kernels.kernels.gemm_config import GemmConfig as found
    elif kind == "routing":
        from lancet_kernels.kernels.topk_kernel import RoutingConfig as found
    elif kind == "overlap":
        from lancet_kernels.kernels.overlap import OverlapConfig as found
    else:
        from lancet_kernels.kernels.permute import RowConfig as found
    return found


def config_fields(config: Any) -> dict[str, Any]:
    """A configuration as JSON values."""
    return dataclasses.asdict(config)


def config_from(kind: str, fields: dict[str, Any]) -> Any:
    """The other way. Raises ValueError for fields it does not have, or of a wrong type."""
    made = _dataclass_from(config_class(kind), fields)
    if config_fields(made) != fields:
        raise ValueError(f"fields {sorted(fields)}")
    return made


def _dataclass_from(kind: type, fields: dict[str, Any]) -> Any:
    from lancet_kernels.kernels.gemm_config import GemmConfig

    values = dict(fields)
    if isinstance(values.get("gemm"), dict):
        values["gemm"] = _dataclass_from(GemmConfig, values["gemm"])
    if not all(isinstance(value, int | GemmConfig) for value in values.values()):
        raise ValueError(f"values {fields}")
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(str(error)) from error


def is_usable(kind: str, config: Any, shape: Shape, dtype: torch.dtype, arch: int) -> bool:
    """Can this configuration run on such a device?"""
    if kind.startswith("grouped_gemm"):
        return config.is_valid(dtype, arch, shape[3])
    if kind == "routing":
        return config.is_valid(*shape[:2])
    if kind == "overlap":
        accumulators = 2 if shape[2] == "swiglu" else 1
        return (
            config.gemm.is_valid(dtype, arch, accumulators) and 1 <= config.comm_programs <= config.programs
        )
    return config.is_valid()


def cache_folder() -> Path:
    """Where this library remembers things for this user.

    If that cannot be written to, a folder with the same content that goes when this process ends; rank 0
    says so on standard error, once.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return _writable(Path(base or os.path.expanduser("~/.cache")) / "lancet_kernels")


@functools.cache
def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A file, not the permissions: these do not tell of everything, least of all root.
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        if os.environ.get("RANK", "0") == "0":
            print(
                f"lancet: nothing is remembered: {folder} cannot be written to ({error.strerror or error});"
                " set XDG_CACHE_HOME to a folder that can",
                file=sys.stderr,
                flush=True,
            )
    temporary = Path(tempfile.mkdtemp(prefix="lancet-cache-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    with contextlib.suppress(OSError):
        for file in folder.glob("*.json"):
            shutil.copyfile(file, temporary / file.name)
    return temporary


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
        """Add or replace. What was measured stays, if the new entry of that key is only modelled.

        Raises UserError if the file cannot be written.
        """
        with locked(self.path):
            entries = self.entries()
            for entry in new:
                known = entries.get(entry.key)
                if known is None or known.how == MODELLED or entry.how == MEASURED:
                    entries[entry.key] = entry
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
            entry = Entry(**{**raw, "shape": tuple(raw["shape"])})
            if entry.key != key:
                raise ValueError(f"its content is {entry.key}")
            if entry.how not in (MEASURED, MODELLED):
                raise ValueError(f"how is {entry.how!r}")
            if not all(math.isfinite(t) and t >= 0 for t in (entry.milliseconds, entry.default_milliseconds)):
                raise ValueError("a time that is no number")
            entry.configuration()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._warn(f"tuned configuration {key!r} in {self.path} is ignored: {error}")
            return None
        return entry

    def _cost(self, key: str, raw: Any) -> CostEntry | None:
        from lancet_kernels.kernels.measured_cost import CostEntry

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
    for entries, where, hows in (
        (_package_table(), name, (MEASURED,)),
        (_user_cache(), name, (MEASURED,)),
        (_user_cache(), f"sm_{arch}", (MODELLED,)),
    ):
        entry = entries.get(key_of(kind, shape, str(dtype).removeprefix("torch."), where))
        if entry is None or entry.how not in hows:
            continue
        config = entry.configuration()
        if is_usable(kind, config, shape, dtype, arch):
            return config
        warnings.warn(
            f"tuned configuration {entry.key!r} cannot run on sm_{arch} and is ignored", stacklevel=2
        )
    return None


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
