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

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import triton.language as tl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import interpreter

from tests.lancet_kernels.kernels.hopper.gluon_emulator import language
from tests.lancet_kernels.kernels.hopper.gluon_emulator.async_copies import Descriptor, TmaLoad
from tests.lancet_kernels.kernels.hopper.gluon_emulator.global_memory import GlobalMemory, Program
from tests.lancet_kernels.kernels.hopper.gluon_emulator.scheduler import Misuse, Scheduler
from tests.lancet_kernels.kernels.hopper.gluon_emulator.shared_memory import SharedTraffic
from tests.lancet_kernels.kernels.hopper.gluon_emulator.source import Sources


def _see_language() -> None:
    """A function that sees triton.language, which is what the interpreter prepares for one."""
    tl.load  # noqa: B018


class Emulator:
    """Runs host code of one or several PEs, and the kernels that it launches.

    edits: (jitted function, old text, new text) each, to run mutants; the old text must occur once.
    patience: looks at memory in which nothing changes any more until that is a Deadlock; with None a wait
    that polls may run out of time by itself.
    """

    def __init__(
        self, seed: int = 0, edits: Sequence[tuple[Any, str, str]] = (), patience: int | None = 40
    ) -> None:
        self.builder = interpreter.interpreter_builder
        self.scheduler = Scheduler(seed, self.builder, patience)
        self.memory = GlobalMemory(self.scheduler, self.builder)
        self.traffic = SharedTraffic()
        self.loads: list[TmaLoad] = []
        self.sources = Sources(language.table(self), edits)

    def run(self, *hosts: Callable[[], Any]) -> list[Any]:
        """Each of `hosts` as a PE, all at once; -> what they return."""
        with self._prepared():
            tasks = [
                self.scheduler.spawn(f"PE {pe}", partial(self._host, host), Program(f"PE {pe}"))
                for pe, host in enumerate(hosts)
            ]
            self.scheduler.run()
        return [task.result for task in tasks]

    def kernel(self, fn: Any) -> _Kernel:
        """Launches the jitted function fn: kernel[grid](...)."""
        return _Kernel(self, fn)

    def specialize(self, partitions: list[tuple[Any, tuple]], num_warps: list, num_regs: list) -> None:
        """gl.warp_specialize: the first partition goes on in the task, the others in tasks of their own."""
        if len(partitions) != len(num_warps) + 1:
            raise Misuse(f"{len(partitions)} partitions, and warps for {len(num_warps)} workers")
        me = self.scheduler.current
        self.memory.arrive()
        workers = []
        for fn, args in partitions[1:]:
            name = f"{me.name}, {fn.__name__}"
            worker = self.scheduler.spawn(name, partial(self._partition, fn, args), me.program)
            worker.grid = self.builder.grid_dim, self.builder.grid_idx
            workers.append(worker)
        fn, args = partitions[0]
        name, me.name = me.name, f"{me.name}, {fn.__name__}"
        self._partition(fn, args)
        self.scheduler.join(workers, "the other partitions")
        me.name = name

    def _partition(self, fn: Callable[..., Any], args: tuple) -> None:
        fn(*args)
        self.memory.arrive()

    def _host(self, host: Callable[[], Any]) -> Any:
        result = host()
        self.memory.flush(self.scheduler.current.program)
        return result

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """Inside, Triton's interpreter asks this emulator for memory."""
        scope = interpreter._patch_lang(_see_language)
        grid = getattr(self.builder, "grid_dim", None), getattr(self.builder, "grid_idx", None)
        launch = interpreter.GridExecutor.__call__

        def launch_and_end(executor: Any, *args: Any, **options: Any) -> None:
            launch(executor, *args, **options)
            self.memory.flush(self.scheduler.current.program)

        for name in self.memory.real:
            setattr(self.builder, name, getattr(self.memory, name))
        interpreter.GridExecutor.__call__ = launch_and_end
        try:
            yield
        finally:
            interpreter.GridExecutor.__call__ = launch
            for name in self.memory.real:
                delattr(self.builder, name)
            self.builder.grid_dim, self.builder.grid_idx = grid
            scope.restore()


class _Kernel:
    """Stands for a jitted function where it is launched."""

    def __init__(self, emulator: Emulator, fn: Any) -> None:
        self.emulator, self.fn, self.arg_names = emulator, fn, fn.arg_names

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int], **options: Any) -> None:
        """Launch options that are no parameters change nothing here."""
        scheduler, function = self.emulator.scheduler, self.emulator.sources.function(self.fn)
        given = {
            p.name: options[p.name] if p.is_constexpr else _argument(options[p.name]) for p in self.fn.params
        }
        here, programs = scheduler.current, []
        for x in range(grid[0]):
            name = f"{here.name}, program {x}"
            task = scheduler.spawn(name, partial(function, **given), Program(name))
            task.grid = (*grid, 1, 1), (x, 0, 0)
            programs.append(task)
        scheduler.join(programs, "the programs it launched")
        for task in programs:
            self.emulator.memory.flush(task.program)


def _argument(value: Any) -> Any:
    if isinstance(value, TensorDescriptor):
        dtype = interpreter._implicit_cvt(value.base).dtype.element_ty
        lists = map(list, (value.shape, value.strides, value.block_shape))
        return Descriptor(value.base.data_ptr(), dtype, *lists, value.layout)
    if isinstance(value, tuple):
        return type(value)(*map(_argument, value))
    return value if value is None or isinstance(value, torch.dtype) else interpreter._implicit_cvt(value)
