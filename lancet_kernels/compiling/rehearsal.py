"""Compiles the kernels of launches ahead, side by side, without running them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import triton
from triton.runtime.errors import OutOfResources

from lancet_kernels.kernels import runtime
from lancet_kernels.kernels.hopper.kernel import gluon_overlap_kernel
from lancet_kernels.kernels.protocol.schedule import exchange_counts_kernel, schedule_kernel
from lancet_kernels.kernels.reference.kernel import overlap_kernel

# Beyond this many compilations at once Python's part of them is what all wait for.
COMPILING_THREADS = 12


@contextmanager
def rehearsal(*others: Any) -> Iterator[None]:
    """Inside, launches of a pass (and of `others`) that wait compile for their arguments, and do not run.

    On leaving, all that was compiled is loaded. Compilations run side by side. Any other kernel runs. What
    does not compile is left to the launch that needs it, which says so.
    """
    if runtime.INTERPRETED:
        yield
        return
    compiled: list[Any] = []
    kernels = (overlap_kernel, gluon_overlap_kernel, exchange_counts_kernel, schedule_kernel, *others)

    def compile_only(run: Callable) -> Callable:
        def compile_it(*args, **kwargs):
            compiled.append(run(*args, **(kwargs | {"warmup": True})))
            return compiled[-1]

        return compile_it

    with (
        ThreadPoolExecutor(COMPILING_THREADS) as threads,
        triton.AsyncCompileMode(threads, ignore_errors=True),
    ):
        for kernel in kernels:
            kernel.run = compile_only(kernel.run)
        try:
            yield
        finally:
            for kernel in kernels:
                del kernel.run  # the class has the real one
    for kernel in compiled:
        # A kernel of this process is there at once, another one is compiled in the background.
        if isinstance(kernel, triton.FutureKernel):
            kernel = kernel.kernel
        if kernel is not None:
            with suppress(OutOfResources):  # as above
                kernel._init_handles()
