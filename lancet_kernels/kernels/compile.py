"""Compiles kernels for a GPU architecture without a GPU: registers, spills, shared memory, instructions.

Triton compiles for any NVIDIA architecture, and its wheel contains NVIDIA's assembler and disassembler. Both
`lancet kernels` and the tests compile in processes of their own, because an error in LLVM ends the process,
which must cost one row and not the table (as in a `ProcessPoolExecutor`), and because the caller may
interpret its kernels.

On Hopper a matrix product (HGMMA) runs by itself, and a loop should start one while the one before still
runs: its wait, `WARPGROUP.DEPBAR.LE gsb0, 0x1`, lets one be in flight. If ptxas sees that others touch the
accumulators it waits after each product (`gsb0, 0x0`), and only tells its log (C7510 to C7519, "Potential
Performance Loss: wgmma.mma_async instructions are serialized").
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import create_function_from_signature

from lancet_kernels.errors import UserError
from lancet_kernels.kernels.config import REGISTERS_OF_A_THREAD, REGISTERS_OF_AN_SM, shared_memory
from lancet_kernels.kernels.specimens import Specimen
from lancet_kernels.kernels.symmetric import nvshmem

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", re.M)
BACKWARD_BRANCH = re.compile(r"\bBRA\b.*(0x[0-9a-f]+)")
PRODUCT = re.compile(r"\bHGMMA\.(\w+)")
WAIT = re.compile(r"\bWARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
COUNTED = {
    "products": PRODUCT,
    "barriers": re.compile(r"\bBAR\b"),
    "spill_stores": re.compile(r"\bSTL\b"),
    "spill_loads": re.compile(r"\bLDL\b"),
}
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
SERIALIZED = re.compile(r"\((C75\d\d)\)")


@dataclass(frozen=True)
class ProductLoop:
    """A loop around matrix products: counts of its instructions. shape: of a product of one warpgroup.

    in_flight: products that its strictest wait leaves running; 0: each waits for the one before.
    """

    instructions: int
    products: int
    barriers: int
    spill_stores: int
    spill_loads: int
    in_flight: int
    shape: str


def product_loops(sass: str) -> tuple[ProductLoop, ...]:
    """The innermost loops around the products of `sass`, what `cuobjdump -sass` prints, in their order."""
    code = [(int(address, 16), instruction) for address, instruction in INSTRUCTION.findall(sass)]
    loops = [
        (int(target[1], 16), address)
        for address, instruction in code
        if (target := BACKWARD_BRANCH.search(instruction)) and int(target[1], 16) <= address
    ]
    # Waits for barriers stand behind the whole program and jump back: the smallest loop is a product's own.
    innermost = {
        min(around, key=lambda loop: loop[1] - loop[0])
        for at, instruction in code
        if PRODUCT.search(instruction) and (around := [loop for loop in loops if loop[0] <= at <= loop[1]])
    }
    product_loops = []
    for first, last in sorted(innermost):
        inside = [instruction for address, instruction in code if first <= address <= last]
        counts = {name: sum(bool(what.search(i)) for i in inside) for name, what in COUNTED.items()}
        text = "\n".join(inside)
        depth = min((int(depth, 16) for depth in WAIT.findall(text)), default=counts["products"])
        shape = " ".join(sorted(set(PRODUCT.findall(text))))
        product_loops.append(ProductLoop(len(inside), **counts, in_flight=depth, shape=shape))
    return tuple(product_loops)


def serialized(log: str) -> tuple[str, ...]:
    """The codes of ptxas's warnings that it serializes products: ("C7515",)."""
    return tuple(sorted(set(SERIALIZED.findall(log))))


# At most eight registers of a thread, whose loads L1 serves. A tile of half the size would cost more.
FEW_SPILLED_BYTES = 32
# Of one specimen.
TIMEOUT_S = 600.0
SPAWN = multiprocessing.get_context("spawn")
# The first word of the machine instructions for matrix products and TMA.
WGMMA = re.compile(r"\b[HIQ]GMMA\b")
TCGEN05 = re.compile(r"\bUTC\w*MMA\b")
TMA = re.compile(r"\bUTMA(LDG|STG|REDG)\b")


@dataclass(frozen=True)
class CompiledKernel:
    """The compiled machine code of a specimen.

    Attributes:
        arch: "sm_90". threads, shared_bytes: of one program.
        registers, spills, stack: of one thread; bytes that are spilled, and all bytes of local memory.
        wgmma, tma, tcgen05: does the machine code have these instructions?
        serialized: codes of the assembler's warnings that products wait for each other.
        loops: around wgmma. seconds: near zero if the kernel was in Triton's cache.
    """

    arch: str
    registers: int
    spills: int
    stack: int
    shared_bytes: int
    threads: int
    wgmma: bool
    tma: bool
    tcgen05: bool
    serialized: tuple[str, ...]
    loops: tuple[ProductLoop, ...]
    seconds: float

    @property
    def in_flight(self) -> int | None:
        """Products that every loop leaves running when it starts the next one; None: there is no loop."""
        return min((loop.in_flight for loop in self.loops), default=None)


def compile_specimen(specimen: Specimen, arch: int) -> CompiledKernel:
    """Compile for sm_`arch` and inspect the machine code. Raises Triton's error if it does not compile;
    UserError if NVSHMEM's bitcode is missing or not readable."""
    start = time.perf_counter()
    compiled, options = _compile(specimen, arch)
    usage = _tool("-res-usage", compiled.asm["cubin"])
    name = re.escape(compiled.metadata.name)
    match = re.search(rf"Function {name}:\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert match, usage
    registers, *stack_and_local = map(int, match.groups())
    stack = sum(stack_and_local)
    instructions = _tool("-sass", compiled.asm["cubin"])
    wgmma = bool(WGMMA.search(instructions))
    # Triton keeps no log: where there is something to say, the assembler runs a second time.
    log = _assembler_log(compiled.asm["ptx"], options, arch) if stack or wgmma else ""
    spilled = SPILLS.findall(log)
    assert spilled or not log, log
    return CompiledKernel(
        arch=f"sm_{arch}",
        registers=registers,
        spills=sum(max(map(int, stores_and_loads)) for stores_and_loads in spilled),
        stack=stack,
        shared_bytes=compiled.metadata.shared,
        threads=(specimen.total_warps or compiled.metadata.num_warps) * 32,
        wgmma=wgmma,
        tma=bool(TMA.search(instructions)),
        tcgen05=bool(TCGEN05.search(instructions)),
        serialized=serialized(log),
        loops=product_loops(instructions),
        seconds=time.perf_counter() - start,
    )


def problems(specimen: Specimen, compiled: CompiledKernel) -> list[str]:
    """The reasons why this kernel must not be released for this architecture; empty if there are none."""
    arch = int(compiled.arch.removeprefix("sm_"))
    reasons = []
    if compiled.spills > FEW_SPILLED_BYTES:
        reasons.append(f"spills {compiled.spills} bytes")
    if compiled.registers > REGISTERS_OF_A_THREAD:
        reasons.append(f"{compiled.registers} registers, more than {REGISTERS_OF_A_THREAD}")
    # Registers are allocated to warps in units of 8 per thread.
    in_block = -(-compiled.registers // 8) * 8 * compiled.threads
    if in_block > REGISTERS_OF_AN_SM:
        reasons.append(f"{in_block} registers in a program, more than {REGISTERS_OF_AN_SM}")
    if compiled.shared_bytes > shared_memory(arch):
        reasons.append(f"{compiled.shared_bytes} bytes of shared memory, more than {shared_memory(arch)}")
    if arch == 90 and specimen.wgmma and not compiled.wgmma:
        reasons.append("no wgmma")
    if arch == 90 and specimen.tma and not compiled.tma:
        reasons.append("no TMA")
    if compiled.serialized:
        reasons.append(f"products wait for each other ({', '.join(compiled.serialized)} of ptxas)")
    if specimen.in_flight and (compiled.in_flight or 0) < specimen.in_flight:
        reasons.append(f"{compiled.in_flight or 0} products in flight, fewer than {specimen.in_flight}")
    return reasons


def _compile(specimen: Specimen, arch: int) -> tuple[Any, dict[str, Any]]:
    """-> the kernel as Triton would compile it for the launch, and its options."""
    kernel, arguments = specimen.kernel, dict(specimen.arguments)
    if specimen.nvshmem:
        arguments["extern_libs"] = nvshmem.extern_libs(arch)
    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(**arguments)
    parsed, signature, constexprs, attributes = kernel._pack_args(
        backend, options, bound, specialization, options
    )
    source = (GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource)(
        kernel, signature, constexprs, attributes
    )
    try:
        return triton.compile(source, target=target, options=parsed.__dict__), parsed.__dict__
    except ValueError as error:
        if "Failed to parse library" not in str(error):
            raise
        raise UserError(
            "NVSHMEM's device bitcode",
            got=f"{arguments['extern_libs'][0][1]}, of a newer LLVM than Triton {triton.__version__} has",
            expected="one that this Triton can read (3.6 reads up to NVSHMEM 3.7)",
            do=f"install an older {nvshmem.PACKAGE}, or a newer Triton",
        ) from error


def _tool(option: str, cubin: bytes) -> str:
    """The output of Triton's `cuobjdump` for a kernel's machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _assembler_log(ptx: str, options: dict[str, Any], arch: int) -> str:
    """The messages of the assembler, run again with the options of Triton."""
    backend = make_backend(GPUTarget("cuda", arch, 32))
    log = io.StringIO()
    with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        triton.knobs.nvidia.dump_ptxas_log = True
        backend.make_cubin(ptx, {}, backend.parse_options(options), arch)
    return log.getvalue()


@dataclass(frozen=True)
class Row:
    """The result for one specimen: the compiled kernel, or the error."""

    specimen: Specimen
    compiled: CompiledKernel | None
    error: str | None

    @property
    def problems(self) -> list[str]:
        return problems(self.specimen, self.compiled) if self.compiled else ["does not compile"]


def compile_all(
    specimens: Sequence[Specimen],
    arch: int,
    *,
    workers: int = 2,
    timeout_s: float = TIMEOUT_S,
    on_done: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Compile them all in `workers` processes. -> rows in the order of the specimens.

    The kernel of a specimen must be importable by its name. A specimen may take `timeout_s`.
    """
    # Linking NVSHMEM takes longest, so it is first.
    left = sorted(range(len(specimens)), key=lambda i: specimens[i].nvshmem)
    idle: list[_Worker] = []
    busy: dict[connection.Connection, tuple[_Worker, int, float]] = {}
    rows: dict[int, Row] = {}
    try:
        while left or busy:
            while left and len(busy) < workers:
                worker, i = idle.pop() if idle else _Worker(arch), left.pop()
                busy[worker.pipe] = worker, i, time.monotonic() + timeout_s
                worker.begin(specimens[i])
            soonest = min(deadline for _, _, deadline in busy.values())
            ready = connection.wait(busy, max(0.0, soonest - time.monotonic()))
            for pipe, (worker, i, deadline) in list(busy.items()):
                if pipe in ready or time.monotonic() >= deadline:
                    del busy[pipe]
                    rows[i] = Row(specimens[i], *worker.answer(timeout_s))
                    on_done(rows[i])
                    if worker.process.is_alive():
                        idle.append(worker)
        return [rows[i] for i in range(len(specimens))]
    finally:
        for worker in (*idle, *(worker for worker, _, _ in busy.values())):
            worker.process.kill()


class _Worker:
    """A process that compiles one specimen after another."""

    def __init__(self, arch: int) -> None:
        self._log = tempfile.NamedTemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=_serve, args=(theirs, arch, self._log.name), daemon=True)
        interpret = os.environ.pop("TRITON_INTERPRET", None)
        try:
            self.process.start()
        finally:
            theirs.close()
            if interpret is not None:
                os.environ["TRITON_INTERPRET"] = interpret

    def begin(self, specimen: Specimen) -> None:
        self._log.truncate(0)
        # `answer` reports a process that has died.
        with contextlib.suppress(OSError):
            self.pipe.send(specimen)

    def answer(self, timeout_s: float) -> tuple[CompiledKernel | None, str | None]:
        """(compiled kernel, error); the error also of a process that died, or took `timeout_s`."""
        with contextlib.suppress(EOFError, OSError):
            if self.pipe.poll():
                return self.pipe.recv()
        self.process.join(timeout=1.0)
        self.process.kill()
        self.process.join()
        self._log.seek(0)
        last = self._log.read().strip()[-2000:]
        reason = f"the compiler died (exit code {self.process.exitcode}) or took more than {timeout_s:g} s"
        return None, f"{reason}: {last}" if last else reason


def _serve(pipe: connection.Connection, arch: int, log: str) -> None:
    """The process of a worker: for each specimen that comes, (compiled kernel, error)."""
    # When the assembler fails, Triton prints whole programs; these go to the log.
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    with contextlib.suppress(EOFError):
        while True:
            specimen, compiled, reason = pipe.recv(), None, None
            try:
                compiled = compile_specimen(specimen, arch)
            except Exception as error:
                # The original one, which Triton wraps once for each calling function.
                cause: BaseException = error
                while not isinstance(cause, UserError) and cause.__cause__ is not None:
                    cause = cause.__cause__
                kind = "" if isinstance(cause, UserError) else f"{type(cause).__name__}: "
                reason = f"{kind}{cause}"[:4000]
            pipe.send((compiled, reason))
