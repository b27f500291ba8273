"""The user's cache: its folder, and files of measurements that processes share. What cannot be read in one is
ignored, and written anew.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from lancet_kernels.atomic import locked, write_json_atomically

Content = TypeVar("Content")
_log = logging.getLogger(__name__)
_WRONG = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading a file, or content of other types than expected, can raise."""


class CacheFile:
    """A JSON object in a file: its format, its version, and sections. Args: consequence: of what cannot be
    read, for the warning."""

    def __init__(
        self, path: str | Path, format: str, version: int, consequence: str = "they are ignored"
    ) -> None:
        self.path = Path(path)
        self._version = {"format": format, "version": version}
        self._consequence = consequence
        self._warned: set[str] = set()

    def section(self, name: str, what: str, parse: Callable[[Any], Content], empty: Content) -> Content:
        """`parse` of a section; `empty`, with one warning, if the file cannot be read or `parse` raises.

        Args: what: the content, for the warning.
        """
        try:
            sections = self._sections()
            return parse(sections[name]) if name in sections else empty
        except FileNotFoundError:
            return empty
        except _WRONG as error:
            self._warn(f"{what} in {self.path} are not readable ({error}); {self._consequence}")
            return empty

    def records(self, name: str, what: str, parse: Callable[[Any], Content]) -> dict[str, Content]:
        """The valid records of a section by their `key`; a warning for each other one.

        Args: what: one of them, for the warning.
        """
        valid: dict[str, Content] = {}
        raw_records: dict[str, Any] = self.section(name, f"{what}s", dict, {})
        for key, raw in raw_records.items():
            try:
                record: Any = parse(raw)
                if record.key != key:
                    raise ValueError(f"its content is {record.key}")
                valid[key] = record
            except _WRONG as error:
                self._warn(f"{what} {key!r} in {self.path} is ignored: {error}")
        return valid

    @contextlib.contextmanager
    def changed(self) -> Iterator[dict[str, Any]]:
        """The sections, unchecked, to be changed in the block while no other process changes the file.

        Written atomically: readers see the old file or the new one. Raises: UserError if that cannot be.
        """
        with locked(self.path):
            try:
                sections = self._sections()
            except _WRONG:
                sections = {}
            yield sections
            write_json_atomically(self.path, {**self._version, **sections})

    def _sections(self) -> dict[str, Any]:
        data = json.loads(self.path.read_text(encoding="utf-8"))
        version = {name: data.pop(name) for name in self._version}
        if version != self._version:
            raise ValueError(f"format {version['format']}, version {version['version']}")
        return data

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=4)


def cache_folder() -> Path:
    """Where this library remembers things for this user.

    If that cannot be written to, a folder with the same content that goes when this process ends; rank 0
    logs a warning, once.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return _writable(Path(base or os.path.expanduser("~/.cache")) / "lancet_kernels")


@functools.cache
def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A file, not the permissions: these do not tell of everything, least of all root.
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        if os.environ.get("RANK", "0") == "0":
            _log.warning(
                "nothing is remembered: %s cannot be written to (%s); set XDG_CACHE_HOME to another folder",
                folder,
                error.strerror or error,
            )
    temporary = Path(tempfile.mkdtemp(prefix="lancet-cache-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    with contextlib.suppress(OSError):
        for file in folder.glob("*.json"):
            shutil.copyfile(file, temporary / file.name)
    return temporary
