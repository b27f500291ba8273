"""Which configuration has a layer's fused launches? The tuned one of the user's cache, or the default.

`lancet tune` times `candidates`, and writes the cache.
An entry that is unreadable, has the wrong key, or is not valid on the device is ignored with a warning. All
ranks of a job must have the same entries: the same file, or files written by the same collective
`lancet tune`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lancet_kernels.errors import UserError
from lancet_kernels.files import CacheFile, cache_folder, locked
from lancet_kernels.kernels.config import GemmConfig, OverlapConfig
from lancet_kernels.kernels.runtime import architecture
from lancet_kernels.kernels.tuning.workloads import Workload

SMS_VARIABLE = "LANCET_FUSED_SMS"
# Width, hidden width, activation, PEs on the device.
Shape = tuple[int, int, str, int]
FORMAT = "lancet-tuned-configurations"
VERSION = 1
# Environment variable with another path of the user's cache.
CACHE_VARIABLE = "LANCET_TUNED"


def default_overlap_config(
    width: int,
    hidden: int,
    activation: str,
    dtype: torch.dtype,
    device: torch.device,
    pes_here: int = 1,
    far: bool = False,
) -> OverlapConfig:
    """What was tuned for the device, else a sensible choice.

    Args: pes_here: PEs that share the device. far: some peers are reached by NVSHMEM only.
    Raises: UserError for a wrong LANCET_FUSED_SMS.

    In the interpreter small sizes get small tiles, so that they still have several; large ones get large
    tiles, because there a tile costs the same milliseconds whatever its size.
    """
    if device.type != "cuda" and max(width, hidden) <= 64:
        tile = GemmConfig(16, 32, 16, 1, 1)
        return OverlapConfig(tile, put_rows=4, put_block=32, reduce_tokens=4, reduce_block=32)
    if device.type != "cuda":
        tile = GemmConfig(32, 256, 128, 1, 1)
        return OverlapConfig(tile, put_rows=32, put_block=256, reduce_tokens=32, reduce_block=256)
    config = tuned((width, hidden, activation, pes_here), dtype, device)
    of_device = torch.cuda.get_device_properties(device).multi_processor_count
    programs = max(1, multiprocessors(of_device) // pes_here)
    if config is None or (far and config.bodies == "gluon"):
        config = OverlapConfig.for_gpu(width, hidden, dtype, architecture(device), programs, far)
    return replace(config, programs=min(config.programs, programs))


def multiprocessors(of_device: int) -> int:
    """How many streaming multiprocessors fused launches may take: all, or LANCET_FUSED_SMS.

    A fused launch is resident to its end. On those that it leaves free NCCL reduces gradients meanwhile.
    """
    text = os.environ.get(SMS_VARIABLE)
    if not text:
        return of_device
    if not text.isdecimal() or not 1 <= int(text) <= of_device:
        raise UserError(SMS_VARIABLE, got=text, expected=f"1 to {of_device}, all of the GPU", do="unset it")
    return int(text)


def default_cache() -> Path:
    """The user's cache of tuned configurations, or the file that LANCET_TUNED names."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named) if named else cache_folder() / "tuned.json"


class TunedCache:
    """Entries in a JSON file. Several processes may write it; no entry is lost."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = CacheFile(path, FORMAT, VERSION)

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


@dataclass(frozen=True)
class Entry:
    """One tuned configuration.

    Attributes:
        shape, dtype, device: what it is for; `device` is a GPU's name.
        config: the fields of the configuration.
        milliseconds, default_milliseconds: of this configuration and of the heuristic default.
        triton: its version. date: ISO.
    """

    shape: Shape
    dtype: str
    device: str
    config: dict[str, Any]
    milliseconds: float
    default_milliseconds: float
    triton: str
    date: str

    @property
    def key(self) -> str:
        return key_of(self.shape, self.dtype, self.device)

    def configuration(self) -> OverlapConfig:
        """The configuration as a dataclass. Raises: ValueError for unknown fields, or wrong types."""
        values = dict(self.config)
        try:
            config = OverlapConfig(**values | {"gemm": GemmConfig(**values["gemm"])})
        except (TypeError, KeyError) as error:
            raise ValueError(str(error)) from error
        kinds = {"bodies": str, "gemm": dict}
        numbers = [*values["gemm"].values(), *(v for name, v in values.items() if name not in kinds)]
        if dataclasses.asdict(config) != values or not all(isinstance(n, int) for n in numbers):
            raise ValueError(f"values {values}")
        return config


def key_of(shape: Shape, dtype: str, device: str) -> str:
    """The key of an entry, as one readable line.

    Example: `overlap width=768 hidden=3072 activation=gelu pes_here=1 bfloat16 on NVIDIA H100 80GB HBM3`.
    """
    names = ("width", "hidden", "activation", "pes_here")
    sizes = " ".join(f"{name}={value}" for name, value in zip(names, shape, strict=True))
    return f"overlap {sizes} {dtype} on {device}"


def _from_json(raw: Any) -> Entry:
    """The entry. Raises if it is not valid."""
    entry = Entry(**{**raw, "shape": tuple(raw["shape"])})
    if not all(math.isfinite(t) and t >= 0 for t in (entry.milliseconds, entry.default_milliseconds)):
        raise ValueError("a time that is not a number >= 0")
    entry.configuration()
    return entry


@functools.lru_cache(maxsize=4096)
def tuned(shape: Shape, dtype: torch.dtype, device: torch.device) -> OverlapConfig | None:
    """The tuned configuration, or None; always None on a CPU, where kernels only run for tests.

    The file is read once per process, or again after `forget`.
    """
    if device.type != "cuda":
        return None
    name, arch = device_name(device)
    key = key_of(shape, str(dtype).removeprefix("torch."), name)
    entry = _user_cache().get(key)
    if entry is None:
        return None
    config = entry.configuration()
    if not config.gemm.is_valid(dtype, arch):
        warnings.warn(f"tuned configuration {key!r} cannot run on sm_{arch} and is ignored", stacklevel=2)
        return None
    return config


def forget() -> None:
    """Read the file again at the next lookup."""
    for cached in (tuned, _user_cache):
        cached.cache_clear()


@functools.cache
def _user_cache() -> dict[str, Entry]:
    return TunedCache(default_cache()).entries()


def device_name(device: torch.device) -> tuple[str, int]:
    """(name of the GPU, compute capability: 90 for 9.0)."""
    properties = torch.cuda.get_device_properties(device)
    return properties.name, 10 * properties.major + properties.minor


# Tiles of the plain kernel, by bytes of an element: (block_m, block_n, block_k, warps, stages).
_TILES = {
    2: (
        (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 128, 64, 4, 4),
        (128, 64, 64, 8, 4),
        (64, 128, 64, 4, 4),
        (64, 64, 32, 8, 4),
    ),
    4: ((64, 64, 16, 8, 3), (64, 32, 16, 4, 3), (128, 32, 16, 8, 2), (64, 32, 32, 8, 2)),
}
# Multiprocessors of the A100, the H100 and the B200, by architecture.
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}


@dataclass(frozen=True)
class Place:
    """The GPU of this machine (`device`), or an architecture for a dry run (device None).

    Attributes: name: of the device in the cache's keys. arch: 90 for sm_90. sms: multiprocessors.
    """

    device: torch.device | None
    name: str
    arch: int
    sms: int

    @staticmethod
    def here(device: torch.device) -> Place:
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        return Place(device, *device_name(device), sms)

    @staticmethod
    def elsewhere(arch: int) -> Place:
        return Place(None, f"sm_{arch}", arch, MULTIPROCESSORS[arch])


@dataclass(frozen=True)
class Task:
    """The fused launches of a layer."""

    workload: Workload
    dtype: torch.dtype

    @property
    def shape(self) -> Shape:
        w = self.workload
        return w.width, w.hidden, w.activation, 1

    def key(self, device: str) -> str:
        """As it is looked up."""
        return key_of(self.shape, str(self.dtype).removeprefix("torch."), device)


def candidates(task: Task, place: Place) -> list[OverlapConfig]:
    """The default first, then changes of one property of each kernel at a time: put step, tile.

    All combinations would be several hundred configurations, which take too long to compile.
    """
    w = task.workload
    given = w.width, w.hidden, task.dtype, place.arch, place.sms
    default, plain = OverlapConfig.for_gpu(*given), OverlapConfig.for_gpu(*given, portable=True)
    listed = [default]
    if default.bodies == "gluon":
        listed += [replace(default, put_block=2048), replace(default, put_rows=8, put_block=512)]
        listed.append(replace(default, gemm=replace(default.gemm, num_stages=3)))
    accumulators = 2 if w.activation == "swiglu" else 1
    tiles = [GemmConfig(*sizes) for sizes in _TILES[task.dtype.itemsize]]
    changes: list[dict[str, Any]] = [{}, {"put_rows": 4, "put_block": 1024}]
    changes += [{"gemm": tile} for tile in tiles if tile.is_valid(task.dtype, place.arch, accumulators)]
    return list(dict.fromkeys([*listed, *(replace(plain, **change) for change in changes)]))
