"""The benchmark of SquareLinear's ring: what it prints, and a rank needs less memory than with Megatron's
split."""

import json

import pytest

from tests.processes import BENCH, TORCHRUN, printed


@pytest.mark.long
def test_the_ring_needs_less_memory_than_megatrons_split() -> None:
    sizes = "--rows 2048 --width 128 --hidden 512 --layers 4 --rounds 2 --json".split()
    report = json.loads(printed(*TORCHRUN, 4, BENCH / "cpu" / "square_ring.py", *sizes))
    assert list(report["rings"]) == ["alternating", "straight"]
    ring = report["rings"]["alternating"]
    u = 2048 * 128 * 4  # bytes of the whole input
    parameters = 4 * (2 * 128 * 512 + 512 + 128)
    # Megatron's split keeps three of these for each layer (the input, and quarters of both wide activations),
    # a fourth of the parameters four times; in the backward two gradients come with it.
    megatron = 4 * 3 * u + 4 * 4 * parameters // 4
    assert megatron < 1e6 * report["megatron_peak_mb"] < megatron + 5 * u
    # Each layer's own share: a quarter of the input, and of both wide activations, which are 4 times as wide.
    least = 4 * 2.25 * u + 4 * 4 * parameters // 4
    assert least < 1e6 * ring["peak_mb"] < 1e6 * report["megatron_peak_mb"]
    for of in report["rings"].values():
        assert all(len(of[name]["rounds"]) == 2 for name in ("exposed_ms", "waited_for_ms", "late_ranks_ms"))
        assert of["exposed_share"] == of["exposed_ms"]["least"] / of["waited_for_ms"]["least"]
        assert 0 < of["waited_for_ms"]["least"] <= of["waited_for_ms"]["median"]
    travelling = [of["waited_for_ms"]["least"] for of in report["rings"].values()]
    assert travelling == sorted(travelling), "the fewer hand-overs, the less travels"
