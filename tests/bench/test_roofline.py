"""The peaks that benchmarks are compared with."""

import pytest
import torch

from bench.roofline import hardware_of, roofline_ms


def test_hardware_by_name_and_by_architecture() -> None:
    assert hardware_of(90, "NVIDIA H200").name == "H200"
    assert hardware_of(90).name == "H100"
    assert hardware_of(89).name == hardware_of(80).name == "A100"
    assert hardware_of(120).name == "B200"


def test_the_longer_of_arithmetic_and_traffic_counts() -> None:
    h100 = hardware_of(90, "NVIDIA H100 80GB HBM3")
    assert roofline_ms(989e9, 1.0, torch.bfloat16, h100) == pytest.approx(1.0)
    assert roofline_ms(67e9, 1.0, torch.float32, h100) == pytest.approx(1.0)
    assert roofline_ms(989e9, 2 * 3350e6, torch.bfloat16, h100) == pytest.approx(2.0)
