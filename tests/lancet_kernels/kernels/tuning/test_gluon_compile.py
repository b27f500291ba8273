"""The Hopper kernel compiles for sm_90: wgmma as wide as a tile, one always in flight, no spills in loops.

That machine code is read right is proven on made-up lines as `cuobjdump -sass` prints them.
"""

from __future__ import annotations

import re

import pytest

from lancet_kernels.kernels.tuning.compile import ProductLoop, product_loops, serialized
from lancet_kernels.kernels.tuning.compile_pool import compile_all
from lancet_kernels.kernels.tuning.specimens import all_specimens
from tests.lancet_kernels.kernels.tuning import bad_kernels
from tests.lancet_kernels.kernels.tuning.test_compile import TRITONS, kernels_command, printed_with

PRINT_PTX = """
from lancet_kernels.kernels.tuning.compile import _compile
from lancet_kernels.kernels.tuning.specimens import all_specimens
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


@pytest.mark.long  # by default: made-up lines, below
def test_products_that_wait_for_each_other_are_noticed():
    pipelined, joined, waiting = compile_all([*bad_kernels.loops_of_products()], 90, workers=1)
    assert (pipelined.problems, pipelined.compiled.in_flight) == ([], 1)
    few = "0 products in flight, fewer than 1"
    assert joined.problems == ["products wait for each other (C7514 of ptxas)", few]
    assert waiting.problems == [few]


# A loop as in the Hopper kernel, then one in which ptxas waits after each product; both jump back from
# behind, to wait for a barrier, as does the whole program.
SASS = """
        /*0000*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R2 ;   /* 0x0 */
        /*0010*/              @!P1 BRA 0x140 ;
        /*0020*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR12].tnspB, R24 ;
        /*0030*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR12].tnspB, R24, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x1, 0x100 ;
        /*0060*/               @P0 BRA 0x0 ;
        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0080*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR12], R24, gsb0 ;
        /*0090*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*00a0*/                   STL [R1], R2 ;
        /*00b0*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR12], R24, gsb0 ;
        /*00c0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*00d0*/                   LDL R2, [R1] ;
        /*00e0*/               @P0 BRA 0x80 ;
        /*00f0*/                   BRA 0x0 ;
        /*0100*/                   EXIT ;
        /*0140*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R2 ;
        /*0150*/               @P1 BRA 0x20 ;
        /*0160*/                   BRA 0x140 ;
"""


def test_loops_of_products_and_what_their_strictest_wait_leaves_running():
    pipelined, waiting = product_loops(SASS)
    assert pipelined == ProductLoop(7, 2, 1, 0, 0, in_flight=1, shape="64x256x16")
    assert waiting == ProductLoop(7, 2, 0, 1, 1, in_flight=0, shape="64x256x16")
    assert product_loops(SASS.replace("HGMMA", "FFMA")) == ()


def test_what_ptxas_says_of_products():
    log = "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assert serialized(f"{log}\n{log}\n0 bytes spill stores") == ("C7515",)
    assert serialized("ptxas info    : Used 168 registers") == ()
