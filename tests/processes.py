"""Processes of tests, forked from one that has imported what they need: they start at once."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from unittest import mock

# None of them starts a thread, which a fork would lose.
PRELOADED = ["pytest", "torch", "lancet_kernels.optimization.optimize", "lancet_kernels.kernels.overlap"]


def processes() -> ForkServerContext:
    """Where to take Process and Queue from; the functions are found by name, as with "spawn".

    Environment and imports are those of the first call. One thread each: ranks share the cores.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return context
