"""Compiles the kernels of passes ahead, side by side, without running them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from lancet_kernels.kernels import runtime
from lancet_kernels.kernels.config import OverlapConfig
from lancet_kernels.kernels.hopper.kernel import gluon_overlap_kernel
from lancet_kernels.kernels.kernel_launch import Launch, compile_launch, recorded
from lancet_kernels.kernels.overlap import moe_backward, moe_forward
from lancet_kernels.kernels.overlap_data import Experts, Routing
from lancet_kernels.kernels.portable.kernel import overlap_kernel
from lancet_kernels.kernels.protocol.combine import combine_results_kernel
from lancet_kernels.kernels.protocol.exchange import Exchange
from lancet_kernels.kernels.protocol.schedule import exchange_counts_kernel, schedule_kernel

# Those of a pass that wait for peers, or for each other.
WAITING = (
    overlap_kernel, gluon_overlap_kernel, combine_results_kernel, exchange_counts_kernel, schedule_kernel,
)  # fmt: skip
# Beyond this many compilations at once Python's part of them is what all wait for.
COMPILING_THREADS = 12


@contextmanager
def warming_up(*others: Any) -> Iterator[None]:
    """Inside, launches of a pass (and of `others`) that wait are recorded, and do not run; all others do.

    On leaving, their kernels are compiled side by side, and loaded. What does not compile is left to the
    launch that needs it, which says so.
    """
    if runtime.INTERPRETED:
        yield
        return
    with recorded(*WAITING, *others) as launches:
        yield
    compile_together(launches)


def compile_together(launches: Sequence[Launch]) -> None:
    """Compile what these launches need, and load it."""
    with (
        ThreadPoolExecutor(COMPILING_THREADS) as threads,
        triton.AsyncCompileMode(threads, ignore_errors=True),
    ):
        compiled = [compile_launch(launch) for launch in launches]
    for kernel in compiled:
        # A kernel of this process is there at once, another one is compiled in the background.
        if isinstance(kernel, triton.FutureKernel):
            kernel = kernel.kernel
        if kernel is not None:
            with suppress(OutOfResources):  # as above
                kernel._init_handles()


def variants() -> dict[str, int]:
    """How many variants of each of `WAITING` this process has; in the interpreter there are none."""
    caches = {kernel.fn.__name__: getattr(kernel, "device_caches", {}) for kernel in WAITING}
    return {name: sum(len(of_device[0]) for of_device in cache.values()) for name, cache in caches.items()}


def warm_up(
    forward: Exchange,
    backward: Exchange,
    x: Tensor,
    routing: Routing,
    experts: Experts,
    config: OverlapConfig,
) -> None:
    """Compile what a pass through new exchanges needs, on all PEs at once, and meet. Collective.

    A wait for a peer is bounded from the launch on: without this, a PE that compiles longer than its peers
    would be taken for a dead one. To the exchanges this is a pass that all PEs skip: nothing is sent, its
    bank is released. In the interpreter there is nothing to compile.
    """
    if runtime.INTERPRETED:
        return
    with warming_up():
        out, saved = moe_forward(forward, x, routing, experts, config)
        moe_backward(forward, saved, backward, out, routing, experts, config)
    forward.release(saved.opened)
    forward.memory.barrier()
