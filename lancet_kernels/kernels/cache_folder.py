"""Where does this library remember things for this user?"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import sys
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """Where this library remembers things for this user.

    If that cannot be written to, a folder with the same content that goes when this process ends; rank 0
    says so on standard error, once.
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
            print(
                f"lancet: nothing is remembered: {folder} cannot be written to ({error.strerror or error});"
                " set XDG_CACHE_HOME to a folder that can",
                file=sys.stderr,
                flush=True,
            )
    temporary = Path(tempfile.mkdtemp(prefix="lancet-cache-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    with contextlib.suppress(OSError):
        for file in folder.glob("*.json"):
            shutil.copyfile(file, temporary / file.name)
    return temporary
