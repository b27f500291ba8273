"""The Hopper kernel compiles for sm_90: wgmma as wide as a tile, one always in flight, no spills in loops."""

from __future__ import annotations

import re

import pytest

from lancet_kernels.kernels.compile import compile_all
from lancet_kernels.kernels.specimens import all_specimens
from tests.lancet_kernels.kernels.tuning import bad_kernels
from tests.lancet_kernels.kernels.tuning.test_compile import TRITONS, kernels_command, printed_with

PRINT_PTX = """
from lancet_kernels.kernels.compile import _compile
from lancet_kernels.kernels.specimens import all_specimens
config = "forward gelu bf16 128x256x64 w8 s4"
(specimen,) = [s for s in all_specimens(90) if (s.name, s.config) == ("gluon_overlap", config)]
print(_compile(specimen, 90)[0].asm["ptx"])
"""


def variants(arch: int) -> list[str]:
    return [specimen.config for specimen in all_specimens(arch) if specimen.name == "gluon_overlap"]


@pytest.mark.long
@pytest.mark.parametrize("triton", TRITONS)
def test_every_variant_compiles(triton):
    found = kernels_command(triton, "--arch", "sm_90", "--name", "gluon_overlap")
    assert [row["config"] for row in found["kernels"]] == variants(90)
    for row in found["kernels"]:
        assert (row["problems"], row["serialized"]) == ([], []), row
        # Products across rows, of weight gradients, have a loop of their own.
        across = row["config"].startswith("backward") or "+dw" in row["config"]
        assert len(row["loops"]) == 1 + across, row
        for loop in row["loops"]:
            # A step of 64: four products, and 50 to 60 instructions of addresses. A barrier before its place
            # is empty; with Triton 3.6 also one before the wait for the operands.
            barriers = 2 if triton == "oldest" else 1
            assert (loop["shape"], loop["products"], loop["barriers"]) == ("64x256x16", 4, barriers), row
            assert (loop["in_flight"], loop["spill_stores"], loop["spill_loads"]) == (1, 0, 0), row
            assert loop["instructions"] <= 70, row


@pytest.mark.long
@pytest.mark.parametrize("triton", TRITONS)
def test_stores_are_16_bytes_wide(triton):
    ptx = printed_with(triton, "-c", PRINT_PTX)
    assert re.search(r"st\.global\S*\.v4", ptx)
    assert not re.search(r"st\.global\S*\.b16", ptx)


def test_there_are_none_for_other_architectures():
    assert len(variants(90)) > 10
    assert variants(80) == variants(100) == []


def test_products_that_wait_for_each_other_are_noticed():
    pipelined, serialized, waiting = compile_all([*bad_kernels.loops_of_products()], 90, workers=1)
    assert (pipelined.problems, pipelined.compiled.in_flight) == ([], 1)
    few = "0 products in flight, fewer than 1"
    assert serialized.problems == ["products wait for each other (C7514 of ptxas)", few]
    assert waiting.problems == [few]
