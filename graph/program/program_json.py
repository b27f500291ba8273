"""Programs as JSON, their fingerprints, and files of what belongs to a Program."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from lancet_kernels.errors import UserError
from lancet_kernels.files import file_errors, write_json_atomically
from lancet_kernels.graph.program.program import Instruction, Kind, Phase, Program, TensorSpec

FORMAT = "lancet-program"
VERSION = 1

Saved = TypeVar("Saved", bound="SavedJson")


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


class SavedJson(ABC):
    """Belongs to one Program, and can be saved to a file.

    Class attributes: KIND, VERSION: of the JSON. AGAIN: what to do for another one: "plan again".
    """

    KIND: ClassVar[str]
    VERSION: ClassVar[int]
    AGAIN: ClassVar[str]

    @abstractmethod
    def fields_to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""

    @classmethod
    @abstractmethod
    def from_fields(cls: type[Saved], fields: dict[str, Any]) -> Saved:
        """The object with the fields that `fields_to_json` gave."""

    @abstractmethod
    def check(self, program: Program) -> None:
        """Raise UserError unless it belongs to this program."""

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values."""
        return {"format": f"lancet-{self.KIND}", "version": self.VERSION, **self.fields_to_json()}

    @classmethod
    def from_json(cls: type[Saved], data: Any) -> Saved:
        """The object that `to_json` wrote. Raises: UserError: not of this kind and version."""
        fields = versioned_fields(data, cls.KIND, (f"lancet-{cls.KIND}", cls.VERSION), cls.AGAIN)
        try:
            return cls.from_fields(fields)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{cls.KIND} JSON", got=repr(error), expected="every field of its version", do=cls.AGAIN
            ) from error

    def save(self, path: str | Path) -> None:
        """Write it as JSON, atomically. Raises: UserError if the file cannot be written."""
        with file_errors(path):
            write_json_atomically(path, self.to_json())

    @classmethod
    def load(cls: type[Saved], path: str | Path, program: Program | None = None) -> Saved:
        """Read it; with `program`, refuse one that belongs to another program.

        Raises: UserError: the file is not readable as this kind of JSON, or belongs to another program.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(
                f"{cls.KIND} file", got=f"{path} ({error})", expected=f"a saved {cls.KIND}", do=cls.AGAIN
            ) from error
        saved = cls.from_json(data)
        if program is not None:
            saved.check(program)
        return saved


def versioned_fields(data: Any, kind: str, version: tuple[str, int], do: str) -> dict[str, Any]:
    """The fields of a JSON object without its format and version. Raises: UserError if these do not match."""
    actual = (data.get("format"), data.get("version")) if isinstance(data, dict) else type(data).__name__
    if actual != version:
        raise UserError(f"{kind} JSON", got=actual, expected=version, do=do)
    return {k: v for k, v in data.items() if k not in ("format", "version")}
