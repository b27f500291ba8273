"""Runs a rehearsal: a program that compiles and loads the kernels of launches, for a GPU that is not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.processes import BENCH, ROOT


def rehearse(script: Path, cache: Path, *first_on_path: Path, timeout_s: float = 300) -> dict[str, Any]:
    """What the script prints last, as JSON. cache: an empty folder, so that everything is compiled anew."""
    paths = [*map(str, first_on_path), str(ROOT), str(BENCH), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
