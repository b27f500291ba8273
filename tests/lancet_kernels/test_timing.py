"""The most memory that a step holds, counted on sizes that are known."""

import torch
from torch import nn

from lancet_kernels.timing import peak_memory_gb

MB = 1_000_000


def test_what_is_given_and_the_most_that_is_allocated_at_a_time() -> None:
    """10 MB and 5 MB at a time; 8 MB when the 10 are gone: 15 MB, beside weight, buffer and input."""
    module = nn.Linear(1000, 250, bias=False)
    module.register_buffer("table", torch.zeros(MB // 2))
    given = torch.zeros(MB // 4)

    def run() -> None:
        first = torch.empty(10 * MB // 4)
        second = torch.empty(5 * MB // 4)
        del first
        third = torch.empty(8 * MB // 4)
        assert second.numel() + third.numel() == 13 * MB // 4

    # The input is given twice and counts once.
    assert peak_memory_gb(module, (given, {"again": given[1:]}), run) == (1 + 2 + 1 + 15) / 1000
