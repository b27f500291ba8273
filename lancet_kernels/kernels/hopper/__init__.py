"""The overlap kernel in Gluon: a TMA producer warp, two warpgroups that multiply, and warps that copy.

Of Gluon these files use this subset and nothing else, so that they can also be executed without a GPU:

    gl       arange, zeros, full, store, load, convert_layout, sum, allocate_shared_memory, static_range,
             static_assert, warp_specialize, cast by `.to`, layouts as constexprs
    tensors  arithmetic, comparisons, [:, None] and [None, :], `.to`, `.dtype.element_ty`; `quarters` and the
             activations of `portable.gemm`, which reshape, permute and split
    shared   .index(i), .permute([1, 0]), .load(layout), .store(value), and `view` of pipeline.py
    mbarrier init(count=1), wait(parity), expect(bytes), arrive(count=1, pred=)
    wgmma    warpgroup_mma(a, b, acc, is_async=True), warpgroup_mma_wait(num_outstanding, deps=(acc,))
    copies   `copy_async` of pipeline.py, async_copy.commit_group(), async_copy.wait_group(n)
    TMA      `load_tile` and `barrier` of pipeline.py, tma.make_tensor_descriptor, descriptors from the host
    scalars  plain `triton.jit` functions of device, schedule, tasks, steps and portable.gemm; inline assembly
             only in device.fence_tma and opaque

What a plain `triton.jit` function may do when Gluon calls it: everything that creates no block (`tl.arange`,
`tl.zeros`), since Triton cannot lay it out there; so such functions take index ranges as arguments.
"""
