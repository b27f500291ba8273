"""How long do the nodes of a graph, and the collectives of this machine, really take?

Nodes are timed one by one while the whole graph runs on real inputs, with the collectives in it, on
every rank at the same time. Collectives are timed alone over a series of sizes
(Lancet, section 3: 1 KB, 2 KB, 4 KB, ...). Both are collective calls: every rank makes them, with the
same graph.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from lancet_kernels.graph.communication import CommunicationModel
from lancet_kernels.graph.from_fx import is_collective, is_instruction
from lancet_kernels.ops.all_reduce import PendingAllReduce, start_all_reduce
from lancet_kernels.ops.all_to_all import start_all_to_all
from lancet_kernels.ops.groups import Groups, group_device, group_of, group_size
from lancet_kernels.ops.link import link
from lancet_kernels.ops.shift import start_shift
from lancet_kernels.ops.waiting import waiting

SMALLEST_BYTES = 1024
GPU_SLEEP_CYCLES = 500_000
"""Some 0.3 ms."""


@dataclass(frozen=True)
class NodeTimes:
    """What a node took on this machine.

    milliseconds: of computation. Of a collective: what it costs the computing thread (packing, copying),
        not the time on the link.
    wire_bytes: of an all-to-all, the most that a rank sends to or gets from the others.
    """

    milliseconds: float
    wire_bytes: float = 0.0


def measure_nodes(
    module: fx.GraphModule, inputs: Sequence[object], group: str, repeats: int = 3
) -> dict[str, NodeTimes]:
    """Times of every instruction node, by name: medians over runs (without the first), of the slowest rank.

    The others wait for it at the next all-to-all, and experts are not loaded alike: with means over two ranks
    predictions of `lancet bench overlap` were 7.1 % off, with the slowest 3.2 % (2-core CPU, 2026-11-21).
    On CPU ranks the time is CPU time of the computing thread: what else the machine does, and waiting for
    other ranks, is not in it. A collective in the middle of computation counts from when all have come.
    An emulated link is not paced meanwhile. On a GPU it is the time between two events, without the launch.
    The random generators are afterwards as they were.

    Args: inputs: one per placeholder of the graph; they say which device.
    """
    names = [node.name for node in module.graph.nodes if is_instruction(node)]
    on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in inputs)
    runs = []
    with unpaced(inputs):
        for _ in range(repeats + 1):
            timer = _GpuTimer(module) if on_gpu else _Timer(module)
            with torch.no_grad():
                timer.run(*inputs)
            runs.append([(timer.cpu[name], timer.wall[name], timer.wire[name]) for name in names])
    # [run, instruction, (CPU, wall, bytes)]
    measured = torch.tensor(runs[1:], dtype=torch.float64)
    slowest = _over_ranks(measured.median(0).values, group, "max")
    least, most = _over_ranks(measured.amin(0), group, "min"), _over_ranks(measured.amax(0), group, "max")
    found = {}
    for i, node in enumerate(node for node in module.graph.nodes if is_instruction(node)):
        # Of what waits for other ranks, the time of the last one that came, on a good day.
        milliseconds = float(least[i, 1]) if _waits_for_ranks(node) else float(slowest[i, 0])
        found[node.name] = NodeTimes(milliseconds, float(most[i, 2]))
    return found


@contextlib.contextmanager
def unpaced(inputs: Sequence[object]) -> Iterator[None]:
    """Inside the block an emulated link is not paced; the random generators are afterwards as they were."""
    gbps, link.gbps = link.gbps, None
    devices = {value.device for value in inputs if isinstance(value, Tensor) and value.is_cuda}
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        link.gbps = gbps
        link.read()


def _waits_for_ranks(node: fx.Node) -> bool:
    """Is it computation to the planner, but done when all ranks have come?"""
    schema = getattr(node.target, "_schema", None)
    takes_group = schema is not None and any(argument.name == "group" for argument in schema.arguments)
    return takes_group and not is_collective(node)


class _Timer(fx.Interpreter):
    """Runs a graph node by node with clocks beside it: milliseconds, and bytes on the wire, by node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.cpu: dict[str, float] = {}
        self.wall: dict[str, float] = {}
        self.wire: dict[str, float] = {}

    def run_node(self, node: fx.Node) -> object:
        if not is_instruction(node):
            return super().run_node(node)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        return self._timed(node, lambda: getattr(self, node.op)(node.target, args, kwargs))

    def _timed(self, node: fx.Node, call: Callable[[], object]) -> object:
        # What moves the bytes of a collective takes its time from computation if no core is to spare.
        clock = time.process_time if is_collective(node) and not _spare_cores() else time.thread_time
        link.read()
        begin, cpu = time.perf_counter(), clock()
        result = call()
        self.cpu[node.name] = (clock() - cpu) * 1e3
        self.wall[node.name] = (time.perf_counter() - begin) * 1e3
        self.wire[node.name] = link.read().bytes_on_wire
        return result


class _GpuTimer(_Timer):
    """The same on a GPU, by events on its stream.

    The device first sleeps for as long as the host may need to launch the node, so that what is measured is
    the node and not its launch. A node that makes the host wait is measured with its launch.
    """

    def _timed(self, node: fx.Node, call: Callable[[], object]) -> object:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        link.read()
        torch.cuda._sleep(GPU_SLEEP_CYCLES)
        begin.record()
        result = call()
        end.record()
        torch.cuda.synchronize()
        traffic, elapsed_ms = link.read(), begin.elapsed_time(end)
        # Of a collective only what it costs computation: packing and unpacking rows. An all-reduce packs
        # nothing to speak of, and says nothing about its time on the link.
        computing_ms = max(0.0, elapsed_ms - traffic.exposed_ms)
        if is_collective(node) and not traffic.count:
            computing_ms = 0.0
        self.cpu[node.name], self.wall[node.name] = computing_ms, elapsed_ms
        self.wire[node.name] = traffic.bytes_on_wire
        return result


@lru_cache(maxsize=1)
def _spare_cores() -> bool:
    """Has this machine more cores than its ranks compute on?"""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    return cores > ranks * torch.get_num_threads()


def measure_communication(
    largest: dict[tuple[str, str], int], width: int, groups: Groups, device: torch.device, repeats: int = 5
) -> CommunicationModel:
    """Times of each collective from 1 KB up to its largest size, in steps of two.

    Args:
        largest: bytes per rank (all-gather and reduce-scatter: of the whole), by collective and group:
        all-to-alls of the expert group, shifts around all ranks and the others of the data group are of
        group "world", the others of the replica group of "replica".
        width: of the rows of all-to-all buffers. device: where the step's tensors are.
    """

    def all_reduce(group: str) -> Callable[[int], object]:
        return lambda size: start_all_reduce([torch.zeros(max(1, size // 4), device=device)], group)

    def shift_around(size: int) -> object:
        ranks = group_size(groups.world)
        around = [(place + 1) % ranks for place in range(ranks)]
        return start_shift([torch.zeros(max(1, size // 4), device=device)], around, groups.world)

    starts: dict[tuple[str, str], Callable[[int], object]] = {
        ("all_to_all", "world"): lambda size: _uniform_all_to_all(size, width, groups.expert, device),
        ("point_to_point", "world"): shift_around,
    }
    for name, group in (("world", groups.data), ("replica", groups.replica)):
        starts["all_reduce", name] = all_reduce(group)
        starts["all_gather", name] = partial(
            _start_with_shards, dist.all_gather_into_tensor, group, device, False
        )
        starts["reduce_scatter", name] = partial(
            _start_with_shards, dist.reduce_scatter_tensor, group, device, True
        )
    samples = {}
    for collective, name in largest:
        start = starts[collective, name]
        found = []
        size = SMALLEST_BYTES
        while True:
            how = _on_the_link if collective == "all_to_all" else _to_the_end
            call = how(start, size, device)
            found.append((float(size), _median_ms(call, groups.world, repeats)))
            if size >= largest[collective, name]:
                break
            size *= 2
        samples[collective, name] = found
    link.read()
    return CommunicationModel.measured(samples)


def _on_the_link(start: Callable[[int], Any], size: int, device: torch.device) -> Callable[[], float]:
    """-> milliseconds that the link is taken; what goes before and after is computation."""

    def call() -> float:
        link.read()
        start(size).wait()
        return link.read().all_to_all_ms

    return call


def _to_the_end(start: Callable[[int], Any], size: int, device: torch.device) -> Callable[[], float]:
    def call() -> float:
        _finish(device)
        begin = time.perf_counter()
        start(size).wait()
        _finish(device)
        return (time.perf_counter() - begin) * 1e3

    return call


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _uniform_all_to_all(size: int, width: int, group: str, device: torch.device) -> object:
    """`size` bytes of float32 rows on this rank, the same number to every rank."""
    ranks = group_size(group)
    rows = max(1, size // (4 * width * ranks))
    count = torch.full((ranks, 1), rows, dtype=torch.int64, device=device)
    return start_all_to_all(torch.zeros(ranks * rows, width, device=device), count, count, group, True)


def _start_with_shards(
    collective: Callable[..., dist.Work], group: str, device: torch.device, to_shard: bool, size: int
) -> dist.Work | PendingAllReduce:
    """An all-gather or reduce-scatter between `size` bytes of float32 and this rank's shard of them."""
    if not group:
        return start_all_reduce([torch.zeros(max(1, size // 4), device=device)], group)
    process_group = group_of(group)
    shard = torch.zeros(max(1, size // (4 * process_group.size())), device=device)
    whole = shard.new_zeros(shard.numel() * process_group.size())
    result, source = (shard, whole) if to_shard else (whole, shard)
    with waiting(collective.__name__, process_group):
        return collective(result, source, group=process_group, async_op=True)


def _median_ms(call: Callable[[], float], group: str, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        if group:
            with waiting("barrier before a measurement", group_of(group)):
                dist.barrier(group=group_of(group))
        times.append(call())
    return float(_over_ranks(torch.tensor([statistics.median(times[1:])]), group, "sum")[0])


def _over_ranks(values: Tensor, group: str, how: str) -> Tensor:
    """The mean ("sum"), "min" or "max" over the ranks."""
    values = values.to(torch.float64, copy=True)
    if group:
        values = values.to(group_device(group))
        operation = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}[how]
        with waiting("all_reduce of measured times", group_of(group)):
            dist.all_reduce(values, operation, group=group_of(group))
    values = values.cpu()
    return values / group_size(group) if how == "sum" else values
