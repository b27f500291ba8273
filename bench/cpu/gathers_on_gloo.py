"""Torch alone: what happens to CPU ranks with two gathers of functional collectives under way at once?

    python -m bench.cpu.gathers_on_gloo [--calls 40000] [--one-at-a-time]

`_c10d_functional.all_gather_into_tensor` calls gloo's `allgather_into_tensor_coalesced`. With two of these
under way, waited for in the order in which they were started, a rank ends with SIGSEGV or SIGABRT (heap
corruption) after some thousand calls in torch 2.13; what arrived was never wrong. One at a time all calls are
right. Plans of `optimize` use another method of gloo, `_allgather_base`.

Exit code: 0 all calls were right; 1 a rank ended, which is said in a line.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2
gather, wait = torch.ops._c10d_functional.all_gather_into_tensor, torch.ops._c10d_functional.wait_tensor


def gathers(rank: int, file: str, calls: int, one_at_a_time: bool) -> None:
    """Pairs of gathers of this rank's number, of several sizes; raises where another number arrives."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS)
    assert dist.group.WORLD is not None
    name, sizes = dist.group.WORLD.group_name, random.Random(0)

    for _ in range(calls // 2):
        pair = [torch.full((sizes.choice((8, 64, 256, 1024, 4096)),), float(rank)) for _ in range(2)]
        received = []
        for sent in pair:
            received.append(gather(sent, RANKS, name))
            if one_at_a_time:
                wait(received[-1])
        for sent, tensor in zip(pair, received, strict=True):
            if not torch.equal(wait(tensor), torch.arange(float(RANKS)).repeat_interleave(len(sent))):
                raise ValueError(f"rank {rank} received {tensor}")
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=40000)
    parser.add_argument("--one-at-a-time", action="store_true", help="wait for a gather before the next")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        given = (f"{folder}/store", options.calls, options.one_at_a_time)
        try:
            mp.spawn(gathers, given, nprocs=RANKS)
        except mp.ProcessExitedException as error:
            number = -error.exit_code
            how = signal.Signals(number).name if number > 0 else f"exit code {error.exit_code}"
            print(f"torch {torch.__version__}: a rank ended with {how}")
            return 1
    print(f"torch {torch.__version__}: {options.calls} calls on {RANKS} ranks were right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
