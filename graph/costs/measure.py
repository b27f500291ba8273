"""Measures the nodes of a graph, and the collectives of this machine.

Nodes are timed one by one while the whole graph runs on real inputs on all ranks at the same time,
collectives alone over a series of sizes (Lancet, section 3: 1 KB, 2 KB, 4 KB, ...). Both are collective
calls: all ranks must make them, with the same graph.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from lancet_kernels.graph.capture.captured_graph import copy_of, with_any_strides
from lancet_kernels.graph.capture.run import GraphRunner, Recorder
from lancet_kernels.graph.costs.clusters import CommunicationModel
from lancet_kernels.graph.from_fx import is_collective, is_functional_collective, is_instruction
from lancet_kernels.graph.program import Instruction, Kind, Phase, Program
from lancet_kernels.ops.comm.all_to_all import start_all_to_all
from lancet_kernels.ops.comm.collectives import all_gather, all_reduce, reduce_scatter
from lancet_kernels.ops.comm.groups import Groups, group_of, group_size, over_ranks
from lancet_kernels.ops.comm.link import link
from lancet_kernels.ops.comm.redistribute import start_shift
from lancet_kernels.ops.comm.waiting import waiting
from lancet_kernels.ops.moe import fused_graph
from lancet_kernels.timing import cpu_cores

SMALLEST_BYTES = 1024
BEYOND = 10.0
"""A time beyond this multiple of what others suggest is measured again: the machine was busy."""
GPU_SLEEP_CYCLES = 500_000
"""About 0.3 ms."""


@dataclass(frozen=True)
class NodeTimes:
    """The measured time of a node.

    milliseconds: of computation; for a collective, the time of the computing thread (packing, copying)
        without the time on the link.
    other_threads_ms: CPU time of the threads that move the bytes of a collective, if no core is left for
        them: overlapped computation takes this much longer.
    wire_bytes: for an all-to-all, the larger of the bytes sent to and received from other ranks, of the rank
        with most.
    """

    milliseconds: float
    other_threads_ms: float = 0.0
    wire_bytes: float = 0.0


def measure_nodes(
    module: fx.GraphModule, inputs: Sequence[object], group: str, repeats: int = 3
) -> dict[str, NodeTimes]:
    """Times of every instruction node, by name: medians over runs (without the first), of the slowest rank.

    The slowest rank counts because the others wait for it at the next all-to-all, and experts have different
    loads. On CPU ranks this is the CPU time of the computing thread, without other processes and without
    waiting for other ranks; for computation that blocks on other ranks, the wall time of the rank that
    arrives last. On a GPU it is the time between two events, without the launch. An emulated link is not
    paced meanwhile. The states of the random generators are restored.

    Args: inputs: one per placeholder of the graph, on the device to measure.
    """
    nodes = [node for node in module.graph.nodes if is_instruction(node)]
    on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in inputs)
    runs = []
    with unpaced(inputs):
        for _ in range(repeats + 1):
            timer = _GpuTimer(module) if on_gpu else _Timer(module)
            with torch.no_grad():
                timer.run(*inputs)
            runs.append([timer.times[node.name] for node in nodes])
    # [run, instruction, (CPU, wall, CPU of other threads, bytes)]
    measured = torch.tensor(runs[1:], dtype=torch.float64)
    slowest = over_ranks(measured.median(0).values, group, "max")
    least, most = over_ranks(measured.amin(0), group, "min"), over_ranks(measured.amax(0), group, "max")
    times = {}
    for i, node in enumerate(nodes):
        # A node that waits for other ranks: the rank that arrives last waits least; the minimum over runs.
        milliseconds = float(least[i, 1]) if _waits_for_ranks(node) else float(slowest[i, 0])
        times[node.name] = NodeTimes(milliseconds, float(slowest[i, 2]), float(most[i, 3]))
    return times


def run_as_a_whole(
    module: fx.GraphModule, inputs: Sequence[object], device: torch.device
) -> Callable[[], float]:
    """Runs a graph in its own order, with its collectives over the link as it is, and returns milliseconds of
    wall time. The states of the random generators are restored. Args: as of `measure_nodes`."""
    runner = GraphRunner(copy_of(module), Phase.FORWARD, Recorder())

    def run() -> float:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            elapsed_ms = _total_ms(lambda _: runner(list(inputs)), 0, device)
        link.read()
        return elapsed_ms

    return run


@contextlib.contextmanager
def unpaced(inputs: Sequence[object]) -> Iterator[None]:
    """Context in which an emulated link is not paced; restores the states of the random generators."""
    gbps, link.gbps = link.gbps, None
    devices = {value.device for value in inputs if isinstance(value, Tensor) and value.is_cuda}
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        link.gbps = gbps
        link.read()


def _waits_for_ranks(node: fx.Node) -> bool:
    """Does the node block until all ranks reach it, though the planner treats it as computation?"""
    if node.target in (fused_graph.FORWARD, fused_graph.BACKWARD):
        return True
    schema = getattr(node.target, "_schema", None)
    arguments = schema.arguments if schema is not None else ()
    # By its name; the `group` of a group norm is a number.
    takes_group = any(one.name == "group" and str(one.type) == "str" for one in arguments)
    return takes_group and not is_collective(node)


class AnyStrides(fx.Interpreter):
    """Runs a graph in which strides of fake results may be wrong (`with_any_strides`)."""

    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        return super().call_function(with_any_strides(target), args, kwargs)


class _Timer(AnyStrides):
    """Runs a graph node by node. `times`: CPU and wall milliseconds, CPU milliseconds of other threads, and
    bytes on the wire, by node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.times: dict[str, tuple[float, float, float, float]] = {}

    def run_node(self, node: fx.Node) -> object:
        if not is_instruction(node):
            return super().run_node(node)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        return self._timed(node, lambda: getattr(self, node.op)(node.target, args, kwargs))

    def _timed(self, node: fx.Node, call: Callable[[], object]) -> object:
        clocks = time.thread_time, time.perf_counter, time.process_time
        link.read()
        before = [clock() for clock in clocks]
        result = _arrived(node, call())
        cpu_ms, wall_ms, process_ms = (
            (clock() - begin) * 1e3 for clock, begin in zip(clocks, before, strict=True)
        )
        # The clocks are read one after the other.
        beside_ms = max(0.0, process_ms - cpu_ms) if is_collective(node) and not _spare_cores() else 0.0
        self.times[node.name] = cpu_ms, wall_ms, beside_ms, link.read().bytes_on_wire
        return result


def timed_on_gpu(call: Callable[[], object], device: torch.device | None = None) -> tuple[object, float]:
    """A call's result, and the milliseconds between two events on the stream.

    The device first sleeps while the host launches, so that the launch is not measured. For a call that makes
    the host wait, the launch is included.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(GPU_SLEEP_CYCLES)
    begin.record()
    result = call()
    end.record()
    torch.cuda.synchronize(device)
    return result, begin.elapsed_time(end)


class _GpuTimer(_Timer):
    """The same on a GPU, by events on its stream."""

    def _timed(self, node: fx.Node, call: Callable[[], object]) -> object:
        link.read()
        result, elapsed_ms = timed_on_gpu(lambda: _arrived(node, call()))
        traffic = link.read()
        # For a collective, only packing and unpacking rows is computation. An all-reduce packs very little,
        # and does not report its time on the link, so it counts as zero.
        computing_ms = max(0.0, elapsed_ms - traffic.exposed_ms)
        if is_collective(node) and not traffic.count:
            computing_ms = 0.0
        self.times[node.name] = computing_ms, elapsed_ms, 0.0, traffic.bytes_on_wire
        return result


def _arrived(node: fx.Node, result: Any) -> Any:
    """The result of a node; that of a functional collective after waiting for it, which is part of it."""
    wait = torch.ops._c10d_functional.wait_tensor
    return tree_map(wait, result) if is_functional_collective(node) else result


@lru_cache(maxsize=1)
def _spare_cores() -> bool:
    """Does this machine have more cores than its ranks compute on?"""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    return cpu_cores() > ranks * torch.get_num_threads()


def measure_communication(
    largest: dict[tuple[str, str], int],
    width: int,
    groups: Groups,
    device: torch.device,
    repeats: int = 5,
    others: Mapping[str, str] = MappingProxyType({}),
) -> CommunicationModel:
    """Times of each collective from 1 KB up to its largest size, in steps of two.

    Args:
        largest: bytes per rank (all-gather and reduce-scatter: of the whole), by collective and group.
            "world" means the expert group for all-to-alls, all ranks for shifts, and the data group for the
            rest; "replica" means the replica group; further names are those of `others`.
        width: of the rows in all-to-all buffers. device: of the step's tensors.
    """
    named = {"world": groups.data, "replica": groups.replica, **others}
    fixed_groups = {"all_to_all": groups.expert, "point_to_point": groups.world}
    samples = {}
    for collective, name in largest:
        group = fixed_groups.get(collective, named[name])
        call = partial(_run_collective, collective, group, width, device)
        clock = _link_ms if collective == "all_to_all" else _total_ms

        def measured(size: int, clock=clock, call=call) -> float:
            return median_ms(partial(clock, call, size, device), groups.world, repeats)

        sizes = [SMALLEST_BYTES]
        while sizes[-1] < largest[collective, name]:
            sizes.append(2 * sizes[-1])
        times = {size: measured(size) for size in sizes}
        for size in beyond_others(times):
            times[size] = min(times[size], measured(size))
        samples[collective, name] = [(float(size), ms) for size, ms in times.items()]
    link.read()
    return CommunicationModel.measured(samples)


def beyond_others(times: Mapping[int, float]) -> list[int]:
    """Sizes whose message took over `BEYOND` times as long as a larger one, or as a smaller one times the
    ratio of their sizes. Args: times: by size."""
    return [
        size
        for size, ms in times.items()
        if any(ms > BEYOND * other_ms * max(1, size / other) for other, other_ms in times.items())
    ]


def beyond_roofline(program: Program, milliseconds: Mapping[str, float]) -> list[str]:
    """Ops of torch and products that took over `BEYOND` times as long as their roofline: the slower of
    arithmetic and memory, at the speed that a quarter of the program's ops exceed, but no less than their
    median time.

    Args: milliseconds: by name. Example: of equal products that take 1, 1, 1 and 30 ms, the last one.
    """
    computations = [i for i in program.instructions if milliseconds.get(i.name, 0.0) > 0]
    # The time of most ops of ours, a gate say, has other reasons.
    computations = [i for i in computations if i.op.startswith("aten.") or i.flops > 0]
    computations = [i for i in computations if i.kind is Kind.COMPUTE and not i.is_free]
    if not computations:
        return []

    def ms_per(amount: Callable[[Instruction], float]) -> float:
        """The lower quartile: a call of a small op takes longer than its work."""
        rates = sorted(milliseconds[i.name] / amount(i) for i in computations if amount(i) > 0)
        return rates[len(rates) // 4] if rates else 0.0

    least = statistics.median(milliseconds[i.name] for i in computations)
    flop_ms, byte_ms = ms_per(lambda i: i.flops), ms_per(lambda i: i.bytes)
    return [
        i.name
        for i in computations
        if milliseconds[i.name] > BEYOND * max(least, i.flops * flop_ms, i.bytes * byte_ms)
    ]


def _link_ms(call: Callable[[int], object], size: int, device: torch.device) -> float:
    """Milliseconds on the link; packing and unpacking count as computation."""
    link.read()
    call(size)
    return link.read().all_to_all_ms


def _total_ms(call: Callable[[int], object], size: int, device: torch.device) -> float:
    finish = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    finish()
    begin = time.perf_counter()
    call(size)
    finish()
    return (time.perf_counter() - begin) * 1e3


def _run_collective(collective: str, group: str, width: int, device: torch.device, size: int) -> object:
    """A collective of `size` bytes of float32 per rank; rows of an all-to-all are spread evenly."""
    ranks = group_size(group)

    def numbers(size: float) -> Tensor:
        return torch.zeros(max(1, int(size) // 4), device=device)

    if collective == "all_to_all":
        rows = max(1, size // (4 * width * ranks))
        count = torch.full((ranks, 1), rows, dtype=torch.int64, device=device)
        rows_SD = torch.zeros(ranks * rows, width, device=device)
        return start_all_to_all(rows_SD, count, count, group, True).wait()
    if collective == "point_to_point":
        around = [(place + 1) % ranks for place in range(ranks)]
        return start_shift([numbers(size)], around, group).wait()
    if collective == "all_reduce":
        return all_reduce(numbers(size), group)
    if collective == "all_gather":
        return all_gather(numbers(size / ranks), 0, group)
    return reduce_scatter(numbers(size / ranks).repeat(ranks), 0, group)


def median_ms(call: Callable[[], float], group: str, repeats: int) -> float:
    """A call's result: the median over runs (without the first), the mean over the ranks."""
    times = []
    for _ in range(repeats + 1):
        if group:
            with waiting("barrier before a measurement", group_of(group)):
                dist.barrier(group=group_of(group))
        times.append(call())
    return float(over_ranks(torch.tensor([statistics.median(times[1:])]), group, "mean")[0])
