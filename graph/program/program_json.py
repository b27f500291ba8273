"""Fingerprints of Programs, and JSON files of what belongs to a Program."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from lancet_kernels.errors import UserError
from lancet_kernels.files import file_errors, write_json_atomically
from lancet_kernels.graph.program.program import Program

Saved = TypeVar("Saved", bound="SavedJson")


def fingerprint(program: Program) -> str:
    """64 hex digits that depend on the structure (names, ops, shapes, order, attributes), never on costs.

    Ranks that captured the same model get the same fingerprint, even if they measured different times.
    """
    structure = {
        "format": "lancet-program",
        "version": 1,
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
                "mutates": list(i.mutates),
                "attributes": {k: v for k, v in i.attributes.items() if k != "link"},
                **({"after": i.after} if i.after else {}),
            }
            for i in program.instructions
        ],
    }
    text = json.dumps(structure, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class SavedJson(ABC):
    """Belongs to one Program, and can be saved to a file.

    Class attributes, also for messages: KIND, VERSION: of the JSON. AGAIN: what to do for another one: "plan
    again". WHAT, MADE: "plan for" a program, for which it was "made".
    """

    KIND: ClassVar[str]
    VERSION: ClassVar[int]
    AGAIN: ClassVar[str]
    WHAT: ClassVar[str]
    MADE: ClassVar[str]
    program: str
    program_fingerprint: str

    @abstractmethod
    def fields_to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""

    @classmethod
    @abstractmethod
    def from_fields(cls: type[Saved], fields: dict[str, Any]) -> Saved:
        """The object with the fields that `fields_to_json` gave."""

    def check(self, program: Program) -> None:
        """Raise UserError unless it belongs to this program."""
        actual, expected = fingerprint(program), self.program_fingerprint
        if actual != expected:
            raise UserError(
                f"{self.WHAT} {self.program}",
                got=f"program {program.name} ({actual[:12]})",
                expected=f"the program it was {self.MADE} for ({expected[:12]})",
                do=self.AGAIN,
            )

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values."""
        return {"format": f"lancet-{self.KIND}", "version": self.VERSION, **self.fields_to_json()}

    @classmethod
    def from_json(cls: type[Saved], data: Any) -> Saved:
        """The object that `to_json` wrote. Raises: UserError: not of this kind and version."""
        actual = (data.get("format"), data.get("version")) if isinstance(data, dict) else type(data).__name__
        if actual != (expected := (f"lancet-{cls.KIND}", cls.VERSION)):
            raise UserError(f"{cls.KIND} JSON", got=actual, expected=expected, do=cls.AGAIN)
        try:
            return cls.from_fields({k: v for k, v in data.items() if k not in ("format", "version")})
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
