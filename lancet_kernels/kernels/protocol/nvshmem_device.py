"""NVSHMEM's device functions as Triton sees them, linked from its bitcode (`symmetric/nvshmem.py`).

Every thread of a program runs an external function. A `_block` one wants exactly that: the threads share
the work. The others are for one thread, and here the first one alone calls them:

- a signal sent by 256 threads would be 256 messages, and one that is late could set the word back to an
  epoch that is over;
- a fence of 256 threads would be 256 walks over all queue pairs. One is enough: behind the barrier before
  it, the puts of the whole block have been issued, and over IBGDA the fence waits for all queue pairs.

Only for compiled kernels: the interpreter has no external functions, and a kernel that uses one of these
must be given `nvshmemx_cumodule_init` once after it is loaded (`lancet_kernels.kernels.symmetric.nvshmem`).
"""

import triton
import triton.language as tl
from triton.language import core

# nvshmemx_signal_op_t and nvshmemi_cmp_type of NVSHMEM's headers
SIGNAL_SET = tl.constexpr(9)
COMPARE_GE = tl.constexpr(5)


def _extern(symbol, result, *types):
    """The device function `symbol`, with arguments of these types, to be called in a kernel."""

    @core.extern
    def call(*arguments, _semantic=None):
        symbols = {tuple(map(core.dtype, types)): (symbol, core.dtype(result))}
        return core.extern_elementwise("", "", list(arguments), symbols, is_pure=False, _semantic=_semantic)

    return call


_putmem_nbi_block = _extern("nvshmemx_putmem_nbi_block", "int32", "int64", "int64", "int64", "int32")
_fence = _extern("nvshmem_fence", "int32")
_quiet = _extern("nvshmem_quiet", "int32")
_signal_op = _extern("nvshmemx_signal_op", "int32", "int64", "uint64", "int32", "int32")
_signal_wait_until = _extern("nvshmem_signal_wait_until", "uint64", "int64", "int32", "uint64")


@triton.jit
def _is_first_thread():
    """True in one thread of the program. Only for what holds no barrier: the others walk past it."""
    thread = tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    return thread == 0


@triton.jit
def put_row(target_ptr, source_ptr, num_elements, peer):
    """Start a copy to the same symmetric address on `peer`; `set_signal` stays behind it, `quiet` waits."""
    num_bytes = tl.cast(num_elements, tl.int64) * (target_ptr.dtype.element_ty.primitive_bitwidth // 8)
    _putmem_nbi_block(target_ptr.to(tl.int64), source_ptr.to(tl.int64), num_bytes, tl.cast(peer, tl.int32))


@triton.jit
def quiet():
    """All puts of this PE have arrived. The caller joins the threads before and after."""
    if _is_first_thread():
        _quiet()


@triton.jit
def set_signal(signal_ptr, value, peer):
    """Set the word at this address on `peer`, after all puts. The caller joins the threads before."""
    if _is_first_thread():
        _fence()
        operation = tl.cast(SIGNAL_SET, tl.int32)
        _signal_op(signal_ptr.to(tl.int64), tl.cast(value, tl.uint64), operation, tl.cast(peer, tl.int32))


@triton.jit
def acquire(signal, at_least):
    """What was put before the signal at this address, seen to be `at_least`, is visible here.

    A look at the flag is not enough for what a network card has written: on GPUs that do not order its
    writes NVSHMEM has to flush them, and does so in its own wait, which returns at once here. The caller
    joins the threads after.
    """
    if _is_first_thread():
        comparison = tl.cast(COMPARE_GE, tl.int32)
        _signal_wait_until(tl.cast(signal, tl.int64), comparison, tl.cast(at_least, tl.uint64))
