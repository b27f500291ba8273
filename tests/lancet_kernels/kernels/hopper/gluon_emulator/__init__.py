"""An emulator of the part of Gluon that warp-specialised kernels for sm_90 use. It runs on a CPU.

Gluon has no interpreter of its own. This one executes the Python source of `@gluon.jit` functions, and of the
`@triton.jit` functions that they call, on the tensors of Triton's interpreter, so that numbers are rounded as
there. Partitions, programs and PEs are tasks of one scheduler, whose order a seed decides.

    emulator = Emulator(seed=3)
    emulator.run(lambda: emulator.kernel(kernel)[(2,)](a, b, BLOCK=16))

What a run shows: the protocol between partitions, programs and PEs (mbarriers, phases, bytes, stages, slots,
signals, claims) computes the right numbers in that order of events, and has neither a deadlock nor one of the
races that `shared_memory.py`, `async_copies.py` and `global_memory.py` know. Nothing is shown of orders that
no seed has drawn. Not modelled: the threads of a partition (it is one thread; only its stores to global
memory and the reads of its mmas are delayed), layouts, registers, sizes of shared memory, swizzling and bank
conflicts; the order between proxies but for fence.proxy.async, which is asked for between an acquire and a
TMA load (an mma of what a partition stored itself is refused, and so is all of Gluon that
`kernels.hopper` does not name); the order of loads; scopes of atomics; clusters. Whether a kernel
compiles and what it needs is for the compiler to say.
"""

from tests.lancet_kernels.kernels.hopper.gluon_emulator.emulator import Emulator
from tests.lancet_kernels.kernels.hopper.gluon_emulator.scheduler import (
    Deadlock,
    EmulationError,
    Misuse,
    Race,
)

__all__ = ["Deadlock", "EmulationError", "Emulator", "Misuse", "Race"]
