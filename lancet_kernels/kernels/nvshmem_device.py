"""NVSHMEM's device functions as Triton sees them, linked from its bitcode (`libnvshmem_device.bc`).

Each is called by every thread of the program; the `_block` ones share the work among them. Only for compiled
kernels: the interpreter has no external functions, and a kernel that uses one of these must be given
`nvshmemx_cumodule_init` once after it is loaded (`lancet_kernels.symmetric.nvshmem`).
"""

import triton
import triton.language as tl
from triton.language import core

# nvshmem_signal_op's operations
SIGNAL_SET = tl.constexpr(9)


@core.extern
def _putmem_nbi_block(dest, source, num_bytes, pe, _semantic=None):
    return core.extern_elementwise(
        "",
        "",
        [dest, source, num_bytes, pe],
        {
            (core.dtype("int64"), core.dtype("int64"), core.dtype("int64"), core.dtype("int32")): (
                "nvshmemx_putmem_nbi_block",
                core.dtype("int32"),
            )
        },
        is_pure=False,
        _semantic=_semantic,
    )


@core.extern
def _fence(_semantic=None):
    return core.extern_elementwise(
        "", "", [], {(): ("nvshmem_fence", core.dtype("int32"))}, is_pure=False, _semantic=_semantic
    )


@core.extern
def _quiet(_semantic=None):
    return core.extern_elementwise(
        "", "", [], {(): ("nvshmem_quiet", core.dtype("int32"))}, is_pure=False, _semantic=_semantic
    )


@core.extern
def _signal_op(address, value, operation, pe, _semantic=None):
    return core.extern_elementwise(
        "",
        "",
        [address, value, operation, pe],
        {
            (core.dtype("int64"), core.dtype("uint64"), core.dtype("int32"), core.dtype("int32")): (
                "nvshmemx_signal_op",
                core.dtype("int32"),
            )
        },
        is_pure=False,
        _semantic=_semantic,
    )


@triton.jit
def put_row(target_ptr, source_ptr, num_elements, peer):
    """Start copying `num_elements` to the same symmetric address on `peer`; `fence` orders, no completion."""
    num_bytes = num_elements.to(tl.int64) * (target_ptr.dtype.element_ty.primitive_bitwidth // 8)
    _putmem_nbi_block(target_ptr.to(tl.int64), source_ptr.to(tl.int64), num_bytes, peer.to(tl.int32))


@triton.jit
def fence():
    """Puts to a PE before it arrive before those after it."""
    _fence()


@triton.jit
def quiet():
    """All puts of the calling threads have arrived."""
    _quiet()


@triton.jit
def set_signal(signal_ptr, value, peer):
    """Set the word at this symmetric address on `peer`, ordered after the fence before it."""
    _signal_op(signal_ptr.to(tl.int64), value.to(tl.uint64), SIGNAL_SET, peer.to(tl.int32))
