"""NVSHMEM: what is said where it is missing, the order of our calls against a stand-in, and one real PE.

The stand-in has the functions of nvshmem4py 0.4.1 that we call, over memory of the process: it proves who is
called when, not that NVSHMEM works. That is for the tests marked gpu.
"""

import ctypes
import sys
from contextlib import closing
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from lancet_kernels import UserError
from lancet_kernels.kernels.protocol import device
from lancet_kernels.kernels.symmetric import NvshmemMemory, create, init_module, nvshmem
from tests.refusals import refusal

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")


# ---- what is missing


@NO_GPU
def test_no_gpu():
    assert nvshmem.missing() == f"no CUDA device that torch {torch.__version__} can use"


def test_what_is_missing_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    packages = ["nvshmem4py-cu13"]
    monkeypatch.setattr(nvshmem, "_distributions", lambda prefix: packages)
    monkeypatch.setitem(sys.modules, "nvshmem", None)
    monkeypatch.setitem(sys.modules, "nvshmem.core", None)
    said = nvshmem.missing()
    assert said.startswith("no nvshmem.core that works (ModuleNotFoundError: ")
    assert said.endswith("; pip install 'lancet-kernels[cuda]')")
    core = stand_in(monkeypatch)
    assert nvshmem.missing() == ""
    packages[:] = ["nvshmem4py-cu12"]
    assert nvshmem.missing() == "nvshmem4py for cu12, but torch is built for CUDA 13.0"
    packages[:] = ["nvshmem4py-cu13"]
    # As an old loader of libraries says it.
    core.get_version = lambda: int("libnvshmem_host.so.3 not found")
    assert nvshmem.missing().startswith("no nvshmem.core that works (ValueError: ")


def create_on_rank() -> str:
    return refusal(lambda: create(device="cuda", timeout_s=20))


@NO_GPU
def test_create_says_what_works_instead(pool):
    for message in pool.run(create_on_rank):
        assert f"got no CUDA device that torch {torch.__version__} can use (rank 0, 1)" in message
        assert message.count("no CUDA device") == 1, "both makers lack it: said once"
        for alternative in ("NCCL's collectives", "virtual_memories", "CPU ranks over shared memory"):
            assert alternative in message


# ---- the order of our calls, against a stand-in


def stand_in(monkeypatch, rank: int = 0, world: int = 1) -> ModuleType:
    """nvshmem.core and what it needs, as modules; `.calls` says what was called."""
    calls: list = []
    core, bindings = ModuleType("nvshmem.core"), ModuleType("nvshmem.bindings")
    cuda = ModuleType("cuda.core")
    places: dict[int, torch.Tensor] = {}

    class UniqueId:
        def __init__(self, text: bytes):
            self.data = ctypes.create_string_buffer(text, 128)
            self.ptr = ctypes.addressof(self.data)

    def init(*, device, uid, rank, nranks, initializer_method):
        calls.append(("init", uid.data.value, rank, nranks, initializer_method))

    def tensor(shape, dtype, except_on_del):
        raw = torch.full(shape, 255, dtype=dtype)
        places[raw.data_ptr()] = raw
        calls.append("tensor")
        return raw

    core.calls, core.init, core.tensor = calls, init, tensor
    core.get_version = lambda: SimpleNamespace(libnvshmem_version="3.8.0")
    core.get_unique_id = lambda empty: UniqueId(b"" if empty else b"of rank 0")
    core.my_pe, core.n_pes = (lambda: rank), (lambda: world)
    core.Teams, core.team_n_pes = SimpleNamespace(TEAM_SHARED=1), (lambda team: world)
    bindings.uniqueid_dtype = SimpleNamespace(itemsize=128)
    bindings.ptr = lambda address, peer: address + 4096 * (peer - rank) if address in places else 0
    bindings.barrier_all = lambda: calls.append("barrier_all")
    bindings.cumodule_init = lambda module: calls.append(("cumodule_init", module)) or module % 2
    cuda.Device = lambda index: SimpleNamespace(set_current=lambda: None)
    for name, module in (("core", core), ("bindings", bindings)):
        monkeypatch.setitem(sys.modules, f"nvshmem.{name}", module)
    monkeypatch.setitem(sys.modules, "nvshmem", ModuleType("nvshmem"))
    monkeypatch.setitem(sys.modules, "cuda.core", cuda)
    return core


def on_the_stand_in(gpus: list[str], far: list[int]) -> dict:
    """A memory, a region, a barrier, close; `far`: the ranks that no pointer may reach."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        core = stand_in(patch, rank, world)
        patch.setattr(nvshmem, "missing", lambda: "")
        patch.setattr(nvshmem, "gpu_id", lambda device: gpus[rank])
        patch.setattr(nvshmem, "signals_reach", lambda device, gpu: gpus.index(gpu) not in far)
        patch.setattr(torch.cuda, "synchronize", lambda device: core.calls.append("synchronize"))
        patch.setattr(NvshmemMemory, "_started", False)
        try:
            with closing(NvshmemMemory(device="cpu", timeout_s=10)) as memory:
                region = memory.allocate("x", (5,), torch.float32)
                peers = [a - region.local.data_ptr() if a else None for a in region.peers.tolist()]
                assert not region.local.any(), "not zero-filled"
                memory.barrier()
                again = NvshmemMemory(device="cpu", timeout_s=10)
                again.close()
        except UserError as error:
            return {"error": str(error)}
        return {"calls": core.calls, "peers": peers, "reason": memory.reason, "far": memory.far}


def test_order_of_calls(pool):
    results = pool.run(on_the_stand_in, ["GPU-a", "GPU-b"], [])
    for rank, result in enumerate(results):
        assert result["calls"] == [
            ("init", b"of rank 0", rank, 2, "uid"),
            "tensor", "synchronize", "barrier_all",
        ]  # fmt: skip
        assert result["peers"] == [4096 * (peer - rank) for peer in range(2)]
        assert result["reason"] == "nvshmem: 2 GPUs, NVSHMEM 3.8.0, pointers to 2 of them at most"
        assert not result["far"]


def test_no_pointer_where_signals_cannot_go(pool):
    for result in pool.run(on_the_stand_in, ["GPU-a", "GPU-b", "GPU-c", "GPU-d"], [2], ranks=4):
        assert [peer is None for peer in result["peers"]] == [False, False, True, False]
        assert result["far"]


def test_two_ranks_on_one_gpu(pool):
    for result in pool.run(on_the_stand_in, ["GPU-a", "GPU-a"], []):
        assert "got ranks on one GPU: GPU-a (rank 0, 1)" in result["error"]
        assert "virtual_memories" in result["error"]


class Kernel:
    """What init_module reads of what Triton gives for a compiled kernel."""

    def __init__(self, ptx: str, module: int):
        self.asm, self.module, self._loads = {"ptx": ptx}, None, module

    def _init_handles(self):
        self.module = self._loads


LINKED = ".visible .const .align 4 .b8 nvshmemi_device_lib_version_d[12] = {3, 0, 0, 0, 8};"


def test_init_module_once_and_only_where_it_is_used(monkeypatch):
    core = stand_in(monkeypatch)
    linked, plain, refused = Kernel(LINKED, 2), Kernel(".visible .entry plain()", 4), Kernel(LINKED, 3)
    with pytest.raises(UserError, match="NVSHMEM, which is not initialised"):
        init_module(linked)
    monkeypatch.setattr(NvshmemMemory, "_started", True)
    for kernel in (plain, linked, linked):
        init_module(kernel)
    assert plain.module is None
    with pytest.raises(UserError, match="status 1 from nvshmemx_cumodule_init"):
        init_module(refused)
    assert core.calls == [("cumodule_init", 2), ("cumodule_init", 3)]


# ---- one PE, really


@triton.jit
def put_to_itself_kernel(
    source_ptr, row_ptr, stage_ptr, region_ptr, signals_ptr, nowhere_ptr, out_ptr, report_ptr, num_rows,
    D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Put source[row[i]] for i < num_rows to this PE by NVSHMEM, signal, wait, copy what has come to out.

    nowhere: a table of peers without addresses. Grid: (1,). Word 1 of the signals becomes 1 << 32 | num_rows.
    Example: row = [7, 2], num_rows = 2: region and out begin with source[7] and source[2].
    """
    first = tl.cast(0, tl.int64)
    device.put_rows(
        region_ptr, nowhere_ptr, 0, first, source_ptr, row_ptr, num_rows, D, stage_ptr, first, True, ROWS, 4
    )
    word = device.word(1, num_rows)
    device.put_signal(signals_ptr, nowhere_ptr, 0, 1, word, True)
    device.wait(signals_ptr + 1, word, 5_000_000, report_ptr, 0, 0, 0, 1, True)
    i_row, i_d = tl.arange(0, ROWS), tl.arange(0, D)
    at = i_row[:, None] * D + i_d[None, :]
    m = (i_row < num_rows)[:, None] & (i_d < D)[None, :]
    tl.store(out_ptr + at, tl.load(region_ptr + at, mask=m), mask=m)
    device.quiet(True)


@pytest.mark.gpu
def test_one_pe(request):
    lacks = nvshmem.missing()
    if lacks:
        pytest.skip(lacks)
    libraries = (("libnvshmem_device", sys.modules["nvshmem.core"].find_device_bitcode_library()),)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    request.addfinalizer(dist.destroy_process_group)
    with closing(NvshmemMemory(timeout_s=30)) as memory:
        rows = memory.allocate("rows", (4, 32), torch.float32)
        signals = memory.allocate("signals", (2,), torch.int64)
        stage = memory.allocate("stage", (4, 32), torch.float32)
        assert rows.peers.tolist() == [rows.local.data_ptr()]
        assert not rows.local.any()
        source, out = torch.arange(320.0, device="cuda").view(10, 32), torch.zeros_like(rows.local)
        # Behind the rows stands one that source does not have: nobody may look at it.
        row = torch.tensor([7, 0, 3, 10**6], dtype=torch.int32, device="cuda")
        nowhere, report = (torch.zeros(n, dtype=torch.int64, device="cuda") for n in (1, 8))
        given = source, row, stage.local, rows.local, signals.local, nowhere, out, report, 3, 32, 4
        init_module(put_to_itself_kernel.warmup(*given, grid=(1,), extern_libs=libraries))
        put_to_itself_kernel[(1,)](*given, extern_libs=libraries)
        memory.barrier()
        assert torch.equal(out[:3], source[[7, 0, 3]])
        assert not out[3].any()
        assert signals.local.tolist() == [0, 1 << 32 | 3]
        assert not report.any()
