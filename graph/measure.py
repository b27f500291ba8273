"""How long do the nodes of a graph, and the collectives of this machine, really take?

Nodes are timed one by one while the whole graph runs on real inputs, with the collectives in it, on
every rank; the medians are averaged over the ranks. Collectives are timed alone over a series of sizes
(Lancet, section 3: 1 KB, 2 KB, 4 KB, ...). Both are collective calls: every rank makes them, with the
same graph.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, fx

from lancet_kernels.graph.communication import CommunicationModel
from lancet_kernels.graph.from_fx import is_instruction
from lancet_kernels.ops.all_reduce import start_all_reduce
from lancet_kernels.ops.all_to_all import start_all_to_all
from lancet_kernels.ops.groups import group_of, group_size
from lancet_kernels.ops.link import link

SMALLEST_BYTES = 1024


def measure_nodes(
    module: fx.GraphModule, inputs: Sequence[object], group: str, repeats: int = 5
) -> dict[str, float]:
    """Median milliseconds of every instruction node, by name; the first run is left out.

    Args: inputs: one per placeholder of the graph.
    """
    names = [node.name for node in module.graph.nodes if is_instruction(node)]
    runs = []
    for _ in range(repeats + 1):
        timer = _Timer(module)
        with torch.no_grad():
            timer.run(*inputs)
        runs.append([timer.milliseconds[name] for name in names])
    link.read()
    medians = torch.tensor([statistics.median(times) for times in zip(*runs[1:], strict=True)])
    return dict(zip(names, _mean_over_ranks(medians, group).tolist(), strict=True))


class _Timer(fx.Interpreter):
    """Runs a graph node by node with a clock beside it."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.milliseconds: dict[str, float] = {}
        self._cuda = torch.cuda.is_available() and any(p.is_cuda for p in module.parameters())

    def run_node(self, node: fx.Node) -> object:
        if not is_instruction(node):
            return super().run_node(node)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        call = getattr(self, node.op)
        self._synchronize()
        begin = time.perf_counter()
        result = call(node.target, args, kwargs)
        self._synchronize()
        self.milliseconds[node.name] = (time.perf_counter() - begin) * 1e3
        return result

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def measure_communication(
    largest: dict[str, int], width: int, group: str, repeats: int = 5
) -> CommunicationModel:
    """Times of `all_to_all` and `all_reduce` from 1 KB up to the largest size of each, in steps of two.

    Args:
        largest: bytes per rank, by collective. width: of the rows of all-to-all buffers.
    """
    starts: dict[str, Callable[[int], object]] = {
        "all_to_all": lambda size: _uniform_all_to_all(size, width, group),
        "all_reduce": lambda size: start_all_reduce([torch.zeros(max(1, size // 4))], group),
    }
    samples = {}
    for collective, start in starts.items():
        found = []
        size = SMALLEST_BYTES
        while True:
            found.append((float(size), _median_ms(lambda: start(size).wait(), group, repeats)))  # noqa: B023
            if size >= largest.get(collective, 0):
                break
            size *= 2
        samples[collective, "world"] = found
    link.read()
    return CommunicationModel.measured(samples)


def _uniform_all_to_all(size: int, width: int, group: str) -> object:
    """`size` bytes of float32 rows on this rank, the same number to every rank."""
    ranks = group_size(group)
    rows = max(1, size // (4 * width * ranks))
    count = torch.full((ranks, 1), rows, dtype=torch.int64)
    return start_all_to_all(torch.zeros(ranks, 1, rows, width), count, count, group)


def _median_ms(call: Callable[[], object], group: str, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        if group:
            dist.barrier(group=group_of(group))
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e3)
    return float(_mean_over_ranks(torch.tensor([statistics.median(times[1:])]), group)[0])


def _mean_over_ranks(values: Tensor, group: str) -> Tensor:
    values = values.to(torch.float64)
    if group:
        dist.all_reduce(values, group=group_of(group))
    return values / group_size(group)
