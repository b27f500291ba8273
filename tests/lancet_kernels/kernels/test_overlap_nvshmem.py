"""Passes with NVSHMEM, over an emulated network that is late: no bit changes.

The network stands for NVSHMEM's device functions. A put is read from its source and written to the peer only
when a fence, a quiet or a signal of the same PE makes it; so what comes too early is missed, and a source
that was overwritten shows. A source that is not symmetric memory is refused, as a network card refuses it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lancet_kernels.kernels import overlap
from lancet_kernels.kernels.protocol import device, exchange
from lancet_kernels.kernels.symmetric.memory import Region
from tests.grids import few_of
from tests.lancet_kernels.kernels.overlap_cases import Case
from tests.lancet_kernels.kernels.overlap_ranks import (
    GuardedMemory,
    check_results,
    check_rows,
    check_same,
    make_layer,
)
from tests.poisoned_buffers import poisoned_buffers

FP16, BF16 = torch.float16, torch.bfloat16


class FarMemory(GuardedMemory):
    """Guarded memory whose tables have only this PE's own address; the network knows the others'."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.far = True
        self.spans: list[tuple[int, int, list[int]]] = []

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Region:
        region = super().allocate(name, shape, dtype)
        start = region.local.data_ptr()
        self.spans.append((start, start + region.local.nbytes, region.peers.tolist()))
        region.peers[torch.arange(self.world) != self.rank] = 0
        return region

    def place(self, address: int, num_bytes: int) -> tuple[int, list[int]]:
        """-> (offset in its region, its addresses on all PEs). Raises outside of symmetric memory."""
        for start, end, bases in self.spans:
            if start <= address and address + num_bytes <= end:
                return address - start, bases
        raise AssertionError("not in symmetric memory: no network card can read or write it")


class Network:
    """What one PE has under way; `counts`: how often each function did something.

    unread: puts that no quiet has ended, whose sources the network may still read.
    """

    def __init__(self, memory: FarMemory) -> None:
        self.memory, self.under_way, self.unread = memory, [], 0
        self.counts = SimpleNamespace(puts=0, signals=0, acquired=0, quiet=0)

    def network_put(self, target: Any, source: Any, num_elements: Any, peer: Any) -> None:
        num_bytes = _number(num_elements) * target.dtype.element_ty.primitive_bitwidth // 8
        offset, bases = self.memory.place(_number(target), num_bytes)
        self.memory.place(_number(source), num_bytes)
        self.under_way.append((bases[_number(peer)] + offset, _number(source), num_bytes))
        self.counts.puts += 1
        self.unread += 1

    def arrive(self) -> None:
        for target, source, num_bytes in self.under_way:
            ctypes.memmove(target, source, num_bytes)
        self.under_way.clear()

    def network_quiet(self) -> None:
        self.counts.quiet += 1
        self.unread = 0
        self.arrive()

    def network_signal(self, signal: Any, value: Any, peer: Any) -> None:
        self.arrive()
        offset, bases = self.memory.place(_number(signal), 8)
        ctypes.c_int64.from_address(bases[_number(peer)] + offset).value = _number(value)
        self.counts.signals += 1

    def network_acquire(self, signal: Any, at_least: Any) -> None:
        assert ctypes.c_int64.from_address(_number(signal)).value >= _number(at_least)
        self.counts.acquired += 1


def _number(value: Any) -> int:
    """Value of a scalar in the interpreter, which may be a pointer."""
    return int(value.handle.data.reshape(-1)[0]) if hasattr(value, "handle") else int(value)


@contextlib.contextmanager
def network(memory: FarMemory) -> Iterator[Network]:
    """Inside, kernels with NVSHMEM=True use the network; on leaving, nothing may be under way."""
    made = Network(memory)

    def interpret(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        options.pop("maxnreg", None)
        kernel[grid](*arguments, **options)
        assert not made.unread, "a launch has ended, and the network may still read its buffers"

    with pytest.MonkeyPatch.context() as patch:
        for name in ("network_put", "network_quiet", "network_signal", "network_acquire"):
            patch.setattr(device, name, getattr(made, name))
        for module in (overlap, exchange):
            patch.setattr(module, "launch", interpret)
        yield made


def far_and_near_on_rank(case: Case, options: dict) -> SimpleNamespace:
    """The same two passes over the network and over pointers -> how often the network was used."""
    with closing(GuardedMemory(timeout_s=30)) as memory, closing(FarMemory(timeout_s=30)) as far_memory:
        with poisoned_buffers():
            near = make_layer(memory, "near", case, **options)
            expected = near.run()
        near.check()
        with poisoned_buffers(), network(far_memory) as wires:
            far = make_layer(far_memory, "far", case, **options)
            for way in (far.forward, far.backward):
                for stage in way.buffers.stage:
                    stage.local.fill_(float("nan"))
            found = far.run()
            far.check()
        check_rows(far)
        check_results(far, near)
        check_same(found, expected, f"{case}, over the network")
        far_memory.check_guards()
        memory.barrier()
        return wires.counts


@pytest.mark.parametrize(
    ("case", "options"),
    few_of(
        [
            (Case(), {}),
            (Case(tokens=35, capacity=35, local=1, choices=1, dtype=FP16, width=40), {}),
            (Case(dtype=BF16, bias=False, choose="few", uneven=True), {}),
        ]
    ),
    ids=str,
)
def test_the_network_changes_no_bit(pool, case, options):
    for counts in pool.run(far_and_near_on_rank, case, options):
        assert min(counts.signals, counts.acquired, counts.quiet) > 0
        assert counts.puts > 0
