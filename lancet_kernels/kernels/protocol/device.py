"""Communication of device code with another PE: remote pointer, put, signal, wait.

Of a region of symmetric memory a kernel gets `region_ptr`, its own copy; `peers_ptr`, an int64 table of the
base address of every PE's copy, as this PE sees it; and an offset in elements, the same on every PE.

    row of PE 2:       remote_pointer(region_ptr, peers_ptr, 2) + offset
    it has arrived:    put_signal(signals_ptr, signal_peers_ptr, 2, index, word)
    PE 2 waits:        wait(signals_ptr + index, word, ...)

Two transports compile from the same kernels. Pure Triton (NVSHMEM=False) stores through the table. With
NVSHMEM=True a peer whose table entry is 0 (no pointer reaches it) is served by NVSHMEM's device functions,
linked from its bitcode (`symmetric/nvshmem.py`); the interpreter has none. Every thread of a program runs
such a function. A `_block` one wants exactly that: the threads share the work. The others the first thread
alone calls: a signal sent by 256 threads would be 256 messages, and one that is late could set the word back
to an epoch that is over; a fence would be 256 walks over all queue pairs. One is enough: behind the barrier
before it the puts of the whole block have been issued, and over IBGDA it waits for all queue pairs.

Signals are words that only grow: `epoch << 32 | value`. A wait is for "at least", so flags are never reset.

Memory order. A put is plain stores by all threads of the program; `put_signal` first joins the threads
(barrier), then one of them writes the word with release at system scope, which by cumulativity publishes
what the others wrote. `wait` reads with acquire at system scope and hands the value to all threads through
a barrier. Rows that a TMA load then reads were written by ordinary stores of another PE, through another
proxy: call `fence_tma` between the wait and such a load.
"""

import triton
import triton.language as tl
from triton.language import core
from triton.language.extra.cuda import globaltimer

from lancet_kernels.kernels import runtime
from lancet_kernels.kernels.protocol import Sizes
from lancet_kernels.kernels.runtime import clock_ns

# A report (int64 [8]) says which wait ran out of time first:
# [claimed, rank, peer, op, index, expected, seen, clock]; clock: `_now`.
REPORT_WORDS = tl.constexpr(8)
CLOCK = tl.constexpr(7)
# What was waited for: a report's op.
WAIT_RELEASE = tl.constexpr(0)
WAIT_ROWS = tl.constexpr(1)
WAIT_READY = tl.constexpr(2)
WAIT_RESULTS = tl.constexpr(3)
WAIT_COUNTS = tl.constexpr(4)
# No wait: `peer` would receive `expected` rows, more than its region holds, `seen`.
TOO_MANY_ROWS = tl.constexpr(5)
LAST_INDEX = tl.constexpr(0x7FFFFFFF)
INTERPRETED = tl.constexpr(runtime.INTERPRETED)
# Looks at a signal between two at the clock: on a GPU 50 to 100 us.
LOOKS = tl.constexpr(1 if runtime.INTERPRETED else 64)


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
_nvshmem_quiet = _extern("nvshmem_quiet", "int32")
_signal_op = _extern("nvshmemx_signal_op", "int32", "int64", "uint64", "int32", "int32")
_signal_wait_until = _extern("nvshmem_signal_wait_until", "uint64", "int64", "int32", "uint64")


@triton.jit
def _is_first_thread():
    """In one thread of the program. Only for what holds no barrier: the others walk past it."""
    thread = tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    return thread == 0


@triton.jit
def network_put(target_ptr, source_ptr, num_elements, peer):
    """Start a copy to the same symmetric address on `peer`; `network_signal` stays behind it."""
    num_bytes = tl.cast(num_elements, tl.int64) * (target_ptr.dtype.element_ty.primitive_bitwidth // 8)
    _putmem_nbi_block(target_ptr.to(tl.int64), source_ptr.to(tl.int64), num_bytes, tl.cast(peer, tl.int32))


@triton.jit
def network_quiet():
    """All puts of this PE have arrived. The caller joins the threads before and after."""
    if _is_first_thread():
        _nvshmem_quiet()


@triton.jit
def network_signal(signal_ptr, value, peer):
    """Set the word at this address on `peer`, after all puts. The caller joins the threads before."""
    if _is_first_thread():
        _fence()
        operation = tl.cast(SIGNAL_SET, tl.int32)
        _signal_op(signal_ptr.to(tl.int64), tl.cast(value, tl.uint64), operation, tl.cast(peer, tl.int32))


@triton.jit
def network_acquire(signal, at_least):
    """Make puts before the signal at this address, which has reached `at_least`, visible here.

    On GPUs that do not order a network card's writes NVSHMEM has to flush them, and does so in its own wait,
    which returns at once here. The caller joins the threads after.
    """
    if _is_first_thread():
        comparison = tl.cast(COMPARE_GE, tl.int32)
        _signal_wait_until(tl.cast(signal, tl.int64), comparison, tl.cast(at_least, tl.uint64))


@triton.jit
def remote_pointer(region_ptr, peers_ptr, peer):
    """Base of `peer`'s copy of the region, typed like `region_ptr`. 0 if no pointer reaches it.

    Bases are multiples of 16 bytes (`memory.ALIGNMENT`): not knowing it, the compiler stores by elements.
    """
    return tl.multiple_of(tl.load(peers_ptr + peer).to(region_ptr.dtype), 16)


@triton.jit
def word(epoch, value):
    """The signal word: epoch in the high half, value in the low one."""
    return (tl.cast(epoch, tl.int64) << 32) | tl.cast(value, tl.int64)


@triton.jit
def stored_at(region_ptr, peers_ptr, peer, row, stage_ptr, row_here, width, NVSHMEM: tl.constexpr):
    """-> where to store what goes to `row` of a peer's region: there or, where no pointer reaches it, at
    row_here of the stage, from which `send_stored` sends it. Rows are `width` elements; peer and row may be
    blocks. A choice between whole addresses would hide from the compiler how they are aligned.
    """
    base = tl.load(peers_ptr + peer)
    if NVSHMEM:
        row = tl.where(base == 0, row_here, row)
        base = tl.where(base == 0, stage_ptr.to(tl.int64), base)
    return tl.multiple_of(base.to(region_ptr.dtype), 16) + row * width


@triton.jit
def send_stored(target_ptr, peers_ptr, peer, stored_ptr, num, NVSHMEM: tl.constexpr):
    """Start to send the `num` elements that `stored_at` had put into the stage, to where `target` is here.

    The stage, of memory that a network card can read, must stay as it is until `quiet`.
    """
    if NVSHMEM:
        if tl.load(peers_ptr + peer) == 0:
            tl.debug_barrier()
            network_put(target_ptr, stored_ptr, num, peer)


@triton.jit
def put_rows(
    region_ptr, peers_ptr, peer, first, source_ptr, row_ptr, num_rows, D, stage_ptr, first_here,
    NVSHMEM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy source[row[i]] for i < num_rows (<= ROWS) to row first + i of the peer's region; D wide.

    Over NVSHMEM through first_here + i of the stage.
    Example: row = [7, 2], num_rows = 2, first = 5: source[7] goes to row 5, source[2] to row 6.
    """
    target_ptr = stored_at(region_ptr, peers_ptr, peer, first, stage_ptr, first_here, D, NVSHMEM)
    i_row = tl.arange(0, ROWS)
    m_row = i_row < num_rows
    row = tl.load(row_ptr + i_row, mask=m_row, other=0).to(tl.int64)
    for d in range(0, D, BLOCK):
        i_d = d + tl.arange(0, BLOCK)
        m = m_row[:, None] & (i_d < D)[None, :]
        # [ROWS, BLOCK]
        b_x = tl.load(source_ptr + row[:, None] * D + i_d[None, :], mask=m)
        tl.store(target_ptr + i_row[:, None].to(tl.int64) * D + i_d[None, :], b_x, mask=m)
    if NVSHMEM:
        send_stored(
            region_ptr + first * D, peers_ptr, peer, stage_ptr + first_here * D, num_rows * D, NVSHMEM
        )


@triton.jit
def put_values(
    region_ptr, peers_ptr, peer, offset, value, i, num, stage_ptr, NVSHMEM: tl.constexpr
):  # fmt: skip
    """Store value[:num], a block, at `offset` of the peer's region and in stage. i: 0, 1, ..., a block."""
    tl.store(stage_ptr + i, value, mask=i < num)
    p = stored_at(region_ptr, peers_ptr, peer, offset, stage_ptr, offset * 0, 1, NVSHMEM)
    tl.store(p + i, value, mask=i < num)
    send_stored(region_ptr + offset, peers_ptr, peer, stage_ptr, num, NVSHMEM)


@triton.jit
def put_words(
    region_ptr, peers_ptr, peer, offset, source_ptr, num, NVSHMEM: tl.constexpr, SIZE: tl.constexpr, i=None
):  # fmt: skip
    """Copy source[:num] (num <= SIZE) to `offset` of the peer's region.

    source: symmetric memory, where no pointer reaches the peer, that stays until `quiet`. i: 0 to SIZE, from
    a Gluon kernel, which lays out its blocks itself.
    """
    base = tl.load(peers_ptr + peer)
    if i is None:
        i = tl.arange(0, SIZE)
    if NVSHMEM and base == 0:
        network_put(region_ptr + offset, source_ptr, num, peer)
    else:
        value = tl.load(source_ptr + i, mask=i < num)
        tl.store(base.to(region_ptr.dtype) + offset + i, value, mask=i < num)


@triton.jit
def quiet(NVSHMEM: tl.constexpr):
    """All that this program has put has arrived: another program may signal it, and its source may change."""
    tl.debug_barrier()
    if NVSHMEM:
        network_quiet()
        tl.debug_barrier()


@triton.jit
def put_signal(signals_ptr, peers_ptr, peer, index, value, NVSHMEM: tl.constexpr):
    """Set word `index` of the peer's signals, after everything that this program has put there before."""
    tl.debug_barrier()
    base = tl.load(peers_ptr + peer)
    # A fence of NVSHMEM waits for the network: only where the rows took the network, too.
    if NVSHMEM and base == 0:
        network_signal(signals_ptr + index, value, peer)
    else:
        tl.atomic_xchg(base.to(signals_ptr.dtype) + index, value, sem="release", scope="sys")


@triton.jit
def failed(report_ptr):
    """Whether any wait of this PE has timed out. By an atomic, which one thread executes for all: with loads
    threads could diverge before a barrier."""
    free = tl.cast(0, tl.int64)
    return tl.atomic_add(report_ptr, free, sem="relaxed", scope="gpu") != 0


@triton.jit
def report_failure(report_ptr, rank, peer, op, index, expected, seen):
    """Write the report, unless an earlier failure of this PE is in it."""
    free = tl.cast(0, tl.int64)
    if tl.atomic_cas(report_ptr, free, free + 1) == 0:
        tl.store(report_ptr + 1, rank)
        tl.store(report_ptr + 2, peer)
        tl.store(report_ptr + 3, op)
        tl.store(report_ptr + 4, index)
        tl.store(report_ptr + 5, expected)
        tl.store(report_ptr + 6, seen)


@triton.jit
def _now(report_ptr):
    """Nanoseconds, the latest time that any program of this PE has written: threads that read the timer
    themselves would diverge before a barrier."""
    if INTERPRETED:
        return clock_ns()
    else:
        tl.atomic_max(report_ptr + CLOCK, globaltimer(), sem="relaxed", scope="gpu")
        return tl.atomic_add(report_ptr + CLOCK, tl.cast(0, tl.int64), sem="relaxed", scope="gpu")


@triton.jit
def _look_at_clock(looks, deadline, timeout_us, report_ptr):
    """-> now and deadline, which is `timeout_us` after the first look at the clock."""
    now = deadline - 1
    if looks % LOOKS == 0:
        now = _now(report_ptr)
        if deadline == 0:
            deadline = now + tl.cast(timeout_us, tl.int64) * 1000
    return now, deadline


@triton.jit
def wait(signal_ptr, at_least, timeout_us, report_ptr, rank, peer, op, index, NVSHMEM: tl.constexpr = False):
    """Wait until the word is `at_least`, but not longer than `timeout_us`. -> the word seen last.

    When time is up the first to notice writes the report, and every later wait of this PE looks only once:
    the launch ends, and its caller raises. With NVSHMEM, rows that came over the network before the signal
    are visible after it as well.
    """
    seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
    if seen < at_least:
        looks, deadline = tl.cast(0, tl.int32), tl.cast(0, tl.int64)
        now = tl.where(failed(report_ptr), deadline, deadline - 1)
        while (seen < at_least) & (now < deadline):
            seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
            looks += 1
            now, deadline = _look_at_clock(looks, deadline, timeout_us, report_ptr)
        if seen < at_least:
            report_failure(report_ptr, rank, peer, op, index, at_least, seen)
    if NVSHMEM and seen >= at_least:
        network_acquire(signal_ptr, at_least)
        tl.debug_barrier()
    return seen


@triton.jit
def _missing(signal_ptrs, mask, at_least):
    """-> the words, a block, and 1 for each that `mask` asks for and that is too small."""
    nothing = mask.to(tl.int64) * 0
    seen = tl.atomic_add(signal_ptrs, nothing, mask=mask, sem="acquire", scope="sys")
    return seen, (mask & (seen < at_least)).to(tl.int32)


@triton.jit
def wait_all(
    signal_ptrs, mask, at_least, timeout_us, report_ptr, rank, peers, op, indices,
    NVSHMEM: tl.constexpr = False,
):  # fmt: skip
    """`wait` for a block of signals at once: until each word where `mask` holds is `at_least`. -> are they?

    signal_ptrs, mask, peers, indices: blocks. A report names the one missing with the smallest index.
    """
    seen, missing = _missing(signal_ptrs, mask, at_least)
    if tl.sum(missing, 0) > 0:
        looks, deadline = tl.cast(0, tl.int32), tl.cast(0, tl.int64)
        now = tl.where(failed(report_ptr), deadline, deadline - 1)
        while (tl.sum(missing, 0) > 0) & (now < deadline):
            seen, missing = _missing(signal_ptrs, mask, at_least)
            looks += 1
            now, deadline = _look_at_clock(looks, deadline, timeout_us, report_ptr)
        if tl.sum(missing, 0) > 0:
            index = tl.min(tl.where(missing != 0, indices, LAST_INDEX), 0)
            first = (missing != 0) & (indices == index)
            peer = tl.max(tl.where(first, peers, 0), 0)
            report_failure(report_ptr, rank, peer, op, index, at_least, tl.max(tl.where(first, seen, 0), 0))
    if NVSHMEM:
        # What one word needs to be visible serves for all.
        address = tl.max(tl.where(mask & (seen >= at_least), signal_ptrs.to(tl.int64), 0), 0)
        if address != 0:
            network_acquire(address, at_least)
    # Each thread has acquired its own words; the barrier makes the published data visible to all threads.
    tl.debug_barrier()
    return tl.sum(missing, 0) == 0


@triton.jit
def fence_tma(TMA: tl.constexpr):
    """Between a wait and a TMA load of what has arrived: the rows came through the generic proxy."""
    if TMA and not INTERPRETED:
        # Not a flag and not ordering between PEs: the one PTX instruction that Triton has no word for.
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def opaque(value):
    """value, an integer of which the compiler knows nothing: what follows from it is computed behind this.

    Otherwise LLVM computes what partitions of a Gluon kernel, or its tasks, have in common ahead of all, and
    ptxas spills it. Costs nothing: ptxas removes the move.
    """
    if INTERPRETED:
        return value
    else:
        WIDE: tl.constexpr = value.dtype == tl.int64
        return tl.inline_asm_elementwise(
            "mov.b64 $0, $1;" if WIDE else "mov.b32 $0, $1;", "=l,l" if WIDE else "=r,r", [value],
            dtype=value.dtype, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def opaque_width(width):
    """`opaque` of a multiple of 8, which the compiler sees: Triton 3.6 takes no hint on what that returns."""
    return opaque(width) // 8 * 8


@triton.jit
def opaque_sizes(sizes):
    """All of them `opaque`: extended to 64 bits, or divided, where they are needed only."""
    return Sizes(
        opaque(sizes.rank), opaque(sizes.W), opaque(sizes.L), opaque_width(sizes.D), opaque_width(sizes.F),
        opaque_width(sizes.H), opaque(sizes.R), opaque(sizes.tiles), opaque(sizes.chunks), sizes.timeout_us,
        opaque(sizes.num_problems), sizes.dense_tiles, sizes.limit,
    )  # fmt: skip
