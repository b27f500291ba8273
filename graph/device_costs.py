"""What does a device take for what a plan adds to a step: joining parts, a launch, a part of an op?

Measured once per device model (`graph.measure_device`) and kept in a JSON file beside the measured times,
in which every entry names its source: device model, torch version, "measured".
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from lancet_kernels.atomic import locked, write_json_atomically
from lancet_kernels.graph.communication import Points, interpolated
from lancet_kernels.graph.measured import measurement_key
from lancet_kernels.graph.program import Instruction, TensorSpec

FORMAT = "lancet-device-costs"
VERSION = 1


@dataclass(frozen=True)
class DeviceCosts:
    """Of one device model with one version of torch.

    launch_ms: what even an op on one element takes.
    copies: (bytes read and written, milliseconds) of joining two tensors, sorted by bytes.
    shares: by `part_key`, what a part takes of the time of the whole op.
    """

    device: str
    torch: str
    launch_ms: float
    copies: Points
    shares: Mapping[str, float] = field(default_factory=dict)
    source: str = "measured"

    def __str__(self) -> str:
        return f"{self.source} on {self.device}, torch {self.torch}"

    def copy_ms(self, bytes: float) -> float:
        """Milliseconds to join parts, with so many bytes read and written; nothing takes nothing."""
        return interpolated(self.copies, bytes) if bytes > 0 else 0.0

    def part_ms(self, part: Instruction, tensors: Mapping[str, TensorSpec], whole_ms: float) -> float | None:
        """Milliseconds of a part of an op that takes `whole_ms` as a whole; None if it was not measured."""
        share = self.shares.get(part_key(part, tensors))
        return None if share is None else share * whole_ms


def part_key(part: Instruction, tensors: Mapping[str, TensorSpec]) -> str:
    """Op, shapes of the part, how it is cut, and into how many parts: the same for all parts of an op.

    Args: part: an instruction of `graph.cut.part_instruction`. tensors: with the specs of its operands.
    """
    attributes = ", ".join(
        f"{name}={value}"
        for name, value in sorted(part.attributes.items())
        if name not in ("part", "whole_milliseconds")
    )
    return f"{measurement_key(part, tensors, 'the device')} [{attributes}]"


class DeviceCostsFile:
    """The measured devices in a file. One that is corrupt or foreign counts as empty, with one warning."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def get(self, device: str, torch: str) -> DeviceCosts | None:
        """What was measured on this device model with this torch."""
        return next((c for c in self._read() if (c.device, c.torch) == (device, torch)), None)

    def put(self, costs: DeviceCosts) -> None:
        """Write atomically; other devices, and shares that another process saved, are kept."""
        with locked(self.path):
            others = []
            for saved in self._read():
                if (saved.device, saved.torch) == (costs.device, costs.torch):
                    costs = replace(costs, shares={**saved.shares, **costs.shares})
                else:
                    others.append(saved)
            devices = [asdict(c) for c in (*others, costs)]
            write_json_atomically(self.path, {"format": FORMAT, "version": VERSION, "devices": devices})

    def _read(self) -> list[DeviceCosts]:
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            if (data["format"], data["version"]) != (FORMAT, VERSION):
                raise ValueError(f"format {data['format']}, version {data['version']}")
            return [device_costs_from_json(entry) for entry in data["devices"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            warnings.warn(
                f"device costs in {self.path} are not readable ({error}); they will be measured again",
                stacklevel=3,
            )
            return []


def device_costs_from_json(data: Mapping[str, object]) -> DeviceCosts:
    """The costs of which `dataclasses.asdict` gave these JSON values. Raises: TypeError, ValueError."""
    costs = DeviceCosts(**{**data, "copies": tuple((float(b), float(ms)) for b, ms in data["copies"])})
    numbers = [costs.launch_ms, *costs.shares.values(), *(n for point in costs.copies for n in point)]
    if not costs.copies or not all(isinstance(n, int | float) and 0 <= n < float("inf") for n in numbers):
        raise ValueError(f"{costs.device}: numbers that are no times")
    return costs
