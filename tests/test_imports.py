"""Imports go one way only: symmetric <- kernels <- ops <- graph <- schedules <- the rest (shared design). No
modules import each other in a circle.

Read from the sources, so that an import inside a function, which no test may ever run, counts as well.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PACKAGE = "lancet_kernels"
ORDER = ["symmetric", "kernels", "ops", "graph", "schedules"]
TOP = len(ORDER)
# Anyone may import these; they themselves only what stands before them.
LEAVES = [f"{PACKAGE}.errors", f"{PACKAGE}.atomic", f"{PACKAGE}.cache_file"]


def sources(root: Path) -> Iterator[tuple[str, bool, Path]]:
    """(module, is it a package, file) of everything that is installed; the mapped folders included."""
    folders = [(root / PACKAGE, PACKAGE)]
    folders += [(root / part, f"{PACKAGE}.{part}") for part in ("ops", "graph", "schedules")]
    for folder, prefix in folders:
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            package = parts[-1] == "__init__"
            yield ".".join([prefix, *(parts[:-1] if package else parts)]), package, file


def test_a_wheel_has_every_folder() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {module for module, is_package, _ in sources(ROOT) if is_package}
    assert sorted(setuptools["packages"]) == sorted(folders)
    mapped = {name for name in folders if name.split(".")[1:2] in (["ops"], ["graph"], ["schedules"])}
    assert set(setuptools["package-dir"]) == mapped | {PACKAGE}


def level(module: str) -> int:
    """Place in ORDER; what is in none of the folders stands above them all."""
    parts = module.split(".")
    return ORDER.index(parts[1]) if len(parts) > 1 and parts[1] in ORDER else TOP


@cache
def parsed(text: str) -> tuple[ast.AST, ...]:
    """All nodes of a source."""
    return tuple(ast.walk(ast.parse(text)))


def imported(module: str, is_package: bool, text: str, known: set[str]) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of this package, wherever it stands."""
    for node in parsed(text):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join(package[: len(package) - node.level + 1] + ([base] if base else []))
            # `from lancet_kernels import ops` imports the module ops, `... import MoELayer` the package.
            names = [f"{base}.{a.name}" if f"{base}.{a.name}" in known else base for a in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = (
                node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            )
            if function in ("import_module", "__import__"):
                names = [str(node.args[0].value)]
        for name in names:
            if name == PACKAGE or name.startswith(PACKAGE + "."):
                yield node.lineno, name


def violations(root: Path) -> list[str]:
    """One line per import that goes the wrong way."""
    found = list(sources(root))
    # The folders are known even where one is still missing: its first module will be in it.
    known = {module for module, _, _ in found} | {f"{PACKAGE}.{part}" for part in ORDER}
    wrong = []
    for module, is_package, file in found:
        leaves = LEAVES[: LEAVES.index(module)] if module in LEAVES else LEAVES
        for line, name in imported(module, is_package, file.read_text(encoding="utf-8"), known):
            if name not in leaves and (module in LEAVES or level(name) > level(module)):
                wrong.append(f"{file.relative_to(root)}:{line}: {module} imports {name}")
    return wrong


def circle(root: Path) -> list[str]:
    """Modules of which each imports the next, the last one being the first again; empty if there are none."""
    modules = list(sources(root))
    known = {module for module, _, _ in modules}
    importers: dict[str, set[str]] = {module: set() for module in known}
    for module, is_package, file in modules:
        for _, name in imported(module, is_package, file.read_text(encoding="utf-8"), known):
            if name in known - {module}:
                importers[name].add(module)
    try:
        TopologicalSorter(importers).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_imports_go_one_way() -> None:
    assert not violations(ROOT), "\n".join(violations(ROOT))


def test_no_circles() -> None:
    assert not circle(ROOT), " -> ".join(circle(ROOT))


def test_every_source_is_looked_at() -> None:
    modules = {module for module, _, _ in sources(ROOT)}
    assert {PACKAGE, f"{PACKAGE}.layer", f"{PACKAGE}.ops", f"{PACKAGE}.ops.moe.gates.slots"} <= modules
    assert modules >= set(LEAVES)


GOOD = {
    "lancet_kernels/__init__.py": "from lancet_kernels.layer import Layer",
    "lancet_kernels/layer.py": "from lancet_kernels import ops\nimport lancet_kernels.schedules.plan",
    "lancet_kernels/errors.py": "import os",
    "lancet_kernels/atomic.py": "from lancet_kernels.errors import UserError",
    "lancet_kernels/symmetric/__init__.py": "from lancet_kernels.errors import UserError",
    "lancet_kernels/kernels/__init__.py": "from ..symmetric import heap\nfrom .. import errors",
    "ops/__init__.py": "from . import gates\nfrom .gates import x\nfrom lancet_kernels.kernels import k",
    "ops/gates/__init__.py": "from .. import dispatch\nimport torch",
    "ops/dispatch.py": "",
    "graph/__init__.py": "from lancet_kernels.ops import gates",
    "schedules/plan.py": "import lancet_kernels.graph.program as p",
}

BAD = [
    ("ops/x.py", "from lancet_kernels.graph import program", "ops.x imports lancet_kernels.graph"),
    ("ops/x.py", "import lancet_kernels", "ops.x imports lancet_kernels"),
    ("ops/x.py", "from lancet_kernels import MoELayer", "ops.x imports lancet_kernels"),
    ("ops/x.py", "from lancet_kernels import layer", "ops.x imports lancet_kernels.layer"),
    ("ops/x.py", "from .. import layer", "ops.x imports lancet_kernels.layer"),
    ("ops/gates/x.py", "from ...schedules import plan", "gates.x imports lancet_kernels.schedules.plan"),
    ("ops/gates/__init__.py", "from ... import graph", "ops.gates imports lancet_kernels.graph"),
    ("ops/x.py", "def f():\n    from lancet_kernels.layer import Layer", "x.py:2: lancet_kernels.ops.x"),
    ("ops/x.py", "if TYPE_CHECKING:\n    import lancet_kernels.graph", "imports lancet_kernels.graph"),
    ("ops/x.py", "import_module('lancet_kernels.layer')", "ops.x imports lancet_kernels.layer"),
    ("ops/x.py", "importlib.import_module('lancet_kernels.graph')", "imports lancet_kernels.graph"),
    ("schedules/x.py", "from lancet_kernels.layer import Layer", "schedules.x imports"),
    ("lancet_kernels/symmetric/x.py", "from ..kernels import device", "symmetric.x imports"),
    ("lancet_kernels/errors.py", "from lancet_kernels.atomic import locked", "errors imports"),
]


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_a_made_up_good_tree_passes(tmp_path: Path) -> None:
    write_tree(tmp_path, GOOD)
    assert violations(tmp_path) == []


@pytest.mark.parametrize(("file", "text", "message"), BAD)
def test_a_made_up_violation_is_found(tmp_path: Path, file: str, text: str, message: str) -> None:
    write_tree(tmp_path, GOOD | {file: text})
    (wrong,) = violations(tmp_path)
    assert message in wrong
    assert wrong.startswith(file + ":")


IMPORT_Y = "def f():\n    from lancet_kernels.ops.y import g"


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({"ops/x.py": "import lancet_kernels.ops.y", "ops/y.py": "from . import x"}, "xy"),
        ({"ops/x.py": IMPORT_Y, "ops/y.py": "from .z import h", "ops/z.py": "from .x import f"}, "xyz"),
        ({"ops/x.py": IMPORT_Y, "ops/y.py": "from .z import h", "ops/z.py": "import torch"}, ""),
    ],
)
def test_a_made_up_circle_is_found(tmp_path: Path, files: dict[str, str], names: str) -> None:
    write_tree(tmp_path, GOOD | files)
    found = circle(tmp_path)
    assert sorted(found[1:]) == [f"{PACKAGE}.ops.{name}" for name in names]
    assert found[:1] == found[-1:]
    if len(names) == 3:
        # Each imports the next: x y, y z, z x.
        assert all((a[-1] + b[-1]) in "xyzx" for a, b in pairwise(found))
