"""What is read from the machine code of a kernel: made-up lines as `cuobjdump -sass` prints them."""

from lancet_kernels.kernels.compile import ProductLoop, product_loops, serialized

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
