"""Files that are replaced atomically, and the user's cache: its folder, and files of measurements that
processes share. Unreadable content of these is ignored, and written anew.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import json
import logging
import math
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lancet_kernels.errors import UserError


def write_text_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Replace the file at `path` by one that holds `text` (UTF-8), on disk before this returns.

    The text goes to a temporary file in the same folder, is synced, and takes the name `path` in one step.
    A reader sees all of the old text or all of the new; a crash of the machine loses neither.
    Raises OSError if the folder is missing or full; then the old file is untouched.
    """
    path = Path(path)
    # The process id keeps two processes apart; a name that starts with a dot is no run and no metric.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # The name, too: without this a rename may be forgotten when the machine crashes.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json_atomically(path: str | os.PathLike[str], data: object) -> None:
    """Replace the file at `path` by `data` as indented JSON; see `write_text_atomically` and `json_text`."""
    write_text_atomically(path, json_text(data, indent=2) + "\n")


@contextlib.contextmanager
def locked(path: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the lock of the file at `path`, and wait for it. It is freed when the process dies.

    For reading, changing and replacing a file. The lock is a file beside it, because the file itself is
    replaced. Systems without such locks (not POSIX) do not lock.
    Raises UserError if the file cannot be written, by the lock or in the block.
    """
    path = Path(path)
    with file_errors(path), contextlib.ExitStack() as stack:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(ImportError):
            import fcntl

            file = stack.enter_context(path.with_name(f".{path.name}.lock").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def file_errors(
    path: str | os.PathLike[str], kinds: tuple[type[Exception], ...] = (OSError,)
) -> Iterator[None]:
    """An error of these kinds in the block becomes a UserError: the file cannot be written."""
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        raise UserError(
            "file to write",
            got=f"{path} ({getattr(error, 'strerror', None) or error})",
            expected="a file that can be written",
            do="name another file, or check the permissions",
        ) from error


def json_text(data: object, *, indent: int | None = None) -> str:
    """`data` as strict JSON. NaN and infinities, which JSON cannot express, become null.

    Raises TypeError for what JSON cannot hold, tensors included.
    """
    return json.dumps(_without_non_finite(data), indent=indent, allow_nan=False)


def _without_non_finite(data: object) -> object:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Mapping):
        return {key: _without_non_finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_without_non_finite(value) for value in data]
    return data


Content = TypeVar("Content")
_log = logging.getLogger(__name__)
_WRONG = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors of reading a file, or of content with unexpected types."""


class CacheFile:
    """A JSON object in a file: its format, its version, and sections. Args: consequence: of unreadable
    content, for the warning."""

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
    """The user's cache folder; if it is not writable, a temporary copy that is removed with this process, and
    a warning of rank 0, once."""
    base = os.environ.get("XDG_CACHE_HOME")
    return _writable(Path(base or os.path.expanduser("~/.cache")) / "lancet_kernels")


_ROOM = 1 << 16
"""Bytes that the cache folder must have room for: files of measured times have some ten thousand."""


@functools.cache
def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # By a file, because permissions do not tell everything, least of all for root; with content, because
        # the disk may be full.
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_ROOM))
            probe.flush()
            os.fsync(probe.fileno())
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
