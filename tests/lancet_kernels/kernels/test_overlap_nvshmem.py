"""Passes with NVSHMEM, over an emulated network that is late: no bit changes."""

from types import SimpleNamespace

import pytest
import torch

from tests.grids import few_of
from tests.lancet_kernels.kernels.overlap_cases import Case
from tests.lancet_kernels.kernels.overlap_ranks import (
    GuardedMemory,
    check_results,
    check_rows,
    check_same,
    make_layer,
)
from tests.lancet_kernels.kernels.protocol.emulated_network import FarMemory, network
from tests.poisoned_buffers import poisoned_buffers

FP16, BF16 = torch.float16, torch.bfloat16


def far_and_near_on_rank(case: Case, options: dict) -> SimpleNamespace:
    """The same two passes over the network and over pointers -> how often the network was used."""
    with GuardedMemory(timeout_s=30) as memory, FarMemory(timeout_s=30) as far_memory:
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
