"""What can be imported, what a type checker sees, and what the reference describes: one list."""

import ast
import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

import lancet_kernels
from tests.processes import ROOT, printed


def imports(nodes: Iterable[ast.stmt]) -> dict[str, str]:
    """Name -> module, of imports from this package."""
    own = (
        n for n in nodes if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("lancet_kernels")
    )
    return {alias.asname or alias.name: str(node.module) for node in own for alias in node.names}


def test_a_type_checker_sees_every_public_name_where_it_is() -> None:
    body = ast.parse(Path(lancet_kernels.__file__).read_text()).body
    (lazy,) = (node for node in body if isinstance(node, ast.If))
    homes = {name: home for home, names in lancet_kernels._HOMES.items() for name in names.split()}
    assert imports(lazy.body) == {name: f"lancet_kernels.{home}" for name, home in homes.items()}
    assert sorted(imports(body) | imports(lazy.body)) == sorted(lancet_kernels.__all__)


def test_every_public_name_is_imported() -> None:
    for name in lancet_kernels.__all__:
        assert getattr(lancet_kernels, name).__name__ == name


def test_the_reference_describes_the_public_names() -> None:
    described = re.findall(r"^::: (.+)\.(\w+)$", (ROOT / "docs/reference/api.md").read_text(), re.MULTILINE)
    assert sorted(name for _, name in described) == sorted(lancet_kernels.__all__)
    for module, name in described:
        assert getattr(import_module(module), name) is getattr(lancet_kernels, name)


def test_importing_it_is_cheap() -> None:
    """Neither torch's tracer, nor what only launchers and kernels need."""
    heavy = ("ortools", "torch._dynamo", "torch._inductor", "triton", "matplotlib", "transformers")
    names = "import sys, lancet_kernels; lancet_kernels.convert"
    code = f"{names}; print([name for name in {heavy} if name in sys.modules])"
    assert printed("-c", code) == "[]\n"
