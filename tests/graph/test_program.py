"""Programs: validation, dependencies, reachability, JSON, fingerprint."""

import ast
from dataclasses import replace
from pathlib import Path

import networkx
import pytest
from hypothesis import given

from lancet_kernels.errors import UserError
from lancet_kernels.graph.program import (
    Instruction,
    Kind,
    Phase,
    Program,
    TensorSpec,
    bitset,
    fingerprint,
)
from tests.examples import examples
from tests.schedules.small_programs import random_programs


def tensors(*names, **aliases):
    return {n: TensorSpec(n, (4, 2), alias_of=aliases.get(n)) for n in names}


def chain() -> Program:
    a = Instruction("a", "aten.add", ("x",), ("y",))
    b = Instruction("b", "lancet.all_to_all", ("y",), ("z",), Kind.ALL_TO_ALL)
    c = Instruction("c", "aten.add", ("x", "z"), ("w",))
    return Program("p", (a, b, c), tensors("x", "y", "z", "w"), ("x",), ("w",))


def test_dependencies_and_reachability():
    p = chain()
    assert p.dependencies == [(), (0,), (1,)]
    assert p.dependents == [(1,), (2,), ()]
    assert p.descendants == [0b110, 0b100, 0b000]
    assert p.positions(Kind.ALL_TO_ALL) == [1]


def test_an_update_in_place_stays_behind_the_readers_of_the_old_value():
    described = tensors("w", "g", "a", "b", "w2", w2="w")
    read = Instruction("read", "aten.mul", ("w",), ("a",))
    update = Instruction("update", "lancet.sgd", ("w", "g"), ("w2",), mutates=("w",), phase=Phase.OPTIMIZER)
    use = Instruction("use", "aten.mul", ("w2",), ("b",))
    p = Program("p", (read, update, use), described, ("w", "g"))
    assert p.dependencies == [(), (0,), (1,)]
    with pytest.raises(UserError, match="read first"):
        p.reordered(["update", "read", "use"])


def test_the_backward_begins_behind_the_forward():
    """d is made from x's gradient alone, statistics from the forward alone: still none of them crosses."""
    names = ("x", "dx", "y", "statistics", "d", "e")
    forward = Instruction("f", "aten.mul", ("x",), ("y",))
    statistics = Instruction("s", "aten.sum", ("y",), ("statistics",))
    begin = Instruction("b", "aten.mul", ("dx",), ("d",), phase=Phase.BACKWARD)
    behind = Instruction("e", "aten.mul", ("d", "x"), ("e",), phase=Phase.BACKWARD)
    p = Program("p", (forward, statistics, begin, behind), tensors(*names), ("x", "dx"))
    assert p.dependencies == [(), (0,), (1,), (2,)]
    with pytest.raises(UserError, match="got b before s, expected s first"):
        p.reordered(["f", "b", "s", "e"])


def test_reordered_refuses_what_is_not_valid():
    p = chain()
    assert p.reordered(["a", "b", "c"]) == p
    with pytest.raises(UserError, match="got c before b"):
        p.reordered(["a", "c", "b"])
    with pytest.raises(UserError, match="exactly once"):
        p.reordered([0, 1])
    with pytest.raises(UserError, match="exactly once"):
        p.reordered(["a", "b", "nobody"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {"instructions": p.instructions[1:]}, "b reads y"),
        (lambda p: {"instructions": (*p.instructions, p.instructions[0])}, "two instructions named a"),
        (
            lambda p: {"instructions": (*p.instructions, replace(p.instructions[0], name="d"))},
            "d computes y again",
        ),
        (lambda p: {"outputs": ("nothing",)}, "tensor nothing"),
        (lambda p: {"parameters": ("y",)}, "parameters y"),
        (lambda p: {"tensors": {**p.tensors, "x": TensorSpec("q", (1,))}}, "x with the spec of q"),
    ],
)
def test_invalid_programs_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        replace(chain(), **change(chain()))


def test_bytes_follow_from_the_dtype_and_views_add_none():
    spec = TensorSpec("v", (4, 2), "float16", alias_of="x")
    assert (spec.bytes, spec.content_bytes) == (0, 16)
    assert TensorSpec("x", (4, 2), "float16").bytes == 16
    with pytest.raises(UserError, match="dtype of tensor x"):
        TensorSpec("x", (1,), "float33")


def test_fingerprint_ignores_costs_and_sees_structure():
    p = chain()
    measured = replace(p.instructions[0], milliseconds=3.0, flops=7.0, bytes=9.0)
    assert fingerprint(replace(p, instructions=(measured, *p.instructions[1:]))) == fingerprint(p)
    other = replace(p.instructions[0], attributes={"dim": 1})
    assert fingerprint(replace(p, instructions=(other, *p.instructions[1:]))) != fingerprint(p)


@examples(60)
@given(random_programs())
def test_descendants_equal_search(p):
    graph = networkx.DiGraph(dict(enumerate(p.dependents)))
    assert p.descendants == [bitset(networkx.descendants(graph, i)) for i in range(len(p))]


PLAIN = {
    "graph": "program",
    "graph/rules": "derived rules",
    "graph/costs": "clusters costs part_instruction",
    "schedules/time": "simulate peak_memory timeline",
    "schedules/order": "list_schedule best_order ordering",
    "schedules/cut": "ranges partition_range",
    "schedules": "plan strategies",
}


def test_planning_needs_no_torch_and_pictures_are_imported_late():
    for path in (f"{folder}/{module}.py" for folder, modules in PLAIN.items() for module in modules.split()):
        tree = ast.parse((Path(__file__).parents[2] / path).read_text())
        everywhere = {m for node in ast.walk(tree) for m in imported(node)}
        on_top = {m for node in tree.body for m in imported(node)}
        assert "torch" not in everywhere, path
        assert "matplotlib" not in on_top, path


def imported(node: ast.AST) -> set[str]:
    """Top-level names of the packages that a statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    return {node.module.split(".")[0]} if isinstance(node, ast.ImportFrom) and node.module else set()
