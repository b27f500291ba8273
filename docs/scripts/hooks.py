"""What mkdocs calls while it builds: pages whose content follows from the code are filled in.

`{{ command_line }}` on a page becomes the options of every command, `{{ support }}` the set-ups with the
tests that prove them, `{{ versions }}` the versions that are tested, `{{ example }}` the first example.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

ROOT = Path(__file__).parents[2]
# mkdocs forgets paths that hooks add; what is imported stays.
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import generate  # noqa: E402

GENERATED: Mapping[str, Callable[[], str]] = {
    "{{ command_line }}": generate.command_line,
    "{{ support }}": generate.support,
    "{{ versions }}": generate.versions,
    "{{ example }}": generate.example,
}


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


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what is generated."""
    for mark, make in GENERATED.items():
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    return markdown
