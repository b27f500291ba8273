"""One part of an instruction that is cut into k: its name, shapes, FLOPs and bytes.

This includes the overhead of partitioning: each part has its own launch, and reads operands that are not cut
(a weight) in full. An irregular part has 1/k of the rows (Lancet, section 3), as if tokens were spread
evenly.

Times of the communication of a partition, depending on how its groups of devices spread over nodes.
(PrimePar, slides "Cost Model": an alpha and a beta for each grouping pattern)

Devices fill the nodes of a cluster one after another, so the leading bits of a device's number are its node.
Links inside a node and between nodes have different costs, and simultaneous messages from one node share its
network cards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs.clusters import Cluster, grouped_all_reduce_ms, point_to_point_ms
from lancet_kernels.graph.ops import rule_for
from lancet_kernels.graph.program.forms import (
    CARRIED,
    IRREGULAR,
    PARTIAL,
    WHOLE,
    WINDOW,
    Form,
    Forms,
    any_made_in_parts,
)
from lancet_kernels.graph.program.program import Instruction, Kind, TensorSpec
from lancet_kernels.graph.rules.slices import Partition, moves


def part_name(name: str, part: int) -> str:
    """The name of a part, in Programs and in graphs. Example: `part_name("mm", 0)` is `mm_part0`."""
    return f"{name}_part{part}"


def whole_name(name: str) -> str:
    """The name of the instruction that a part is one of; of any other instruction, its own.

    Example: `whole_name("mm_part0")` is `mm`, and so is `whole_name("mm")`.
    """
    whole, marker, part = name.rpartition("_part")
    return whole if marker and part.isdigit() else name


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


def all_reduce_ms(cluster: Cluster, groups: Sequence[Sequence[int]], size: float) -> float:
    """Milliseconds of simultaneous all-reduces, one per group, of `size` bytes per device.

    Raises: UserError if a group has more devices on one node than on another.
    """
    if not groups:
        return 0.0
    at_once: Counter[int] = Counter()
    local = nodes = 1
    for group in groups:
        of_node = Counter(device // cluster.gpus_per_node for device in group)
        if len(set(of_node.values())) > 1:
            raise UserError(
                "group of an all-reduce",
                got=f"devices {tuple(group)}",
                expected="as many on each node",
                do="use a power of two of GPUs per node",
            )
        local, nodes = max(of_node.values()), len(of_node)
        if nodes > 1:
            at_once.update(of_node.keys())
    return grouped_all_reduce_ms(cluster, size, local, nodes, max(at_once.values(), default=0))


def shift_ms(cluster: Cluster, source_of: Sequence[int], size: float) -> float:
    """Milliseconds of a shift: every device gets `size` bytes from its source; 0 if nothing moves."""
    if not moves(source_of):
        return 0.0
    node = cluster.gpus_per_node
    leaving = Counter(s // node for d, s in enumerate(source_of) if s // node != d // node)
    return point_to_point_ms(cluster, size, max(leaving.values(), default=0))


Boxes = np.ndarray
"""[devices, dimensions, 2]: begin and end of each device's tile, as fractions of the dimension."""


def boxes(partition: Partition, phase: str, dimensions: Sequence[str], t: int) -> Boxes:
    """The tiles of a tensor at one step."""
    slices = np.array([partition.slices(d) for d in dimensions], dtype=float)
    tiles = np.array(partition.tiles(phase, dimensions, t), dtype=float).reshape(-1, len(slices))
    return np.stack([tiles, tiles + 1], axis=-1) / slices[:, None]


def travelling_shares(
    held: np.ndarray, needed: np.ndarray, gpus_per_node: int
) -> tuple[np.ndarray, np.ndarray]:
    """The traffic of redistributions between layouts [layouts, devices, dimensions, 2], for all pairs.

    Every device gets the missing part of its tile, from its own node if a device there holds it (interCost of
    the slides).

    Returns: two arrays [held layouts, needed layouts]: the largest fraction of the tensor that a device gets
        from its own node, and the largest that a node gets from other nodes.
    """
    node = np.arange(held.shape[1]) // gpus_per_node
    same_node = node[:, None] == node[None, :]
    # Replicas of a tile in one node count once, for the first device that holds it.
    alike = (held[:, :, None] == held[:, None, :]).all(axis=(-1, -2)) & same_node
    counted = ~np.tril(alike, -1).any(axis=-1)[:, None, :] & same_node
    inside, outside = np.empty((2, len(held), len(needed)))
    for n, layout in enumerate(needed):
        overlap = 1.0  # [held layouts, needing devices, holding devices]
        for d in range(layout.shape[1]):
            begin = np.maximum(layout[None, :, None, d, 0], held[:, None, :, d, 0])
            end = np.minimum(layout[None, :, None, d, 1], held[:, None, :, d, 1])
            overlap = overlap * np.maximum(end - begin, 0.0)
        in_node = (overlap * counted).sum(axis=-1)
        missing = (layout[..., 1] - layout[..., 0]).prod(axis=-1) - in_node
        inside[:, n] = (in_node - np.diagonal(overlap, axis1=1, axis2=2)).max(axis=-1)
        outside[:, n] = np.max([missing[:, node == one].sum(axis=-1) for one in np.unique(node)], axis=0)
    return inside, outside


def redistributions_ms(cluster: Cluster, inside: np.ndarray, outside: np.ndarray, size: float) -> np.ndarray:
    """Milliseconds for a tensor of `size` bytes; the slower link counts.

    Example: 8 GPUs of one p3dn node hold rows of a tensor of 64 MB and need columns: each gets 7/8 of 8 MB
    over 104 GB/s, 0.07 ms, plus 0.02 ms of latency.
    Args: inside, outside: from `travelling_shares`.
    """
    link = cluster.link_efficiency * 1e9
    inside_ms = inside * size / (cluster.intra_node_gb_per_s * link) * 1e3
    outside_ms = outside * size / (cluster.inter_node_gb_per_s * link) * 1e3
    latency = np.where(outside > 0, cluster.inter_node_latency_us, cluster.intra_node_latency_us) * 1e-3
    travels = (inside > 0) | (outside > 0)
    return np.where(travels, latency + np.maximum(inside_ms, outside_ms), 0.0)
