"""Specimens with something wrong each, to see that the compile checks notice (test_compile.py)."""

import os
from collections.abc import Iterator
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from lancet_kernels.kernels.specimens import Specimen


@triton.jit
def product(a_ptr, b_ptr, out_ptr, N: tl.constexpr, K: tl.constexpr):
    """out[N, N] = a[N, K] @ b[K, N] in one program and one step: a large K takes much shared memory."""
    i_n, i_k = tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + i_n[:, None] * K + i_k[None, :])
    b = tl.load(b_ptr + i_k[:, None] * N + i_n[None, :])
    tl.store(out_ptr + i_n[:, None] * N + i_n[None, :], tl.dot(a, b))


@triton.jit
def copy(source_ptr, out_ptr, N: tl.constexpr):
    """out = source; with few registers, what was loaded before the first store has to wait in memory."""
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(source_ptr + i))


@triton.jit
def refused(source_ptr, out_ptr, N: tl.constexpr):
    """Does not compile."""
    tl.static_assert(N > 10**6, "N is too small for this kernel")


@gluon.jit
def products(out_ptr, steps, TOUCH: gl.constexpr, LEFT: gl.constexpr):
    """A sum of products [64, 16], of which LEFT go on while the next starts. TOUCH: whose accumulators are
    changed meanwhile, so that ptxas lets each wait."""
    A: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    B: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 16], gl.bfloat16)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    a = gl.allocate_shared_memory(gl.bfloat16, [64, 64], A)
    b = gl.allocate_shared_memory(gl.bfloat16, [64, 16], B)
    acc = gl.zeros((64, 16), gl.float32, MMA)
    for _ in range(steps):
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=LEFT, deps=(acc,))
        if TOUCH:
            acc += 1.0
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    i_m = gl.arange(0, 64, gl.SliceLayout(1, MMA))
    i_n = gl.arange(0, 16, gl.SliceLayout(0, MMA))
    gl.store(out_ptr + i_m[:, None] * 16 + i_n[None, :], acc)


class Deadly:
    """Ends the process that looks at it, as LLVM does when an assertion of its own fails."""

    fn = SimpleNamespace(__module__=__name__, __name__="deadly")

    @property
    def arg_names(self) -> list[str]:
        os.write(2, b"LLVM ERROR: out of ideas\n")
        os._exit(134)


deadly = Deadly()


def loops_of_products() -> Iterator[Specimen]:
    """One that is pipelined, one that ptxas serializes, and one that waits by itself."""
    for name, touch, left in (("pipelined", False, 1), ("serialized", True, 1), ("waiting", False, 0)):
        sizes = {"steps": 5, "TOUCH": touch, "LEFT": left, "num_warps": 4}
        arguments = {"out_ptr": torch.empty(0, dtype=torch.float32)} | sizes
        yield Specimen(name, "test", products, arguments, wgmma=True, in_flight=1)


def specimens(arch: int) -> Iterator[Specimen]:
    """One specimen for each thing that can be wrong, and one that is right."""

    def specimen(name: str, kernel: object, dtype: torch.dtype, sizes: dict, **more: object) -> Specimen:
        pointers = ("a_ptr", "b_ptr", "out_ptr") if kernel is product else ("source_ptr", "out_ptr")
        tensors = {pointer: torch.empty(0, dtype=dtype) for pointer in pointers}
        return Specimen(name, "test", kernel, tensors | sizes, **more)

    small, brain, full = {"N": 64, "K": 64}, torch.bfloat16, torch.float32
    yield specimen("good", product, brain, small, wgmma=True)
    yield specimen("spills", copy, full, {"N": 8192, "maxnreg": 32})
    yield specimen("shared", product, brain, {"N": 64, "K": 1024, "num_warps": 8})
    yield specimen("no-wgmma", copy, full, {"N": 128}, wgmma=True)
    yield specimen("no-tma", copy, full, {"N": 128}, tma=True)
    yield specimen("refused", refused, full, {"N": 128})
    yield Specimen("incomplete", "test", copy, {"source_ptr": torch.empty(0), "N": 128})
    yield Specimen("deadly", "test", deadly, {})
