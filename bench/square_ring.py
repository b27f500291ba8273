"""Is the ring of a SquareLinear hidden, and what does a rank need? Some MLP blocks on 4 CPU ranks.

    torchrun --nproc-per-node 4 bench/square_ring.py             a table: a minute
    torchrun --nproc-per-node 4 bench/square_ring.py --json > square-ring.json

The link is emulated (`--link-gbps`), one thread computes on each rank. *Exposed* is the time for which a rank
waited for the wire although the sender was there; waits for a rank that is late, because ranks share cores,
are counted apart. The same shifts are also done without computation, one after another: *waited for*. The
least of some rounds counts. Nothing hides the shift that takes a layer's input to its first step; with the
default sizes it is 16 % of what travels to a rank of the lower row.

Peak memory of a rank is what torch has allocated at most during a forward and backward (its profiler says),
with input, parameters, gradients and Adam's moments. Beside it stands Megatron's split of the same layers on
as many ranks: columns of the first and rows of the second on each rank, the whole input, the whole output,
which is all-reduced in place.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from itertools import accumulate, chain
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lancet_kernels import SquareLinear
from lancet_kernels.ops.groups import group_name
from lancet_kernels.ops.link import emulate_link, link
from lancet_kernels.ops.shift import start_shift
from lancet_kernels.training.ranks import report_errors, start_ranks

ROUNDS = 5


def main() -> int:
    """Measure, and print on rank 0. -> exit code."""
    parser = argparse.ArgumentParser(description="How far the ring of a SquareLinear is hidden.")
    parser.add_argument("--rows", type=int, default=8192, help="of the input (default: %(default)s)")
    parser.add_argument("--width", type=int, default=512, help="features in and out (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=2048, help="features between (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="MLP blocks (default: %(default)s)")
    parser.add_argument("--link-gbps", type=float, default=2.0, help="emulated (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    rank = start_ranks("cpu", 300.0)
    torch.set_num_threads(1)
    sizes = arguments.width, arguments.hidden
    block = mlps(SquareLinear, arguments.layers, *sizes, {"takes": "skewed"}, {"gives": "skewed"})
    x = torch.randn(arguments.rows // 2, arguments.width // 2, requires_grad=True)
    dy = torch.randn(arguments.rows // 2, arguments.width // 2)
    block(x).backward(dy)  # the first call compares shapes
    emulate_link(arguments.link_gbps)
    linears = [layer for layer in block if isinstance(layer, SquareLinear)]
    beside, alone = [], []
    for _ in range(ROUNDS):
        beside.append(waits(lambda: block(x).backward(dy)))
        alone.append(waits(lambda: [shift_alone(layer, len(x)) for layer in linears]))
    emulate_link(None)
    # Of each the least of the rounds, then the slowest rank.
    figures = torch.tensor([beside, alone], dtype=torch.float64).amin(dim=1)
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    (exposed, late), (waited, _) = figures.tolist()
    peak = torch.tensor(float(peak_bytes(block, x, dy)))
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if rank.rank == 0:
        megatron = megatron_peak_bytes(arguments.rows, arguments.layers, *sizes)
        report = {
            "link": f"emulated, {arguments.link_gbps:g} Gbit/s",
            "rows, width, hidden, layers": [arguments.rows, *sizes, arguments.layers],
            "exposed_ms": exposed,
            "waited_for_ms": waited,
            "exposed_share": exposed / waited,
            "late_ranks_ms": late,
            "peak_mb": peak.item() / 1e6,
            "megatron_peak_mb": megatron / 1e6,
            "peak_share": peak.item() / megatron,
        }
        print(json.dumps(report, indent=1) if arguments.json else _text(report))
    dist.destroy_process_group()
    return 0


def waits(call: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds for which a call waited for the wire, and for ranks that were late."""
    dist.barrier()
    link.read()
    call()
    traffic = link.read()
    return traffic.wire_exposed_ms, traffic.exposed_ms - traffic.wire_exposed_ms


def shift_alone(layer: SquareLinear, rows: int) -> None:
    """The shifts of one forward and backward, one after another, and nothing else."""
    k, n = layer.weight.shape
    weight = [torch.zeros(k, n), torch.zeros_like(layer.bias)]
    tiles = {
        "x": [torch.zeros(rows, n)],
        "dy": [torch.zeros(rows, k)],
        "weight": weight,
        "dweight": weight,
    }
    for name, sources in layer.movements.every():
        start_shift(tiles.get(name.rpartition("_")[2], tiles["x"]), sources, group_name(None), name).wait()


def peak_bytes(block: nn.Module, x: Tensor, dy: Tensor) -> int:
    """The most that a rank has allocated during a forward and backward with Adam's moments there."""
    block.zero_grad()
    x.grad = None
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        block(x).backward(dy)
    events = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    before = x.nbytes + dy.nbytes + 3 * sum(p.nbytes for p in block.parameters())
    return before + max(accumulate(size for _, size in changes))


def mlps(
    linear: type[nn.Module],
    layers: int,
    width: int,
    hidden: int,
    first: Mapping[str, str] = MappingProxyType({}),
    second: Mapping[str, str] = MappingProxyType({}),
) -> nn.Sequential:
    """So many MLP blocks, one behind the other. Args: first, second: more arguments of both linear layers."""
    blocks = (
        (linear(width, hidden, **first), nn.GELU(), linear(hidden, width, **second)) for _ in range(layers)
    )
    return nn.Sequential(*chain.from_iterable(blocks))


def megatron_peak_bytes(rows: int, layers: int, width: int, hidden: int) -> int:
    """The same of Megatron's split: its all-reduces need no memory, so one rank can do without them."""
    part = mlps(nn.Linear, layers, width, hidden // 4)
    return peak_bytes(part, torch.zeros(rows, width, requires_grad=True), torch.zeros(rows, width))


def _text(report: dict) -> str:
    return "\n".join(
        [
            f"ring exposed {report['exposed_ms']:.1f} ms, the same shifts waited for "
            f"{report['waited_for_ms']:.1f} ms: {report['exposed_share']:.0%} ({report['link']})",
            f"besides, ranks waited {report['late_ranks_ms']:.1f} ms for others that were late",
            f"peak memory {report['peak_mb']:.1f} MB a rank, Megatron's split "
            f"{report['megatron_peak_mb']:.1f} MB: {report['peak_share']:.0%}",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(report_errors(main))
