"""Files that are replaced as a whole: a process that dies while writing leaves the old file intact."""

import contextlib
import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

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
