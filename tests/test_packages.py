"""The wheel has every folder of the source."""

import sys
from collections.abc import Iterator
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PACKAGE = "lancet_kernels"


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
