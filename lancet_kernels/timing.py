"""Times of launches on the device, and peak memory of a step.

Launches are timed with events, with a cold L2 cache and without the time of the host: for each sample, the
device first sleeps as long as the host needs to launch everything; then the L2 cache is overwritten; then
event, work, event. Candidates are timed in turn, so that clock rates and heat affect all of them equally, and
they can be compared round by round.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import accumulate
from typing import TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

Name = TypeVar("Name", bound=Hashable)
Value = TypeVar("Value")
# Cycles per ms: at least the clock of any GPU, so the device sleeps at least as long as requested.
CYCLES_PER_MS = 2_000_000


def in_turn(
    names: Iterable[Name],
    measure: Callable[[Name], Value],
    rounds: int,
    warmup: int,
    first_changes: bool = False,
) -> dict[Name, list[Value]]:
    """The results of `measure` for all names in turn, `rounds` times after `warmup` rounds.

    Args: first_changes: rotate the order, because the first of a round starts with the caches of the last.
    """
    order = list(names)
    values: dict[Name, list[Value]] = {name: [] for name in order}
    for number in range(warmup + rounds):
        turn = number % len(order) if first_changes else 0
        for name in (*order[turn:], *order[:turn]):
            value = measure(name)
            if number >= warmup:
                values[name].append(value)
    return values


def cpu_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Clock:
    """Measures on `device`; on the CPU (smoke runs) by the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cold = None
        if device.type == "cuda":
            size = 4 * torch.cuda.get_device_properties(device).L2_cache_size
            self._cold = torch.empty(max(size, 64 << 20), dtype=torch.uint8, device=device)
        self._host_ms = 1.0
        self._start: torch.cuda.Event | None = None
        self._launched = 0.0

    def prepare(self) -> None:
        """Let the device sleep while the host launches, and overwrite its L2 cache. Nothing on a CPU."""
        if self._cold is not None:
            torch.cuda._sleep(int(CYCLES_PER_MS * (1.5 * self._host_ms + 0.2)))
            self._cold.zero_()

    def read(self) -> float:
        """Seconds, for readings in pairs: begin, end, begin, end. Only differences within a pair count.

        It can be used in place of time.perf_counter. The end waits for the device.
        """
        if self._cold is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        now = time.perf_counter()
        if self._start is None:
            self._start, self._launched = event, now
            return 0.0
        # A decaying maximum over the latest calls, so that one slow call has no lasting effect.
        self._host_ms = min(50.0, max((now - self._launched) * 1e3, 0.8 * self._host_ms))
        torch.cuda.synchronize(self.device)
        start, self._start = self._start, None
        return start.elapsed_time(event) * 1e-3

    def once(self, work: Callable[[], object]) -> float:
        """Milliseconds of one call. Waits for the device before and after, not within."""
        self.prepare()
        begin = self.read()
        work()
        return (self.read() - begin) * 1e3

    def rounds(
        self, contenders: Mapping[Name, Callable[[], object]], rounds: int, warmup: int
    ) -> dict[Name, list[float]]:
        """Time all contenders in turn, `rounds` times after `warmup` rounds. -> milliseconds by name."""
        return in_turn(contenders, lambda name: self.once(contenders[name]), rounds, warmup)


def peak_memory_gb(module: nn.Module, inputs: object, run: Callable[[], object]) -> float:
    """GB of parameters, buffers and inputs, and the most that one call of `run` allocates beside them.

    On a GPU torch's allocator counts; on a CPU torch's profiler does, which slows that call down.
    """
    resident = {
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
    return (sum(resident.values()) + allocated) / 1e9


def allocated_on_cpu(run: Callable[[], object]) -> int:
    """The most bytes that the call has allocated, and not freed, at any time."""
    # Silences the profiler's log on standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = sorted(
        (event.start_ns(), event.nbytes())
        for event in recorded.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    return max(accumulate((size for _, size in events), initial=0))
