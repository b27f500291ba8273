"""Every configuration that is offered fits the GPU it is offered for."""

from itertools import product

import pytest
import torch

from lancet_kernels.kernels.gemm_config import GemmConfig, candidates, default_config
from tests.grids import few_of

ARCHS = [80, 86, 89, 90, 100, 120]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("accumulators", few_of([1, 2]))
def test_defaults_and_candidates_are_valid(arch: int, accumulators: int) -> None:
    for dtype, m, n in product(DTYPES, (1, 64, 65, 4096), (1, 128, 4096)):
        default, *others = candidates(m, n, 4096, dtype, arch, accumulators)
        assert default == default_config(m, n, 4096, dtype, arch, accumulators)
        assert all(c.is_valid(dtype, arch, accumulators) for c in (default, *others))
        assert len({default, *others}) == 1 + len(others)
        assert others, "nothing to tune"


def test_what_does_not_fit_is_not_valid() -> None:
    assert GemmConfig(128, 256, 64, 8, 3).is_valid(torch.bfloat16, 90)
    assert not GemmConfig(128, 256, 64, 8, 5).is_valid(torch.bfloat16, 90)  # 240 KiB of operands
    assert not GemmConfig(128, 256, 64, 8, 4).is_valid(torch.bfloat16, 80)  # 192 KiB
    assert not GemmConfig(128, 256, 64, 4, 3).is_valid(torch.bfloat16, 90)  # 256 registers of accumulators
    assert not GemmConfig(128, 256, 64, 8, 3).is_valid(torch.bfloat16, 90, accumulators=2)
    assert not GemmConfig(96, 128, 64, 4, 3).is_valid(torch.bfloat16, 90)
    assert not GemmConfig(64, 16, 64, 4, 3).is_valid(torch.bfloat16, 90)


def test_programs_that_are_sure_to_be_resident() -> None:
    assert GemmConfig(128, 256, 64, 8, 3).programs_per_sm(torch.bfloat16, 90) == 1
    assert GemmConfig(64, 128, 64, 4, 4).programs_per_sm(torch.bfloat16, 90) == 2
