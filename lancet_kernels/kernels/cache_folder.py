"""The user's cache folder, for measured times and tuned configurations."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import shutil
import tempfile
from pathlib import Path

_log = logging.getLogger(__name__)


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
