"""Device costs of partitioning: joining parts, a kernel launch, one part of an op.

Measured once per device model (`graph.costs.measure_device`), and stored in a JSON file beside the measured
times; each entry has its device model, torch version and source ("measured").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lancet_kernels.files import CacheFile
from lancet_kernels.graph.costs.clusters import Points, interpolated
from lancet_kernels.graph.program.program import Instruction, TensorSpec

FORMAT = "lancet-device-costs"
VERSION = 3


@dataclass(frozen=True)
class DeviceCosts:
    """The costs on one device model with one version of torch.

    launch_ms: the time of an op on one element.
    copies: (bytes read and written, milliseconds) of concatenating two tensors, sorted by bytes.
    counting: the same by name of an op that only partitioned graphs have, and that copies no rows.
    shares: by `cut_key`: (number of parts, time of one part as a fraction of the time of the whole op).
    """

    device: str
    torch: str
    launch_ms: float
    copies: Points
    counting: Mapping[str, Points] = field(default_factory=dict)
    shares: Mapping[str, Points] = field(default_factory=dict)
    source: str = "measured"

    def __str__(self) -> str:
        return f"{self.source} on {self.device}, torch {self.torch}"

    def added_ms(self, op: str, bytes: float) -> float:
        """Milliseconds of an op that only partitioned graphs have: counting rows, or copying them.

        Args: bytes: read and written; 0 takes no time.
        """
        return interpolated(self.counting.get(op, self.copies), bytes) if bytes > 0 else 0.0

    def part_ms(self, part: Instruction, tensors: Mapping[str, TensorSpec], whole_ms: float) -> float | None:
        """Milliseconds of one part of an op that takes `whole_ms` uncut; None if it was not measured.

        The total time of all parts is interpolated between the measured numbers of parts.
        """
        shares = self.shares.get(cut_key(part, tensors))
        if shares is None:
            return None
        together = ((1.0, 1.0), *((parts, parts * share) for parts, share in shares))
        parts = part.attributes["parts"]
        return interpolated(together, parts) / parts * whole_ms


_OF_THE_PART = ("part", "parts", "forms", "whole_shapes", "whole_milliseconds")


def cut_key(part: Instruction, tensors: Mapping[str, TensorSpec]) -> str:
    """Op, operands and their forms; independent of the number of parts, and equal for all of them.

    Args: part: an instruction of `graph.costs.part_instruction`. tensors: with the specs of its operands.
    Example: `aten.mm (8x4:float32 cut 0, 4x6:float32 whole, 8x6:float32 cut 0) []`.
    """
    names = (*part.inputs, *part.outputs)
    sizes, forms = part.attributes["whole_shapes"], part.attributes["forms"]
    operands = ", ".join(
        f"{'x'.join(map(str, size)) or 'scalar'}:{tensors[name].dtype} {form}"
        for name, size, form in zip(names, sizes, forms, strict=True)
    )
    attributes = ", ".join(f"{k}={v}" for k, v in sorted(part.attributes.items()) if k not in _OF_THE_PART)
    return f"{part.op} ({operands}) [{attributes}]"


class DeviceCostsFile:
    """The file of measured device costs. A file that cannot be read counts as empty, with a warning."""

    def __init__(self, path: str | Path) -> None:
        self._file = CacheFile(path, FORMAT, VERSION, "they will be measured again")

    def get(self, device: str, torch: str) -> DeviceCosts | None:
        """The costs measured on this device model with this version of torch, or None."""
        return next((c for c in self._read() if (c.device, c.torch) == (device, torch)), None)

    def put(self, costs: DeviceCosts) -> None:
        """Save, atomically. Other devices, and shares that another process saved, are preserved."""
        with self._file.changed() as sections:
            others = []
            for saved in self._read():
                if (saved.device, saved.torch) == (costs.device, costs.torch):
                    costs = replace(costs, shares={**saved.shares, **costs.shares})
                else:
                    others.append(saved)
            sections["devices"] = [asdict(c) for c in (*others, costs)]

    def _read(self) -> list[DeviceCosts]:
        return self._file.section("devices", "device costs", lambda entries: [*map(_from_json, entries)], [])


def _from_json(data: Mapping[str, Any]) -> DeviceCosts:
    """The costs from the JSON values of `dataclasses.asdict`. Raises: TypeError, ValueError."""
    by_name = {
        field: {key: _points(points) for key, points in data[field].items()}
        for field in ("counting", "shares")
    }
    costs = DeviceCosts(**{**data, "copies": _points(data["copies"]), **by_name})
    named = (points for of_field in by_name.values() for points in of_field.values())
    points = [*costs.copies, *(point for of_name in named for point in of_name)]
    numbers = [costs.launch_ms, *(number for point in points for number in point)]
    if not costs.copies or not all(isinstance(n, int | float) and 0 <= n < float("inf") for n in numbers):
        raise ValueError(f"{costs.device}: times must be finite numbers >= 0")
    return costs


def _points(data: list[list[float]]) -> Points:
    return tuple((float(x), float(y)) for x, y in data)
