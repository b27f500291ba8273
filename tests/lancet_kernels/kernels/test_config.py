"""Which tiles fit where."""

import torch

from lancet_kernels.kernels.config import GemmConfig


def test_what_does_not_fit_is_invalid():
    assert GemmConfig(128, 256, 64, 8, 3).is_valid(torch.bfloat16, 90)
    assert not GemmConfig(128, 256, 64, 8, 5).is_valid(torch.bfloat16, 90)  # 240 KiB of operands
    assert not GemmConfig(128, 256, 64, 8, 4).is_valid(torch.bfloat16, 80)  # 192 KiB
    assert not GemmConfig(128, 256, 64, 4, 3).is_valid(torch.bfloat16, 90)  # 256 registers of accumulators
    assert not GemmConfig(128, 256, 64, 8, 3).is_valid(torch.bfloat16, 90, accumulators=2)
    assert not GemmConfig(96, 128, 64, 4, 3).is_valid(torch.bfloat16, 90)
    assert not GemmConfig(64, 16, 64, 4, 3).is_valid(torch.bfloat16, 90)
