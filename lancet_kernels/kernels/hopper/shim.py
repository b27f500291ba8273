"""What the Hopper kernel uses of Gluon, under one name from Triton 3.6 to 3.9.

The files beside this one use this subset and nothing else, so that they can also be executed without
a GPU:

    gl       arange, zeros, full, store, load, convert_layout, sum, allocate_shared_memory, static_range,
             static_assert, warp_specialize, cast by `.to`, layouts as constexprs
    tensors  arithmetic, comparisons, [:, None] and [None, :], `.to`, `.dtype.element_ty`; `quarters` and the
             activations of `portable.gemm`, which reshape, permute and split
    shared   .index(i), .permute([1, 0]), .load(layout), .store(value), and `view` below
    mbarrier init(count=1), wait(parity), expect(bytes), arrive(count=1, pred=)
    wgmma    warpgroup_mma(a, b, acc, is_async=True), warpgroup_mma_wait(num_outstanding, deps=(acc,))
    copies   `copy_async` below, async_copy.commit_group(), async_copy.wait_group(n)
    TMA      `load_tile` and `barrier` below, tma.make_tensor_descriptor, descriptors from the host
    scalars  plain `triton.jit` functions of device, schedule, tasks, steps, and of portable.kernel and
             portable.tiles; inline assembly only in device.fence_tma and opaque

What a plain `triton.jit` function may do when Gluon calls it: everything that creates no block (`tl.arange`,
`tl.zeros`), since Triton cannot lay it out there; so such functions take index ranges as arguments.
"""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

# (descriptor, [row, column], mbarrier, shared memory): start copying a box; the mbarrier counts its bytes.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
# (shared memory, pointers, mask): start copying a block without registers, 16 bytes at once (cp.async).
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
# All threads of the partition.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@builtin
def view(memory: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """The same bytes of shared memory with another shape and layout."""
    reinterpret = getattr(memory, "reinterpret", None) or memory._reinterpret
    shape = [_unwrap_if_constexpr(size) for size in shape]
    return reinterpret(memory.dtype, shape, _unwrap_if_constexpr(layout), _semantic=_semantic)
