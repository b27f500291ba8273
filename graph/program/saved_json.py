"""Writes and reads JSON with a format and a version: what belongs to a Program."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from lancet_kernels.atomic import file_errors, write_json_atomically
from lancet_kernels.errors import UserError
from lancet_kernels.graph.program.program import Program

Saved = TypeVar("Saved", bound="SavedJson")


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
        except (OSError, ValueError) as error:
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
