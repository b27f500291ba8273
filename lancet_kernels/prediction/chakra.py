"""A simulated step as a Chakra execution trace (MLCommons), which ASTRA-sim and others read.

`PREFIX.0.et` has a `GlobalMetadata` and then one `Node` for each instruction, each behind its length as a
varint (`schema/protobuf/et_def.proto`). All ranks are alike: the file of rank 0 serves for every rank. Times
are whole microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lancet_kernels.graph.costs.costs import collective_of
from lancet_kernels.graph.program.program import Instruction, Kind
from lancet_kernels.prediction.answer import Simulated

VERSION = "0.0.4"
COMPUTE_NODE, COLLECTIVE_NODE = 4, 7
COLLECTIVES = {"all_reduce": 0, "all_gather": 2, "all_to_all": 6, "reduce_scatter": 7}
"""Numbers of `CollectiveCommType`."""
_VARINT, _LENGTH = 0, 2


def save_chakra(simulated: Simulated, prefix: str | Path) -> Path:
    """Write the trace of rank 0. -> its path."""
    path = Path(f"{prefix}.0.et")
    path.write_bytes(b"".join(_delimited(message) for message in chakra(simulated)))
    return path


def chakra(simulated: Simulated) -> Iterator[bytes]:
    """The messages of the trace, metadata first. Ids are positions in the Program, counted from 1."""
    yield _text(1, VERSION)
    program, times, ms = simulated.step.program, simulated.times, simulated.ms
    before = None
    for i in simulated.order.positions:
        instruction = program.instructions[i]
        is_compute = instruction.kind is Kind.COMPUTE
        node = [_number(1, i + 1), _text(2, instruction.name)]
        node.append(_number(3, COMPUTE_NODE if is_compute else COLLECTIVE_NODE))
        if is_compute and before is not None:
            node.append(_number(4, before + 1))
        node += [_number(5, j + 1) for j in program.dependencies[i]]
        node += [_number(6, round(times.start[i] * 1e3)), _number(7, round(ms[i] * 1e3))]
        node += _attributes(instruction)
        before = i if is_compute else before
        yield b"".join(node)


def _attributes(instruction: Instruction) -> list[bytes]:
    """The attributes that ASTRA-sim reads: of computation FLOPs and bytes, of messages kind, bytes, group."""
    size, values = int(instruction.bytes), {"is_cpu_op": _number(27, 0)}
    if instruction.kind is Kind.COMPUTE:
        values |= {"num_ops": _number(9, int(instruction.flops)), "tensor_size": _number(13, size)}
    else:
        values["comm_type"] = _number(9, COLLECTIVES[collective_of(instruction)])
        values["comm_size"] = _number(9, size)
        values["pg_name"] = _text(29, instruction.attributes.get("group", "expert"))
    return [_bytes(10, _text(1, name) + value) for name, value in values.items()]


def _varint(value: int) -> bytes:
    """Seven bits in each byte, the lowest first; the highest bit says that more follow."""
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | _LENGTH) + _delimited(value)


def _text(field: int, value: str) -> bytes:
    return _bytes(field, value.encode())


def _delimited(message: bytes) -> bytes:
    return _varint(len(message)) + message
