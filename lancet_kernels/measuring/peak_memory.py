"""The most memory that a step holds at a time: what it is given, and what it allocates."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import accumulate

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile


def peak_memory_gb(module: nn.Module, inputs: object, run: Callable[[], object]) -> float:
    """GB of parameters, buffers and inputs, and the most that one call of `run` allocates beside them.

    On a GPU torch's allocator counts; on a CPU torch's profiler does, which slows that call down.
    """
    given = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*module.parameters(), *module.buffers(), *pytree.tree_leaves(inputs))
        if isinstance(tensor, Tensor)
    }
    device = next(module.parameters()).device
    module.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        allocated = torch.cuda.max_memory_allocated(device) - before
    else:
        allocated = allocated_on_cpu(run)
    return (sum(given.values()) + allocated) / 1e9


def allocated_on_cpu(run: Callable[[], object]) -> int:
    """The largest sum, at any time of the call, of bytes that were allocated less those freed."""
    # Above all levels of the profiler's log, which writes lines of its own to standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = sorted(
        (event.start_ns(), event.nbytes())
        for event in recorded.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    return max(accumulate((size for _, size in events), initial=0))
