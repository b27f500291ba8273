"""Is the ring of a SquareLinear hidden, and what does a rank hold? Two layers and a GELU on 4 CPU ranks.

    torchrun --nproc-per-node 4 bench/square_ring.py             a table: a minute
    torchrun --nproc-per-node 4 bench/square_ring.py --json > square-ring.json

The link is emulated (`--link-gbps`), one thread computes on each rank; the least of some rounds counts,
because a rank also waits for one that is late. The same shifts are also done without computation, one after
another, and waited for. What a rank holds at the end of the forward (parameters with gradients and Adam's
moments, and what the backward needs) stands beside Megatron's split of the same layers: columns of the
first and rows of the second on each rank, and the whole input.
"""

from __future__ import annotations

import argparse
import json

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lancet_kernels import SquareLinear
from lancet_kernels.ops.groups import group_name
from lancet_kernels.ops.link import emulate_link, link
from lancet_kernels.ops.shift import start_shift
from lancet_kernels.square_layer import derived_movements
from lancet_kernels.training.ranks import report_errors, start_ranks

ROUNDS = 5


def main() -> int:
    """Measure, and print on rank 0. -> exit code."""
    parser = argparse.ArgumentParser(description="How far the ring of a SquareLinear is hidden.")
    parser.add_argument("--rows", type=int, default=2048, help="of the input (default: %(default)s)")
    parser.add_argument("--width", type=int, default=2048, help="features in and out (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=2048, help="features between (default: %(default)s)")
    parser.add_argument("--link-gbps", type=float, default=2.0, help="emulated (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    rank = start_ranks("cpu", 300.0)
    torch.set_num_threads(1)
    block = nn.Sequential(
        SquareLinear(arguments.width, arguments.hidden),
        nn.GELU(),
        SquareLinear(arguments.hidden, arguments.width),
    )
    x = torch.randn(arguments.rows // 2, arguments.width // 2, requires_grad=True)
    block(x).sum().backward()
    emulate_link(arguments.link_gbps)
    exposed = min(exposed_ms(lambda: block(x).sum().backward()) for _ in range(ROUNDS))
    waited = min(
        exposed_ms(lambda: [shift_alone(layer, len(x)) for layer in (block[0], block[2])])
        for _ in range(ROUNDS)
    )
    emulate_link(None)
    figures = torch.tensor([exposed, waited], dtype=torch.float64)
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    if rank.rank == 0:
        report = {
            "link": f"emulated, {arguments.link_gbps:g} Gbit/s",
            "rows, width, hidden": [arguments.rows, arguments.width, arguments.hidden],
            "exposed_ms": figures[0].item(),
            "waited_for_ms": figures[1].item(),
            "exposed_share": (figures[0] / figures[1]).item(),
            "held_mb": held_bytes(block, x) / 1e6,
            "megatron_held_mb": megatron_bytes(arguments.rows, arguments.width, arguments.hidden) / 1e6,
        }
        print(json.dumps(report, indent=1) if arguments.json else _text(report))
    else:
        held_bytes(block, x)
    dist.destroy_process_group()
    return 0


def exposed_ms(call) -> float:
    """Milliseconds for which computation waited for the link during a call."""
    dist.barrier()
    link.read()
    call()
    return link.read().exposed_ms


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
    for name, sources in derived_movements(1)._asdict().items():
        if name != "dy_directly":
            for step in sources if isinstance(sources[0], tuple) else (sources,):
                if list(step) != sorted(step):
                    start_shift(
                        tiles.get(name.rpartition("_")[2], tiles["x"]), step, group_name(None), name
                    ).wait()


def held_bytes(block: nn.Module, x: Tensor) -> int:
    """Of a rank, between forward and backward."""
    saved: dict[int, int] = {}
    own = {p.data_ptr() for p in block.parameters()}

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        y = block(x)
    held = sum(saved.values())
    del y
    return held + 4 * sum(p.nbytes for p in block.parameters())


def megatron_bytes(rows: int, width: int, hidden: int) -> int:
    """The same of Megatron's split: it needs no ranks to be counted."""
    part = nn.Sequential(nn.Linear(width, hidden // 4), nn.GELU(), nn.Linear(hidden // 4, width))
    return held_bytes(part, torch.zeros(rows, width, requires_grad=True))


def _text(report: dict) -> str:
    return "\n".join(
        [
            f"ring exposed {report['exposed_ms']:.1f} ms, the same shifts waited for "
            f"{report['waited_for_ms']:.1f} ms: {report['exposed_share']:.0%} ({report['link']})",
            f"held between forward and backward: {report['held_mb']:.1f} MB a rank, Megatron's split "
            f"{report['megatron_held_mb']:.1f} MB",
        ]
    )


if __name__ == "__main__":
    raise SystemExit(report_errors(main))
