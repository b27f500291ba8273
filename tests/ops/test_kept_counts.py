"""Counts of the rows that are sent, against the reference."""

import pytest
import torch

from lancet_kernels import ops
from lancet_kernels.ops.kept_counts import naive_kept_counts


@pytest.mark.parametrize("capacity", [0, 3, 100])
def test_kept_counts(capacity: int) -> None:
    used_E = torch.tensor([0, 1, 3, 4, 2, 7])
    expected = naive_kept_counts(used_E, capacity, 2)
    assert torch.equal(ops.kept_counts(used_E, capacity, 2), expected)
    assert expected.tolist()[0] == [0, min(1, capacity), min(3, capacity)]
