"""What does a kernel become on a GPU that is not here: registers, spills, shared memory, instructions?

Triton compiles for any NVIDIA architecture without one, and its wheel carries NVIDIA's assembler and
disassembler. So every kernel x configuration can be checked on a machine without a GPU, before anyone waits
for one: `lancet kernels`, and the tests.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pkgutil
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

import lancet_kernels.kernels
from lancet_kernels.errors import UserError
from lancet_kernels.kernels import nvshmem_bitcode, runtime
from lancet_kernels.kernels.specimen import Specimen

# Architecture -> shared memory that one thread block may have, in bytes (CUDA programming guide, 227 KB on
# Hopper and Blackwell, 163 KB on Ampere).
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
REGISTER_LIMIT = 255  # of one thread
REGISTER_FILE = 65536  # of one multiprocessor, so of one block at most
# The first word of an instruction in machine code that shows what a kernel is made of.
WGMMA = re.compile(r"\b[HIQ]GMMA\b")
TCGEN05 = re.compile(r"\bUTC\w*MMA\b")
TMA = re.compile(r"\bUTMA(LDG|STG|REDG)\b")


@dataclass(frozen=True)
class CompiledKernel:
    """What a specimen has become.

    Attributes:
        name, config: of the specimen; arch: "sm_90".
        registers: of one thread; threads: of one program.
        spills: bytes of one thread that are written to or read from local memory for want of registers.
        stack: bytes of local memory of one thread for whatever reason.
        shared_bytes: of one program.
        wgmma, tma, tcgen05: are these instructions in the machine code?
        seconds: that compiling took; next to none if Triton's cache had it.
    """

    name: str
    config: str
    arch: str
    registers: int
    spills: int
    stack: int
    shared_bytes: int
    threads: int
    wgmma: bool
    tma: bool
    tcgen05: bool
    seconds: float


def compile_specimen(specimen: Specimen, arch: int) -> CompiledKernel:
    """Compile for sm_`arch` and look at the machine code.

    Raises UserError where kernels are interpreted, for an unknown architecture, and if NVSHMEM's bitcode is
    needed and missing or not readable; and whatever Triton raises if the kernel does not compile.
    """
    if runtime.INTERPRETED:
        raise UserError(
            "compiling kernels",
            got="TRITON_INTERPRET set",
            expected="kernels that are not interpreted",
            do="unset it, or call lancet kernels, which compiles in processes of its own",
        )
    check_arch(arch)
    start = time.perf_counter()
    compiled, options = _compile(specimen, arch)
    registers, stack = _resources(compiled)
    instructions = _tool("-sass", compiled.asm["cubin"])
    return CompiledKernel(
        name=specimen.name,
        config=specimen.config,
        arch=f"sm_{arch}",
        registers=registers,
        # What spills has a stack, so only then is the assembler asked a second time.
        spills=_spills(compiled.asm["ptx"], options, arch) if stack else 0,
        stack=stack,
        shared_bytes=compiled.metadata.shared,
        threads=compiled.metadata.num_warps * 32,
        wgmma=bool(WGMMA.search(instructions)),
        tma=bool(TMA.search(instructions)),
        tcgen05=bool(TCGEN05.search(instructions)),
        seconds=time.perf_counter() - start,
    )


def problems(specimen: Specimen, compiled: CompiledKernel) -> list[str]:
    """Why this kernel must not be shipped for this architecture; empty if it may."""
    arch = int(compiled.arch.removeprefix("sm_"))
    found = []
    if compiled.spills:
        found.append(f"spills {compiled.spills} bytes")
    if compiled.registers > REGISTER_LIMIT:
        found.append(f"{compiled.registers} registers, more than {REGISTER_LIMIT}")
    # Registers are handed out to warps in units of 8 for each thread.
    in_block = -(-compiled.registers // 8) * 8 * compiled.threads
    if in_block > REGISTER_FILE:
        found.append(f"{in_block} registers in a program, more than {REGISTER_FILE}")
    if compiled.shared_bytes > SHARED_LIMIT[arch]:
        found.append(f"{compiled.shared_bytes} bytes of shared memory, more than {SHARED_LIMIT[arch]}")
    if arch == 90 and specimen.wgmma and not compiled.wgmma:
        found.append("no wgmma")
    if arch == 90 and specimen.tma and not compiled.tma:
        found.append("no TMA")
    return found


def check_arch(arch: int) -> None:
    """Raise UserError for an architecture whose limits are not known."""
    if arch not in SHARED_LIMIT:
        known = ", ".join(f"sm_{a}" for a in SHARED_LIMIT)
        raise UserError(
            "architecture", got=f"sm_{arch}", expected=f"one of {known}", do="choose one of these"
        )


def kernel_modules() -> list[ModuleType]:
    """Every module of this folder that offers specimens."""
    folder = lancet_kernels.kernels
    names = [f"{folder.__name__}.{module.name}" for module in pkgutil.iter_modules(folder.__path__)]
    return [module for module in map(importlib.import_module, names) if hasattr(module, "specimens")]


def all_specimens(
    arch: int, modules: Sequence[ModuleType] | None = None
) -> Iterator[tuple[ModuleType, Specimen]]:
    """(module, specimen) of every kernel x configuration, or of those of `modules`.

    Raises UserError if two of one module have the same name and config: no row could be told from another.
    """
    check_arch(arch)
    for module in kernel_modules() if modules is None else modules:
        seen = set()
        for specimen in module.specimens(arch):
            key = (specimen.name, specimen.config)
            if key in seen:
                raise UserError(
                    f"specimens of {module.__name__}",
                    got=f"{' '.join(key)!r} twice",
                    expected="every name and config once",
                    do="say in config what tells them apart",
                )
            seen.add(key)
            yield module, specimen


def _compile(specimen: Specimen, arch: int) -> tuple[Any, dict[str, Any]]:
    names = specimen.kernel.arg_names
    # What a kernel has no argument for is left out: several kernels may share what they are described by.
    constexprs = {n: value for n, value in specimen.constexprs.items() if n in names}
    missing = [n for n in names if n not in specimen.signature and n not in constexprs]
    if missing:
        raise UserError(
            f"specimen {specimen.name} {specimen.config}",
            got=f"nothing for {', '.join(missing)}",
            expected="every argument in signature or constexprs",
            do="correct the specimen",
        )
    aligned = [n for n in names if n in specimen.aligned and n not in constexprs]
    source = ASTSource(
        specimen.kernel,
        # in the order of the arguments, which is what Triton goes by
        {n: "constexpr" if n in constexprs else specimen.signature[n] for n in names},
        constexprs=constexprs,
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    options = {"num_warps": specimen.num_warps, "num_stages": specimen.num_stages, **specimen.options}
    if specimen.nvshmem:
        options["extern_libs"] = nvshmem_bitcode.extern_libs(arch)
    try:
        return triton.compile(source, target=_target(arch), options=options), options
    except ValueError as error:
        if "Failed to parse library" not in str(error):
            raise
        raise UserError(
            "NVSHMEM's device bitcode",
            got=f"{options['extern_libs'][0][1]}, made by a newer LLVM than Triton {triton.__version__} has",
            expected="one that this Triton can read (3.6 reads up to NVSHMEM 3.7)",
            do=f"install an older {nvshmem_bitcode.PACKAGE}, or a newer Triton",
        ) from error


def _target(arch: int) -> GPUTarget:
    return GPUTarget("cuda", arch, 32)


def _tool(option: str, cubin: bytes) -> str:
    """What `cuobjdump` of Triton's wheel says about a kernel's machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _resources(compiled: Any) -> tuple[int, int]:
    """(registers, bytes of stack) of one thread."""
    text = _tool("-res-usage", compiled.asm["cubin"])
    name = re.escape(compiled.metadata.name)
    found = re.search(rf"Function {name}:\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert found, text
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _spills(ptx: str, options: dict[str, Any], arch: int) -> int:
    """Bytes that the assembler says it spills, assembling once more with exactly the options of Triton."""
    backend = make_backend(_target(arch))
    log = io.StringIO()
    with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        triton.knobs.nvidia.dump_ptxas_log = True
        backend.make_cubin(ptx, {}, backend.parse_options(options), arch)
    functions = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log.getvalue())
    assert functions, log.getvalue()
    return sum(max(int(stores), int(loads)) for stores, loads in functions)
