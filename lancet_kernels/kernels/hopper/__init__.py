"""The overlap kernel in Gluon: a TMA producer warp, two warpgroups that multiply, and warps that copy.

Of Gluon these files use what `gluon_emulator/language.py` of the tests has and nothing else, so that they can
also be executed without a GPU: blocks and layouts, shared memory with `view` of pipeline.py, mbarriers with a
count of 1, wgmma, asynchronous copies and TMA as pipeline.py names them, inline assembly only in
device.fence_tma and opaque.

What a plain `triton.jit` function may do when Gluon calls it: everything that creates no block (`tl.arange`,
`tl.zeros`), since Triton cannot lay it out there; so such functions take index ranges as arguments.
"""
