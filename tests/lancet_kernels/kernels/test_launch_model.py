"""The launch model prefers what is obviously better, and knows its bounds."""

import pytest
import torch

from lancet_kernels.kernels.gemm_config import GemmConfig, candidates, default_config
from lancet_kernels.kernels.launch_model import (
    Facts,
    Gemms,
    gemm_ms,
    hardware_of,
    resident_programs,
    roofline_ms,
    rows_ms,
)

H100 = hardware_of(90, "NVIDIA H100 80GB HBM3")
LARGE = Gemms(64, 2048, 2048, 4096, torch.bfloat16)


def test_hardware_by_name_and_by_architecture() -> None:
    assert hardware_of(90, "NVIDIA H200").name == "H200"
    assert hardware_of(90).name == "H100"
    assert hardware_of(89).name == hardware_of(80).name == "A100"
    assert hardware_of(120).name == "B200"


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        # A larger tile reads less per FLOP.
        (GemmConfig(128, 256, 64, 8, 3), GemmConfig(64, 64, 64, 4, 3)),
        # Two stages have less in flight than the latency of memory asks for.
        (GemmConfig(128, 128, 32, 4, 4), GemmConfig(128, 128, 32, 4, 1)),
        # Narrow tiles read their rows from shared memory more often than the tensor cores can wait for.
        (GemmConfig(128, 128, 64, 8, 3), GemmConfig(128, 32, 64, 8, 3)),
    ],
)
def test_an_obviously_better_tile_is_faster(better: GemmConfig, worse: GemmConfig) -> None:
    assert gemm_ms(better, LARGE, H100) < 0.9 * gemm_ms(worse, LARGE, H100)


def test_the_default_is_near_the_best_of_the_model() -> None:
    times = [gemm_ms(c, LARGE, H100) for c in candidates(2048, 2048, 4096, torch.bfloat16, 90)]
    assert times[0] <= 1.2 * min(times)


def test_a_tile_taller_than_its_groups_wastes_rows() -> None:
    few_rows = Gemms(128, 16, 2048, 2048, torch.bfloat16)
    assert gemm_ms(GemmConfig(64, 128, 64, 4, 4), few_rows, H100) < gemm_ms(
        GemmConfig(256, 128, 64, 8, 3), few_rows, H100
    )


def test_one_tile_more_than_fits_costs_a_wave() -> None:
    config = GemmConfig(128, 256, 64, 8, 3)
    one, two = (Gemms(1, 128 * tiles, 256, 8192, torch.bfloat16) for tiles in (H100.sms, H100.sms + 1))
    assert gemm_ms(config, two, H100) > 1.7 * gemm_ms(config, one, H100)


def test_nothing_is_faster_than_the_roofline() -> None:
    for gemms in (LARGE, Gemms(16, 768, 3072, 768, torch.bfloat16), Gemms(1, 16, 16, 16, torch.float32)):
        least = roofline_ms(gemms.flops, gemms.bytes, gemms.dtype, H100)
        for config in candidates(gemms.m, gemms.n, gemms.k, gemms.dtype, 90):
            assert gemm_ms(config, gemms, H100) >= 0.999 * least


def test_registers_and_shared_memory_of_the_compiler_limit_what_is_resident() -> None:
    config = GemmConfig(64, 64, 32, 4, 3)
    assert resident_programs(config, LARGE, H100) == 2
    assert resident_programs(config, LARGE, H100, Facts(registers=128, shared_bytes=30_000)) == 2
    assert resident_programs(config, LARGE, H100, Facts(registers=128, shared_bytes=150_000)) == 1
    wide = default_config(2048, 2048, 4096, torch.bfloat16, 90)
    assert resident_programs(wide, LARGE, H100, Facts(registers=255, shared_bytes=400_000)) == 1


def test_rows_with_too_little_in_flight_are_slower() -> None:
    sizes = (32768, 4096)
    wide = rows_ms((2, 1024), 4, sizes, 2, H100, (1, 4), 80)
    assert wide < rows_ms((1, 256), 8, sizes, 2, H100, (1, 4), 80)
    assert wide >= 32768 * 4096 * 2 * 5 / H100.memory_gb_per_s * 1e-6
