"""Hooks of mkdocs: lay out the package for mkdocstrings."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

ROOT = Path(__file__).parents[2]


# Before mkdocstrings looks for packages.
@event_priority(100)
def on_config(config: Any) -> Any:
    """The package as it is installed, for mkdocstrings: ops/, graph/, schedules/ inside lancet_kernels/."""
    # Copies: mkdocstrings would follow links to where the folders really are.
    package = ROOT / "build" / "api" / "lancet_kernels"
    shutil.rmtree(package, ignore_errors=True)
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "lancet_kernels", package, ignore=skip)
    for name in ("ops", "graph", "schedules"):
        shutil.copytree(ROOT / name, package / name, ignore=skip)
    return config
