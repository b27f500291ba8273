"""One part of an instruction that is cut into k: its name, shapes, FLOPs and bytes.

Each part has its own launch, and reads operands that are not cut (a weight) in full. An irregular part has
1/k of the rows (Lancet, section 3), as if tokens were spread evenly.

Device costs of partitioning (joining parts, a kernel launch, one part of an op) are measured once per device
model (`graph.costs.measure_device`), and stored in a JSON file beside the measured times.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lancet_kernels.files import CacheFile
from lancet_kernels.graph.costs.clusters import Points, interpolated
from lancet_kernels.graph.ops import rule_for
from lancet_kernels.graph.program import Instruction, Kind, TensorSpec
from lancet_kernels.graph.rules.rules import (
    CARRIED,
    IRREGULAR,
    PARTIAL,
    WHOLE,
    WINDOW,
    Form,
    Forms,
    any_made_in_parts,
)

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


_PART_ATTRIBUTES = ("part", "parts", "forms", "whole_shapes", "whole_milliseconds")


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
    own = {k: v for k, v in part.attributes.items() if k not in _PART_ATTRIBUTES}
    attributes = ", ".join(f"{k}={v}" for k, v in sorted(own.items()))
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


def part_name(name: str, part: int) -> str:
    """The name of a part, in Programs and in graphs. Example: `part_name("mm", 0)` is `mm_part0`."""
    return f"{name}_part{part}"


def is_cut(instruction: Instruction, forms: Forms) -> bool:
    """Does the instruction run part by part? An instruction with whole results runs once, on whole
    operands."""
    return any_made_in_parts(forms, instruction.outputs)


def reads_whole(instruction: Instruction, tensor: str, forms: Forms) -> bool:
    """Does the instruction read all of a tensor that is computed part by part? A partial tensor is only read
    as the complete sum."""
    form = forms.get(tensor, WHOLE)
    return form == PARTIAL or (form.is_made_in_parts and not is_cut(instruction, forms))


def part_tensor(
    spec: TensorSpec, form: Form, part: int, parts: int, row_dimension: int | None = None
) -> TensorSpec:
    """One part of a tensor. Example: x (8, 4) cut along 0 into 2: `x_part0` (4, 4), half the bytes."""
    name = part_name(spec.name, part)
    dimension = row_dimension if form in (IRREGULAR, WINDOW) else form.dimension
    if dimension is None:
        return replace(spec, name=name)
    shape = list(spec.shape)
    shape[dimension] = -(-shape[dimension] // parts)
    return replace(spec, name=name, shape=tuple(shape), bytes=-(-spec.bytes // parts))


def can_be_cut(tensors: Mapping[str, TensorSpec], forms: Forms, parts: int) -> bool:
    """Do the parts of all tensors cover the same part of the batch? Parts are multiples of a unit of the
    shortest dimension that is cut, so its size must divide the others. Parts of equal size work with views,
    too; uneven ones only if all tensors have the same size along the dimensions that are cut. Windows of
    slots fit any number of rows."""
    sizes = {tensors[t].shape[form.dimension] for t, form in forms.items() if form.dimension is not None}
    if not sizes:
        return True
    units = min(sizes)
    if units < parts or any(s % units for s in sizes):
        return False
    return units % parts == 0 or len(sizes) == 1


def part_instruction(
    instruction: Instruction, tensors: Mapping[str, TensorSpec], forms: Forms, part: int, parts: int
) -> tuple[Instruction, dict[str, TensorSpec]]:
    """Part `part` (from 0) of an instruction, and the specs of its operands.

    Attributes from which cost models derive the time of the part: the `forms` of inputs and outputs, their
    shapes in the uncut instruction (`whole_shapes`), and its measured time (`whole_milliseconds`).
    """
    rule = rule_for(instruction)
    rows = rule.row_dimensions(instruction, tensors) if rule else {}
    operands = {
        t: WHOLE if forms.get(t) == PARTIAL else forms.get(t, WHOLE).of_reader for t in instruction.inputs
    }
    operands |= {t: forms.get(t, WHOLE) for t in instruction.outputs}
    specs = {
        t: tensors[t] if form == WHOLE else part_tensor(tensors[t], form, part, parts, rows.get(t))
        for t, form in operands.items()
    }
    names = {t: spec.name for t, spec in specs.items()}
    inputs = [names[t] for t in instruction.inputs]
    for source, target in rule.carried(instruction, tensors) if rule else ():
        if part and operands[instruction.outputs[target]] == CARRIED:
            inputs[source] = part_name(instruction.outputs[target], part - 1)
            specs[f"{instruction.inputs[source]} carried"] = part_tensor(
                tensors[instruction.outputs[target]], CARRIED, part - 1, parts
            )
    attributes = {
        **instruction.attributes,
        "part": part,
        "parts": parts,
        "forms": [str(operands[t]) for t in (*instruction.inputs, *instruction.outputs)],
        "whole_shapes": [tensors[t].shape for t in (*instruction.inputs, *instruction.outputs)],
    }
    if instruction.milliseconds is not None:
        attributes["whole_milliseconds"] = instruction.milliseconds
    result = replace(
        instruction,
        name=part_name(instruction.name, part),
        inputs=tuple(inputs),
        outputs=tuple(names[t] for t in instruction.outputs),
        flops=instruction.flops / parts,
        bytes=_part_bytes(instruction, tensors, specs, parts),
        milliseconds=None,
        attributes=attributes,
    )
    return result, {spec.name: spec for spec in specs.values()}


def _part_bytes(
    instruction: Instruction,
    tensors: Mapping[str, TensorSpec],
    specs: Mapping[str, TensorSpec],
    parts: int,
) -> float:
    """Bytes read and written by a part, proportional to the sizes of its operands; whole ones count in
    full."""
    operands = (*instruction.inputs, *instruction.outputs)
    whole = sum(tensors[t].content_bytes for t in operands)
    if instruction.kind is not Kind.COMPUTE or not whole:
        return instruction.bytes / parts
    return instruction.bytes * sum(specs[t].content_bytes for t in operands) / whole


def reassembly(spec: TensorSpec, form: Form, parts: int) -> tuple[float, float]:
    """(FLOPs, bytes) of reassembling a tensor: joining slices, merging rows, or adding summands."""
    if form == CARRIED:
        return 0.0, 0.0
    if form == PARTIAL:
        count = spec.content_bytes
        return float(parts * count), float((parts + 1) * count)
    return 0.0, 2.0 * spec.content_bytes
