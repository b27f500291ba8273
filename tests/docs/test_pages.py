"""The documentation: its Python runs, its commands parse, its links lead somewhere, and it builds."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lancet_kernels.__main__ import _parser
from lancet_kernels.graph.costs.clusters import Attention, Cluster, Dispatcher, Kernels
from lancet_kernels.graph.ops import OPS
from lancet_kernels.ops.comm.link import emulate_link
from lancet_kernels.ops.moe.gates import GATES
from tests.processes import ROOT, printed

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Others wait for optimize(), which measures, or for transformers.
QUICK = (
    "capacity.md capacity-passing.md add-a-gate.md add-a-partition-rule.md "
    "plan-without-a-cluster.md square-linear.md"
).split()
BLOCK = re.compile(r"^(<!-- not run: .* -->\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def blocks(page: Path, language: str) -> list[tuple[bool, str]]:
    """(is run, text) of the page's code in a language."""
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [(not skipped, text) for skipped, name, text in found if name == language]


WITH_PYTHON = [
    pytest.param(page, id=page.name, marks=() if page.name in QUICK else pytest.mark.long)
    for page in PAGES
    if any(run for run, _ in blocks(page, "python"))
]


@pytest.fixture
def no_job_is_left() -> Iterator[None]:
    """A page may let this process stand for several ranks, on one core."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    emulate_link(None)
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("no_job_is_left")
@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page in a row, in an empty folder."""
    if "transformers" in page.read_text():
        pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.chdir(tmp_path)
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # dataclasses look for it
    # Pages add gates and rules.
    with mock.patch.dict(GATES), mock.patch.dict(OPS), contextlib.redirect_stdout(io.StringIO()):
        for run, text in blocks(page, "python"):
            if run:
                exec(compile(text, str(page), "exec"), vars(module))


def commands() -> list[tuple[str, str]]:
    """(page, command line) of every `lancet` in a shell block."""
    found = []
    for page in PAGES:
        for _, text in blocks(page, "bash"):
            lines = (line.split("  #")[0].strip() for line in text.replace("\\\n", " ").splitlines())
            found += [(page.name, line) for line in lines if re.match(r"(\.venv/bin/)?lancet\b", line)]
    return found


def test_commands_parse() -> None:
    assert len(commands()) > 20
    for page, line in commands():
        try:
            _parser().parse_args(shlex.split(line)[1:])
        except SystemExit as stop:
            raise AssertionError(f"{page}: {line}") from stop


def test_files_and_links_exist() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target in LINK.findall(text):
            if not target.startswith(("http://", "https://")):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
        for name in re.findall(r"`((?:examples|tests|bench|docs|graph|ops|lancet_kernels)/[\w./-]+)`", text):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_every_environment_variable_is_in_the_reference() -> None:
    text = (ROOT / "docs/reference/environment-variables.md").read_text()
    for folder in ("lancet_kernels", "ops", "graph", "schedules"):
        for source in (ROOT / folder).rglob("*.py"):
            for name in re.findall(r'"(LANCET_[A-Z_]+[A-Z])"', source.read_text()):
                assert f"`{name}`" in text, f"{name} in {source.name}"


def test_generated_parts_are_up_to_date() -> None:
    """In the files, because a page is also read without a site."""
    generate = runpy.run_path(str(ROOT / "docs/scripts/generate.py"))
    parts = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        parts.update(re.findall(r"<!-- generated: (\w+) -->", text))
        assert "{{" not in text, f"{page.name}: a shell that only the site fills"
        assert generate["filled"](text) == text, f"{page.name}: call python docs/scripts/generate.py"
    assert parts == set(generate["PARTS"])


def test_every_key_of_a_cluster_file_is_in_the_reference() -> None:
    text = (ROOT / "docs/reference/cluster-files.md").read_text()
    named = set(re.findall(r"`\[?(\w+)[.\]`]", text))
    for described in (Cluster, Kernels, Dispatcher, Attention):
        missing = {field.name for field in fields(described)} - named
        assert not missing, missing


@pytest.mark.long
def test_it_builds_without_warnings(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed")
    printed("-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site")
    support = (tmp_path / "site/reference/support.html").read_text()
    assert "<code>fully_sharded_after</code>" in support
    options = (tmp_path / "site/reference/command-line.html").read_text()
    assert "<code>--checkpoint-every</code>" in options
