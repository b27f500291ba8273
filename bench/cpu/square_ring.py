"""Is the ring of a SquareLinear hidden, and what does a rank need? Some MLP blocks on 4 CPU ranks.

    torchrun --nproc-per-node 4 bench/cpu/square_ring.py             a table: some minutes
    torchrun --nproc-per-node 4 bench/cpu/square_ring.py --json > square-ring.json

Two ways to share the same layers:

    alternating   fc1 takes skewed tiles, fc2 gives them: nothing travels between layers
    straight      every layer takes and gives straight ones: the narrower of them travels once more

The link is emulated (`--link-gbps`), one thread computes on each rank. *Exposed* is the time for which a rank
waited for the wire although the sender was there; waits for a rank that is late, because ranks share cores,
are counted apart. The same shifts are also done without computation, one after another: *waited for*. Rounds
of both alternate; of each rank the least counts, and the slowest rank; medians stand beside.

Peak memory of a rank is what torch has allocated at most during a forward and backward (its profiler says),
with input, parameters, gradients and Adam's moments. Beside it stands Megatron's split of the same layers on
as many ranks: columns of the first and rows of the second on each rank, the whole input, the whole output,
which is all-reduced in place.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from itertools import chain, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lancet_kernels import SquareLinear
from lancet_kernels.errors import UserError
from lancet_kernels.measuring.peak_memory import allocated_on_cpu
from lancet_kernels.ops.comm.groups import group_name
from lancet_kernels.ops.comm.link import emulate_link, link
from lancet_kernels.ops.comm.shift import start_shift
from lancet_kernels.training.ranks import report_errors, start_ranks

RINGS: Mapping[str, tuple[dict[str, str], dict[str, str]]] = {
    "alternating": ({"takes": "skewed"}, {"gives": "skewed"}),
    "straight": ({}, {}),
}
"""More arguments of both linear layers of a block."""
FIGURES = ("exposed_ms", "late_ranks_ms", "waited_for_ms")
RANKS = 4


def main() -> int:
    """Measure, and print on rank 0. -> exit code."""
    parser = argparse.ArgumentParser(description="How far the ring of a SquareLinear is hidden.")
    parser.add_argument("--rows", type=int, default=8192, help="of the input (default: %(default)s)")
    parser.add_argument("--width", type=int, default=512, help="features in and out (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=2048, help="features between (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="MLP blocks (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of each (default: %(default)s)")
    parser.add_argument("--link-gbps", type=float, default=2.0, help="emulated (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    rank = start_ranks("cpu", 300.0)
    if dist.get_world_size() != RANKS:
        raise UserError(
            "ranks of square_ring.py",
            got=dist.get_world_size(),
            expected=RANKS,
            do="start it with torchrun --nproc-per-node 4",
        )
    torch.set_num_threads(1)
    sizes = arguments.layers, arguments.width, arguments.hidden
    blocks = {name: mlps(SquareLinear, *sizes, *more) for name, more in RINGS.items()}
    x = torch.randn(arguments.rows // 2, arguments.width // 2, requires_grad=True)
    dy = torch.randn(arguments.rows // 2, arguments.width // 2)
    for block in blocks.values():
        block(x).backward(dy)  # the first call compares shapes
    rounds = measured(blocks, x, dy, arguments.rounds, arguments.link_gbps)
    report = {
        "benchmark": "square ring",
        "device": f"{platform.processor() or platform.machine()} CPU, {os.cpu_count()} cores",
        "datetime": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "link": "emulated",
        **{name: getattr(arguments, name) for name in ("link_gbps", "rows", "width", "hidden", "layers")},
        "ranks": RANKS,
        "rings": {name: figures(rounds[n], blocks[name], x, dy) for n, name in enumerate(RINGS)},
        "megatron_peak_mb": 1e-6 * megatron_peak_bytes(arguments.rows, *sizes),
    }
    if rank.rank == 0:
        print(json.dumps(report, indent=1) if arguments.json else _text(report))
    dist.destroy_process_group()
    return 0


def measured(blocks: Mapping[str, nn.Sequential], x: Tensor, dy: Tensor, rounds: int, gbps: float) -> Tensor:
    """[rings, rounds, FIGURES] of this rank, in ms."""
    emulate_link(gbps)
    times = torch.zeros(len(blocks), rounds, len(FIGURES), dtype=torch.float64)
    for r, (n, block) in product(range(rounds), enumerate(blocks.values())):
        exposed, late = waits(partial(_forward_backward, block, x, dy))
        layers = [layer for layer in block if isinstance(layer, SquareLinear)]
        waited, _ = waits(partial(_shift_all, layers, len(x)))
        times[n, r] = torch.tensor([exposed, late, waited])
    emulate_link(None)
    return times


def figures(rounds: Tensor, block: nn.Sequential, x: Tensor, dy: Tensor) -> dict[str, Any]:
    """What the report says of one of `RINGS`. Collective."""
    # Of each rank the least of the rounds, or their median, then the slowest rank.
    least, median, slowest = rounds.amin(0), rounds.median(0).values, rounds.clone()
    peak = torch.tensor(float(peak_bytes(block, x, dy)))
    for tensor in (least, median, slowest, peak):
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
    of: dict[str, Any] = {
        name: {"least": least[n].item(), "median": median[n].item(), "rounds": slowest[:, n].tolist()}
        for n, name in enumerate(FIGURES)
    }
    return of | {
        "exposed_share": of["exposed_ms"]["least"] / of["waited_for_ms"]["least"],
        "exposed_share_of_medians": of["exposed_ms"]["median"] / of["waited_for_ms"]["median"],
        "peak_mb": 1e-6 * peak.item(),
    }


def waits(call: Callable[[], object]) -> tuple[float, float]:
    """Milliseconds for which a call waited for the wire, and for ranks that were late."""
    dist.barrier()
    link.read()
    call()
    traffic = link.read()
    return traffic.wire_exposed_ms, traffic.exposed_ms - traffic.wire_exposed_ms


def _forward_backward(block: nn.Module, x: Tensor, dy: Tensor) -> None:
    block(x).backward(dy)


def _shift_all(layers: Sequence[SquareLinear], rows: int) -> None:
    """The shifts of one forward and backward, one after another, and nothing else."""
    for layer in layers:
        k, n = layer.weight.shape
        x, y, weight = torch.zeros(rows, n), torch.zeros(rows, k), torch.zeros(k, n)
        tiles = {"x": x, "dx": x, "y": y, "dy": y, "weight": weight}
        for where, tensor, sources in layer.shifts():
            start_shift([tiles[tensor]], sources, group_name(None), f"{tensor}, {where}").wait()


def peak_bytes(block: nn.Module, x: Tensor, dy: Tensor) -> int:
    """The most that a rank has allocated during a forward and backward with Adam's moments there."""
    block.zero_grad()
    x.grad = None
    before = x.nbytes + dy.nbytes + 3 * sum(p.nbytes for p in block.parameters())
    return before + allocated_on_cpu(partial(_forward_backward, block, x, dy))


def mlps(
    linear: type[nn.Module], layers: int, width: int, hidden: int, first: dict, second: dict
) -> nn.Sequential:
    """So many MLP blocks, one behind the other. Args: first, second: more arguments of both linear layers."""
    blocks = (
        (linear(width, hidden, **first), nn.GELU(), linear(hidden, width, **second)) for _ in range(layers)
    )
    return nn.Sequential(*chain.from_iterable(blocks))


def megatron_peak_bytes(rows: int, layers: int, width: int, hidden: int) -> int:
    """The same of Megatron's split: its all-reduces need no memory, so one rank can do without them."""
    part = mlps(nn.Linear, layers, width, hidden // 4, {}, {})
    return peak_bytes(part, torch.zeros(rows, width, requires_grad=True), torch.zeros(rows, width))


def _text(report: Mapping[str, Any]) -> str:
    megatron = report["megatron_peak_mb"]
    lines = [
        f"{report['layers']} MLP blocks {report['width']} x {report['hidden']}, {report['rows']} rows, 4 CPU "
        f"ranks, emulated link of {report['link_gbps']:g} Gbit/s; ms a forward and backward, least (median)"
    ]
    lines += [
        f"{name:12} ring exposed {_least_and_median(of['exposed_ms'])}, the same shifts waited for "
        f"{_least_and_median(of['waited_for_ms'])}: {of['exposed_share']:.0%} "
        f"({of['exposed_share_of_medians']:.0%}); waits for late ranks "
        f"{_least_and_median(of['late_ranks_ms'])}; peak memory {of['peak_mb']:.1f} MB a rank, "
        f"{of['peak_mb'] / megatron:.0%} of the {megatron:.1f} MB of Megatron's split"
        for name, of in report["rings"].items()
    ]
    return "\n".join(lines)


def _least_and_median(of: Mapping[str, float]) -> str:
    return f"{of['least']:.1f} ({of['median']:.1f})"


if __name__ == "__main__":
    raise SystemExit(report_errors(main))
