"""Programs as JSON, and their fingerprints."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from lancet_kernels.errors import UserError
from lancet_kernels.graph.program.program import Instruction, Kind, Phase, Program, TensorSpec
from lancet_kernels.graph.program.saved_json import versioned_fields

FORMAT = "lancet-program"
VERSION = 1


def program_to_json(program: Program) -> dict[str, Any]:
    """A dict of JSON values; `program_from_json` gives back an equal Program."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": program.name,
        "tensors": [[t.name, list(t.shape), t.dtype, t.bytes, t.alias_of] for t in program.tensors.values()],
        "inputs": list(program.inputs),
        "outputs": list(program.outputs),
        "parameters": list(program.parameters),
        "instructions": [
            {
                "name": i.name,
                "op": i.op,
                "inputs": list(i.inputs),
                "outputs": list(i.outputs),
                "kind": i.kind.value,
                "phase": i.phase.value,
                "flops": i.flops,
                "bytes": i.bytes,
                "milliseconds": i.milliseconds,
                "mutates": list(i.mutates),
                "attributes": dict(i.attributes),
                **({"after": i.after} if i.after else {}),
                **({"microbatches": i.microbatches} if i.microbatches > 1 else {}),
            }
            for i in program.instructions
        ],
    }


def program_from_json(data: dict[str, Any]) -> Program:
    """The Program that `program_to_json` wrote.

    Raises:
        UserError: not a program of this version, or the program it describes is not valid.
    """
    versioned_fields(data, "program", (FORMAT, VERSION), "write it again with program_to_json")
    try:
        tensors = [
            TensorSpec(name, tuple(shape), dtype, size, alias_of)
            for name, shape, dtype, size, alias_of in data["tensors"]
        ]
        instructions = tuple(
            Instruction(**{**i, "kind": Kind(i["kind"]), "phase": Phase(i["phase"])})
            for i in data["instructions"]
        )
        specs = {t.name: t for t in tensors}
        return Program(data["name"], instructions, specs, data["inputs"], data["outputs"], data["parameters"])
    except UserError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            "program JSON", got=repr(error), expected="every field of its version", do="write it again"
        ) from error


def fingerprint(program: Program) -> str:
    """64 hex digits that depend on the structure (names, ops, shapes, order, attributes), never on costs.

    Ranks that captured the same model get the same fingerprint, even if they measured different times.
    """
    structure = program_to_json(program)
    for instruction in structure["instructions"]:
        for cost in ("flops", "bytes", "milliseconds"):
            del instruction[cost]
        instruction.pop("microbatches", None)
    text = json.dumps(structure, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def check_fingerprint(program: Program, expected: str, what: str, participle: str, do: str) -> None:
    """Raise UserError unless the program has the expected fingerprint.

    Args, for the message: what: the object that belongs to a program, "plan for X". participle: the one in
    "the program it was planned for". do: the advice.
    """
    actual = fingerprint(program)
    if actual != expected:
        raise UserError(
            what,
            got=f"program {program.name} ({actual[:12]})",
            expected=f"the program it was {participle} for ({expected[:12]})",
            do=do,
        )
