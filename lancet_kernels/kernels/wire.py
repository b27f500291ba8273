"""A wire that is only emulated: when may a message take it, and when would it have arrived?

The wire is one word, the time in nanoseconds at which it is free; messages take it one at a time. One that is
urgent (an all-to-all) takes its time when it enters, behind what is on the wire. One that is not (a sum of
gradients) takes it when the wire is free, so that every urgent message that entered meanwhile goes first:
the rule of `schedules.time.simulate`. Each kernel is one program, which reads `globaltimer`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

# No message takes as long; a wait that does is over.
LONGEST_WAIT_NS = tl.constexpr(60_000_000_000)


@triton.jit(do_not_specialize=["wire_ns"])
def take_wire_kernel(free_ptr, end_ptr, wire_ns):
    """An urgent message takes the wire for `wire_ns`; *end_ptr is when it has arrived.

    Grid: (1,). Work: two atomics.
    Example: free at 500, now 300, wire_ns 40: end 540, free at 540. Free at 200, now 300: end 340.
    """
    tl.atomic_max(free_ptr, globaltimer())
    tl.store(end_ptr, tl.atomic_add(free_ptr, wire_ns) + wire_ns)


@triton.jit(do_not_specialize=["wire_ns"])
def take_free_wire_kernel(free_ptr, end_ptr, wire_ns):
    """A message that is not urgent waits until the wire is free and takes it.

    Grid: (1,). Work: a look at the wire each time that it was taken.
    Example: free at 500, now 300, wire_ns 40: waits until 500; end 540, free at 540. If an urgent message of
    40 takes the wire at 400, free at 540: waits until 540; end 580.
    """
    begin = globaltimer()
    now = begin
    free = tl.atomic_add(free_ptr, begin * 0)
    takes = begin * 0
    while takes == 0:
        now = globaltimer()
        if (free <= now) | (now - begin > LONGEST_WAIT_NS):
            seen = tl.atomic_cas(free_ptr, free, now + wire_ns)
            takes = (seen == free).to(tl.int64)
            free = seen
        else:
            free = tl.atomic_add(free_ptr, begin * 0)
    tl.store(end_ptr, now + wire_ns)


@triton.jit
def await_wire_kernel(end_ptr):
    """Wait until a message has arrived.

    Grid: (1,). Work: none.
    Example: end 540, now 300: returns at 540.
    """
    begin = globaltimer()
    now = begin
    end = tl.load(end_ptr)
    while (now < end) & (now - begin < LONGEST_WAIT_NS):
        now = globaltimer()
