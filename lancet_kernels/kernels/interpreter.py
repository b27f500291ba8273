"""Triton's interpreter prepares triton.language once per launch, not at every call of a device function.

As it comes, it looks through all of triton.language and puts its own functions in, at each launch and again
at each call of a @triton.jit function inside, where they are in already: a large part of the time of small
kernels. Nothing else is changed, and compiled kernels never come here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@functools.cache
def _languages(fn: Callable[..., Any]) -> frozenset[str]:
    """The modules of triton.language that a kernel sees: those the interpreter prepares for it."""
    seen = (value for value in fn.__globals__.values() if inspect.ismodule(value))
    return frozenset(module.__name__ for module in seen if module in (tl, tl.core))


def prepare_once_per_launch() -> None:
    """From now on, in this process. A Triton that prepares in another way is left as it is."""
    prepare = getattr(interpreter, "_patch_lang", None)
    scope_type = getattr(interpreter, "_LangPatchScope", None)
    if prepare is None or scope_type is None or hasattr(prepare, "__wrapped__"):
        return
    prepared: set[str] = set()  # by the launch that runs, and by what it has called; empty between launches

    @functools.wraps(prepare)
    def prepare_what_is_not(fn: Callable[..., Any]) -> Any:
        languages = _languages(fn)
        if languages and prepared >= languages:
            return scope_type()
        by_a_launch = not prepared
        scope = prepare(fn)
        prepared.update(languages)
        if by_a_launch:
            restore = scope.restore

            def forget_and_restore() -> None:
                prepared.clear()
                restore()

            scope.restore = forget_and_restore
        return scope

    interpreter._patch_lang = prepare_what_is_not
