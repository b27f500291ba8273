"""Docstrings are whole sentences: no line of a word or two inside one, and none begins with "Of"."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("lancet_kernels", "ops", "graph", "schedules", "bench", "tests", "examples", "docs")


@cache
def docstrings(text: str) -> list[tuple[int, str]]:
    """First line and text of every docstring, those behind constants and fields included."""
    values = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    constants = [value for value in values if isinstance(value, ast.Constant)]
    return [(one.lineno, one.value) for one in constants if isinstance(one.value, str)]


def broken_lines(text: str) -> Iterator[int]:
    """Numbers of the lines of one or two words after which their sentence goes on."""
    for first, docstring in docstrings(text):
        lines = docstring.split("\n")
        for number, (line, following) in enumerate(pairwise(lines)):
            # Code, and tables, whose columns are apart.
            drawn = re.search(r"\S {2,}\S|[()=@|]", line) or re.search(r"\S {2,}\S", following)
            short = re.fullmatch(r"\s*\S+( \S+)?(?<![.:;?!])", line)
            if short and following.strip() and not drawn:
                yield first + number


def sources() -> list[Path]:
    return [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]


def test_no_sentence_is_broken_after_a_word_or_two() -> None:
    found = [f"{file.relative_to(ROOT)}:{n}" for file in sources() for n in broken_lines(file.read_text())]
    assert found == []


def test_a_docstring_begins_with_what_it_describes() -> None:
    wrong = re.compile(r"(Of|That of|Those of)\b")
    found = [
        f"{file.relative_to(ROOT)}:{line}"
        for file in sources()
        for line, docstring in docstrings(file.read_text())
        if wrong.match(docstring.strip())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("docstring", "broken"),
    [
        ("Inputs of one step, which runs on them\na\n    few times.", [2]),
        ("First.\n\nBoth are\ncollective.", [3]),
        ("One line\n\nanother one.", []),
        ("A list:\nop    what\nmm    a product", []),
        ("Example::\n\n    run(x)\n    done", []),
    ],
)
def test_made_up_docstrings(docstring: str, broken: list[int]) -> None:
    assert list(broken_lines(f'"""{docstring}"""')) == broken
