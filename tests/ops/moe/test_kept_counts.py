"""Counts of the rows that are sent, against the reference."""

import pytest
import torch
from torch import Tensor

from lancet_kernels import ops


def naive_kept_counts(used_E: Tensor, capacity: int, ranks: int) -> Tensor:
    """Reference, one expert after the other."""
    kept = [min(int(used), capacity) for used in used_E]
    return torch.tensor(kept, dtype=torch.int64).view(ranks, -1)


@pytest.mark.parametrize("capacity", [0, 3, 100])
def test_kept_counts(capacity: int) -> None:
    used_E = torch.tensor([0, 1, 3, 4, 2, 7])
    expected = naive_kept_counts(used_E, capacity, 2)
    assert torch.equal(ops.kept_counts(used_E, capacity, 2), expected)
    assert expected.tolist()[0] == [0, min(1, capacity), min(3, capacity)]
