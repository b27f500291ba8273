"""The wheel has every folder of the source."""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


def test_a_wheel_has_every_folder() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    tops = ("lancet_kernels", "ops", "graph", "schedules")
    inits = [init for top in tops for init in (ROOT / top).rglob("__init__.py")]
    folders = {str(init.parent.relative_to(ROOT)).replace("/", ".") for init in inits}
    mapped = {f"lancet_kernels.{folder}" for folder in folders if not folder.startswith("lancet_kernels")}
    assert set(setuptools["package-dir"]) == mapped | {"lancet_kernels"}
    installed = mapped | {folder for folder in folders if folder.startswith("lancet_kernels")}
    assert sorted(setuptools["packages"]) == sorted(installed)
