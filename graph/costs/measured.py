"""The file of measured op times: JSON, keyed by op, shapes, dtypes and device.

Lancet's Caching Op Profiler (section 3): every op is timed once per shape, and then reused. This file only
stores times; `graph.costs.profiler` measures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lancet_kernels.cache_file import CacheFile
from lancet_kernels.errors import UserError
from lancet_kernels.graph.program.program import Instruction, TensorSpec

FORMAT = "lancet-measured-times"
VERSION = 1


def measurement_key(instruction: Instruction, tensors: Mapping[str, TensorSpec], device: str) -> str:
    """Op, shapes and dtypes of all operands, and device, as one readable line.

    Example: `aten.mm (4x8:float16, 8x2:float16) -> (4x2:float16) on V100`.
    """

    def side(names: tuple[str, ...]) -> str:
        specs = [tensors[t] for t in names]
        return ", ".join(f"{'x'.join(map(str, s.shape)) or 'scalar'}:{s.dtype}" for s in specs)

    return f"{instruction.op} ({side(instruction.inputs)}) -> ({side(instruction.outputs)}) on {device}"


class MeasuredTimes:
    """Milliseconds by `measurement_key`. A file that cannot be read counts as empty, with one warning."""

    def __init__(self, path: str | Path):
        self._file = CacheFile(path, FORMAT, VERSION, "they are ignored and will be measured again")
        self._times = self._read()

    def get(self, key: str) -> float | None:
        """The measured milliseconds; None if there is no measurement."""
        return self._times.get(key)

    def items(self) -> list[tuple[str, float]]:
        """All keys and milliseconds."""
        return list(self._times.items())

    def put(self, key: str, milliseconds: float) -> None:
        """Add one measurement; `save` writes the file."""
        if not (math.isfinite(milliseconds) and milliseconds >= 0):
            raise UserError(
                f"time of {key}", got=milliseconds, expected="milliseconds >= 0", do="measure it again"
            )
        self._times[key] = float(milliseconds)

    def save(self) -> None:
        """Write atomically: readers see the old file or the new one. Entries of other processes are
        preserved."""
        with self._file.changed() as sections:
            self._times = dict(sorted({**self._read(), **self._times}.items()))
            sections["milliseconds"] = self._times

    def _read(self) -> dict[str, float]:
        return self._file.section("milliseconds", "measured times", _times_from_json, {})


def _times_from_json(times: Any) -> dict[str, float]:
    if not all(isinstance(v, int | float) and math.isfinite(v) and v >= 0 for v in times.values()):
        raise ValueError("a time that is not a number >= 0")
    return {str(k): float(v) for k, v in times.items()}
