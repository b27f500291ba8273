"""The fused kernels on virtual PEs: several at once on one GPU; in the interpreter one without peers.

One process and one thread play all W PEs of `virtual_memories`. A kernel of one PE waits for kernels of the
others, so until all of them are launched nothing may make the host wait for the device, or the device for
the host:

- each PE has its own stream (CUDA_DEVICE_MAX_CONNECTIONS: tests/conftest.py) and, with
  default_overlap_config(..., pes_here=W), its share of the SMs: programs of all PEs are resident at once;
- the first use of anything is a hidden wait: Triton compiles, the driver loads a module, the caching
  allocator asks it for memory. So `warm_up` what will be played.

On the CPU the interpreter runs one launch after the other: only what needs no later launch can be played.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TypeVar
from unittest import mock

import pytest
import torch

from lancet_kernels.errors import CommunicationError
from lancet_kernels.kernels import overlap
from lancet_kernels.kernels.config import OverlapConfig, default_overlap_config
from lancet_kernels.kernels.overlap import warming_up
from lancet_kernels.kernels.protocol.exchange import Exchange
from lancet_kernels.kernels.runtime import recorded
from lancet_kernels.kernels.symmetric import virtual_memories
from tests.grids import few_of
from tests.lancet_kernels.kernels.overlap_cases import Answer, Case, check_accuracy
from tests.lancet_kernels.kernels.overlap_ranks import (
    DENSE,
    Layer,
    check_dense,
    check_same,
    make_dense,
    same_bits,
    virtual_layers,
)
from tests.lancet_kernels.kernels.test_overlap_kernel import SMALL

T = TypeVar("T")
# Sizes that tensor descriptors take: multiples of 16 bytes.
ALIGNED_DENSE = ((200, 264, 136), (136, 72, 328), (136, 520, 200))  # M, N, K


class VirtualPass:
    """Forward and backward of a case on all its PEs, with all data on the device; rows and results are NaN
    before the first.

    dense: independent GEMMs ride along in both. bodies: of the kernel.
    """

    def __init__(
        self,
        case: Case,
        device: torch.device,
        *,
        dense: bool = False,
        bodies: str = "triton",
        timeout_s: float = 8.0,
    ) -> None:
        self.device = device
        self._streams = _streams(device, case.world) if device.type == "cuda" else []
        sizes = case.width, case.hidden, case.activation, case.dtype
        config = default_overlap_config(*sizes, device, pes_here=case.world)
        if bodies == "gluon":
            config = OverlapConfig.for_gpu(case.width, case.hidden, case.dtype, 90, config.programs)
        self.layers = virtual_layers(virtual_memories(case.world, device), case, config, timeout_s)
        for layer in self.layers:
            if dense:
                layer.dense = make_dense(case.dtype, ALIGNED_DENSE if bodies == "gluon" else DENSE)
            layer.to(device)
        self.exchanges = [way for layer in self.layers for way in (layer.forward, layer.backward)]

    def load(self, case: Case) -> None:
        """The values of another case of these sizes, at the same addresses."""
        for layer in self.layers:
            other = Layer(case, layer.rank, layer.forward, layer.backward)
            for mine, new in zip(layer.tensors(), other.tensors(), strict=True):
                mine.copy_(new)

    def play(self, rank: int) -> Answer:
        """One whole pass of one PE; asks the device for nothing."""
        return self.layers[rank].run()

    def check(self) -> None:
        """Raise CommunicationError if a wait of any PE ran out of time."""
        for layer in self.layers:
            layer.check()

    def prove(self, times: int) -> None:
        """So many passes, the first behind a warm-up, are right."""
        self.warm_up()
        for _ in range(times):
            answers = self.each()
            self.check()
            check_accuracy(answers, self.layers[0].case)
            for layer in self.layers:
                check_dense(layer.dense)
            del answers

    def on(self, rank: int) -> AbstractContextManager:
        """Inside, torch and Triton use the PE's stream."""
        return torch.cuda.stream(self._streams[rank]) if self._streams else nullcontext()

    def each(self, play: Callable[[int], T] | None = None) -> list[T]:
        """play(rank) of every PE, each on its stream; -> what they return. By default a whole pass.

        What the current stream did before is seen by all, and it waits for all of them; the host does not.
        """
        here, results = torch.cuda.current_stream(self.device) if self._streams else None, []
        for stream in self._streams:
            stream.wait_stream(here)
        for rank in range(len(self.layers)):
            with self.on(rank):
                results.append((play or self.play)(rank))
        for stream in self._streams:
            here.wait_stream(stream)
        return results

    def warm_up(self, play: Callable[[int], object] | None = None) -> None:
        """Do everything that play does the first time, but put nothing and wait for nobody.

        First without launching the overlap kernel, which is compiled beside the others; then with launches
        that have no tasks. To the exchanges these are two passes that all PEs skip: epochs go on, nothing is
        sent, no rows are occupied. Memory is a first time, too: warm up while what will be held meanwhile is
        held.
        """
        if not self._streams:
            return
        torch.cuda.synchronize(self.device)
        with warming_up():
            self.each(play)
        torch.cuda.synchronize(self.device)
        with launched_without_tasks():
            self.each(play)
        torch.cuda.synchronize(self.device)


@contextmanager
def launched_without_tasks() -> Iterator[None]:
    """Inside, overlap kernels are launched as always, and end at once: nothing is sent, nothing waited for.

    What a driver does at the first launch of a kernel (memory for its stack, say) is done after that.
    """
    no_schedule = mock.patch.object(Exchange, "schedule")
    with no_schedule, mock.patch.object(overlap, "ALL_TASKS", 0):
        yield


@functools.cache
def _streams(device: torch.device, world: int) -> list[torch.cuda.Stream]:
    """The same ones for every VirtualPass: the memory that was freed on them is used again on them."""
    return [torch.cuda.Stream(device) for _ in range(world)]


HALF, BRAIN = torch.float16, torch.bfloat16
WORLDS = [1, 2, 4]
# Beyond what runs between processes in the interpreter: TMA, several chunks of rows and tiles per expert,
# more experts than PEs, all tokens to one.
LARGE = {
    "gelu": Case(tokens=700, capacity=300, width=256, hidden=192, dtype=BRAIN),
    "swiglu": Case(tokens=513, capacity=400, width=320, hidden=136, activation="swiglu", dtype=BRAIN),
    "many experts": Case(local=16, tokens=300, choices=4, capacity=40, width=128, hidden=64, dtype=HALF),
    "one expert": Case(tokens=600, choices=1, capacity=450, width=128, hidden=256, choose="one", dtype=BRAIN),
    "float32": Case(tokens=200, capacity=130, width=96, hidden=72, activation="silu", bias=False),
}
# (case, options of VirtualPass)
WORK = [
    (case, {name: True for name in ("dense",) if options.get(name)})
    for cases in SMALL.values()
    for case, options in cases
]
WORK += [(replace(case, world=world), {}) for case in LARGE.values() for world in WORLDS]
WORK += [(replace(LARGE["gelu"], world=world), {"dense": True}) for world in WORLDS]
GELU, ODD = LARGE["gelu"], Case()
# The Hopper kernel: tiles that end before a tile's columns do, several tiles of an expert, tiles of several
# sources. Compiling takes most of the time that the first run on a GPU has, so that the others are long.
HOPPER_WORK = few_of(
    [
        pytest.param((GELU, {}), id="gelu"),
        pytest.param((replace(LARGE["swiglu"], hidden=192), {}), id="swiglu"),
        pytest.param((GELU, {"dense": True}), id="independent GEMMs"),
        pytest.param((replace(GELU, world=1), {}), id="gelu, 1 PE"),
        pytest.param((replace(GELU, world=4), {}), id="gelu, 4 PEs"),
        pytest.param((Case(tokens=300, capacity=300, width=512, hidden=576, activation="silu", bias=False,
                           dtype=HALF), {}), id="silu, no bias"),
        pytest.param((LARGE["many experts"], {}), id="many experts"),
        pytest.param((LARGE["one expert"], {}), id="one expert"),
    ],
    0, 1, 2,
)  # fmt: skip
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="the kernel is for compute capability 9.0",
)


def name_of(work: tuple[Case, dict]) -> str:
    return "-".join([str(work[0]), *work[1]])


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> None:
    """The kernels of the chosen tests, compiled side by side: one after the other would take minutes."""
    if not torch.cuda.is_available():
        return
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    with warming_up():
        for params in chosen:
            if work := params.get("work") or params.get("hopper_work"):
                case, options = work
                for bodies in ("triton", "gluon") if "hopper_work" in params else ("triton",):
                    run = VirtualPass(case, torch.device("cuda"), bodies=bodies, **options)
                    run.each()
        torch.cuda.synchronize()


@pytest.mark.parametrize("work", few_of(map(pytest.param, WORK)), ids=name_of)
def test_forward_and_backward(compiled: None, device: torch.device, work: tuple[Case, dict]) -> None:
    case, options = work
    if device.type == "cpu" and (case.world > 1 or case.tokens > 100):
        pytest.skip("the interpreter runs one small PE")
    VirtualPass(case, device, **options).prove(3 if device.type == "cuda" else 1)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("hopper_work", HOPPER_WORK)
def test_the_hopper_kernel_is_as_the_plain_one(compiled: None, hopper_work: tuple[Case, dict]) -> None:
    """Its numbers as right, its rows bit for bit."""
    case, options = hopper_work
    rows = []
    for bodies in ("triton", "gluon"):
        run = VirtualPass(case, torch.device("cuda"), bodies=bodies, **options)
        run.prove(3)
        rows.append([exchange.rows.local.clone() for exchange in run.exchanges])
    for plain, hopper in zip(*rows, strict=True):
        assert same_bits(plain, hopper), "rows, their places, or what lies beside them"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("world", "bodies"),
    [(1, "triton"), (2, "triton"), (4, "triton"), pytest.param(2, "gluon", marks=on_hopper)],
)
def test_many_passes_without_a_pause(compiled: None, world: int, bodies: str) -> None:
    """Nothing waits for the device between passes: PEs run ahead of one another. The same bits each time."""
    case = replace(GELU, world=world)
    run = VirtualPass(case, torch.device("cuda"), bodies=bodies)
    run.warm_up()
    first = run.each()
    run.check()
    check_accuracy(first, case)

    def often(rank):
        return [run.play(rank) for _ in range(20)]

    run.warm_up(often)
    for mine, once in zip(run.each(often), first, strict=True):
        for again in mine:
            check_same(again, once, f"{case} {bodies}")
    run.check()


@pytest.mark.gpu
@pytest.mark.parametrize("world", [1, 2])
def test_a_cuda_graph_is_replayed_with_changing_data(compiled, world):
    """A graph for each PE, replayed 50 times: epochs and rows taken go on inside it."""
    case = replace(ODD, world=world, width=32, hidden=32)
    run = VirtualPass(case, torch.device("cuda"))
    run.warm_up()
    run.each()
    run.check()
    graphs, answers = [], []
    for rank in range(world):
        graph = torch.cuda.CUDAGraph()
        with run.on(rank), torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            answers.append(run.play(rank))
        graphs.append(graph)
    for seed in range(1, 51):
        run.load(replace(case, seed=seed))
        run.each(lambda rank: graphs[rank].replay())
        torch.cuda.synchronize()
        run.check()
        check_accuracy(answers, replace(case, seed=seed))


@pytest.mark.gpu
@pytest.mark.parametrize("bodies", ["triton", pytest.param("gluon", marks=on_hopper)])
def test_a_pe_that_never_comes(compiled: None, bodies: str) -> None:
    """The launch of the other one ends, says whom it waited for, and leaves the GPU free."""
    run = VirtualPass(GELU, torch.device("cuda"), bodies=bodies, timeout_s=0.5)
    run.warm_up()
    begin = time.monotonic()
    with run.on(0):
        out, _saved = run.layers[0].run_forward()
    torch.cuda.synchronize()
    assert time.monotonic() - begin < 30
    with pytest.raises(CommunicationError, match="forward: PE 0 waited for PE 1"):
        run.layers[0].forward.check()
    assert out.isnan().any(), "results without their rows"
    later = torch.ones(1 << 20, device="cuda")
    assert float(later.sum()) == 1 << 20


@pytest.mark.gpu
def test_a_warm_up_sends_nothing(compiled):
    run = VirtualPass(ODD, torch.device("cuda"))
    run.warm_up()
    assert_skipped(run, 2)


@pytest.mark.parametrize("world", [1, 2])
def test_launches_without_tasks_send_nothing_and_wait_for_nobody(device: torch.device, world: int) -> None:
    case = replace(ODD, world=world)
    run = VirtualPass(case, device)
    with launched_without_tasks():
        for _ in range(3):
            run.each()
    assert_skipped(run, 3)
    if world == 1:
        check_accuracy(run.each(), case)
    run.check()


def assert_skipped(run: VirtualPass, passes: int) -> None:
    """Nothing came, and no rows are occupied, as after so many passes."""
    for exchange in run.exchanges:
        assert exchange.rows.local.isnan().all()
        assert not exchange.arrived.local.any()
        assert not exchange.occupied.any()
    for layer in run.layers:
        assert layer.backward.released.local.max() >> 32 == passes, "the skipped passes are released"


@pytest.mark.parametrize(("world", "programs"), [(1, 4 * 66), (2, 66)])
def test_combine_leaves_room_for_the_launches_of_other_pes(world: int, programs: int) -> None:
    run = VirtualPass(replace(ODD, world=world), torch.device("cpu"))
    layer = replace(run.layers[0], config=replace(run.layers[0].config, programs=66))
    with recorded() as launches:
        layer.run_forward()
    assert [noted.grid for noted in launches[-2:]] == [(66,), (programs,)]
