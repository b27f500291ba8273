"""How is the source of a jitted function (Gluon or Triton) executed? As Python, with other globals.

Assignments make tensors of Python numbers, as the compilers do. Whatever a global stands for (a builtin of
Gluon, another jitted function, a module that has such) is replaced by what the emulator has for it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Sequence
from typing import Any

import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from tests.lancet_kernels.kernels.hopper.gluon_emulator.scheduler import Misuse
from tests.lancet_kernels.kernels.hopper.gluon_emulator.shared_memory import number

BUILTIN_MARKS = ("__triton_builtin__", "__gluon_builtin__")
LANGUAGE = (tl, tl.core, tl.math, tl.standard)


def is_jitted(value: Any) -> bool:
    return isinstance(value, (JITFunction, interpreter.InterpretedFunction))


class _Rewrite(ast.NodeTransformer):
    """x = value becomes x = __to_tensor(value); x: gl.constexpr = value stays."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        call = ast.Name(id="__to_tensor", ctx=ast.Load())
        node.value = ast.copy_location(ast.Call(func=call, args=[node.value], keywords=[]), node.value)
        return node


class Module:
    """A module whose attributes are resolved."""

    def __init__(self, sources: Sources, module: types.ModuleType) -> None:
        self._sources, self._module = sources, module

    def __getattr__(self, name: str) -> Any:
        return self._sources.resolve(getattr(self._module, name))


class Sources:
    """Executable functions for jitted ones, each made once.

    replaced: by identity, what stands for a builtin or function. edits: (jitted function, old text, new
    text): mutants. Each old text must occur once.
    """

    def __init__(self, replaced: dict[int, Any], edits: Sequence[tuple[Any, str, str]]) -> None:
        self.replaced = replaced
        self.edits: dict[Callable[..., Any], tuple[tuple[str, str], ...]] = {}
        for fn, old, new in edits:
            self.edits[fn.fn] = (*self.edits.get(fn.fn, ()), (old, new))
        self._functions: dict[Callable[..., Any], Callable[..., Any]] = {}

    def resolve(self, value: Any) -> Any:
        if id(value) in self.replaced:
            return self.replaced[id(value)]
        if isinstance(value, tl.constexpr):
            return value.value
        if is_jitted(value):
            # What belongs to triton.language calls the interpreter's functions by itself.
            return value if value.fn.__module__.startswith("triton.language") else self.function(value)
        if isinstance(value, types.ModuleType):
            plain = value in LANGUAGE or not value.__name__.startswith(("triton", "tests", "lancet"))
            return value if plain else Module(self, value)
        if any(getattr(value, mark, False) for mark in BUILTIN_MARKS) and "gluon" in value.__module__:
            return self._not_emulated(value)
        return value

    @staticmethod
    def _not_emulated(value: Any) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> None:
            raise Misuse(f"{value.__module__}.{value.__name__} is not emulated: add it to language.py")

        return refuse

    def function(self, fn: Any) -> Callable[..., Any]:
        python = fn.fn
        if python not in self._functions:
            # A placeholder first: functions may call each other.
            self._functions[python] = lambda *a, **k: self._functions[python](*a, **k)
            names = self._names(python)
            exec(_code_of(python, self.edits.get(python, ())), names)
            self._functions[python] = names[python.__name__]
        return self._functions[python]

    def _names(self, python: Callable[..., Any]) -> dict[str, Any]:
        """The function's globals; those that it uses are resolved."""
        used = python.__code__.co_names
        names = {
            name: self.resolve(value) if name in used or name in python.__annotations__ else value
            for name, value in python.__globals__.items()
        }
        return names | {"__to_tensor": to_tensor, "range": tensor_range}


@functools.cache
def _code_of(python: Callable[..., Any], edits: tuple[tuple[str, str], ...]) -> types.CodeType:
    lines, first = inspect.getsourcelines(python)
    text = textwrap.dedent("".join(lines))
    for old, new in edits:
        if text.count(old) != 1:
            raise ValueError(f"{python.__name__} has {text.count(old)} times: {old}")
        text = text.replace(old, new)
    tree = ast.parse(text)
    tree.body[0].decorator_list = []
    ast.fix_missing_locations(_Rewrite().visit(tree))
    ast.increment_lineno(tree, first - 1)
    return compile(tree, inspect.getsourcefile(python), "exec")


def to_tensor(value: Any) -> Any:
    """A number becomes a scalar tensor; all else stays."""
    return interpreter.interpreter_semantic.to_tensor(value, False)


def tensor_range(*limits: Any, **_: Any):
    """range, whose numbers are scalar tensors as they are in a compiled loop."""
    for i in range(*map(number, limits)):
        yield to_tensor(i)
