"""Symmetric memory between processes: who puts where, who asked for what, and what is left behind."""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lancet_kernels.errors import CommunicationError
from lancet_kernels.kernels.symmetric import SharedMemory, one_machine
from tests.grids import few_of
from tests.processes import processes
from tests.refusals import refusal


def payload(writer: int, reader: int, num_bytes: int) -> bytes:
    """What `writer` puts to `reader`: any rank can work it out."""
    seed = 1000 * writer + reader
    data = torch.randint(0, 256, (num_bytes,), generator=torch.Generator().manual_seed(seed))
    return bytes(data.tolist())


def put_on_rank() -> bytes:
    """Every rank puts a row of 30 bytes to every rank, by address alone. -> this rank's copy, as bytes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with closing(SharedMemory(timeout_s=10)) as memory:
        region = memory.allocate("rows", (world, 3, 5), torch.bfloat16)
        assert (memory.rank, memory.world) == (rank, world)
        assert (region.local.shape, region.local.dtype) == ((world, 3, 5), torch.bfloat16)
        assert not region.local.any(), "not zero-filled"
        assert region.peers.tolist()[rank] == region.local.data_ptr()
        assert all(address % 16 == 0 for address in region.peers.tolist())
        memory.barrier()  # a rank that is ahead would put into what another still looks at
        for peer, address in enumerate(region.peers.tolist()):
            ctypes.memmove(address + rank * 30, payload(rank, peer, 30), 30)
        memory.barrier()
        return bytes(region.local.view(torch.uint8).flatten().tolist())


def test_puts_are_seen_bitwise(pool):
    for rank, seen in enumerate(pool.run(put_on_rank, ranks=3)):
        assert seen == b"".join(payload(writer, rank, 30) for writer in range(3))


# ---- who asked for what


X = "allocate 'x' [4] float32"
REQUESTS = {
    X: ("x", (4,), torch.float32),
    "allocate 'y' [1] int64": ("y", (1,), torch.int64),
    "allocate 'x' [2, 2] float32": ("x", (2, 2), torch.float32),
    "allocate 'x' [4] float16": ("x", (4,), torch.float16),
    "barrier": (),
}
# What rank 1 asks for, and what all others do.
MISMATCHES = [*((X, other) for other in REQUESTS if other != X), ("barrier", X)]


def mismatches_on_rank() -> list[str]:
    """After each mismatch a barrier, and a region, show that the memory still works."""
    said = []
    with closing(SharedMemory(timeout_s=10)) as memory:
        for number, pair in enumerate(MISMATCHES):
            request = REQUESTS[pair[memory.rank != 1]]
            said.append(refusal(partial(memory.allocate, *request) if request else memory.barrier))
            memory.barrier()
            memory.allocate(f"after {number}", (1,), torch.float32)
    return said


def test_mismatch_is_named_on_every_rank(pool):
    for said in pool.run(mismatches_on_rank, ranks=3):
        for (theirs, ours), message in zip(MISMATCHES, said, strict=True):
            assert f"{ours} (rank 0, 2), {theirs} (rank 1)" in message


def bad_requests_on_rank() -> list[str]:
    """Requests that all ranks make, and none can get; one that they can get comes last."""
    bad = [
        ("x", (4,), torch.float32),
        ("y", (-1,), torch.float32),
        ("y", (2.0,), torch.float32),
        ("y", (4,), "float32"),
        ("y", (1 << 50,), torch.uint8),
    ]
    with closing(SharedMemory(timeout_s=10)) as memory:
        memory.allocate("x", (4,), torch.float32)
        errors = [refusal(partial(memory.allocate, *request)) for request in bad]
        memory.allocate("y", (4,), torch.float32)
        return errors


def test_bad_requests(pool):
    for taken, negative, fraction, dtype, room in pool.run(bad_requests_on_rank):
        assert "'x' [4] float32: got a name that exists already" in taken
        assert "allocate 'y' [-1] float32" in negative
        assert "allocate 'y' [2.0] float32" in fraction
        assert "a torch dtype" in dtype
        assert "(rank 0, 1)" in room
        assert "/dev/shm larger" in room


# ---- ranks that stay away


def absent_on_rank(step: str) -> tuple[str, str]:
    """Rank 1 comes 1 s too late. -> this rank's error, and that of its next call."""
    with closing(SharedMemory(timeout_s=1.0)) as memory:
        memory.allocate("x", (4,), torch.float32)
        if memory.rank == 1:
            time.sleep(2.0)
        ask = {
            "barrier": partial(memory.barrier, timeout_s=0.8),
            "allocate 'y' [4] float32": partial(memory.allocate, "y", (4,), torch.float32),
        }[step]
        return refusal(ask, CommunicationError), refusal(memory.barrier, CommunicationError)


@pytest.mark.parametrize(
    ("step", "limit"), few_of([("barrier", "0.8 s"), ("allocate 'y' [4] float32", "1 s")])
)
def test_absent_rank_is_named(pool, step, limit):
    results = pool.run(absent_on_rank, step, ranks=4)
    for rank in (0, 2, 3):
        message, after = results[rank]
        # Who notices first tells the others.
        assert message.startswith(f"rank {rank}: {step} failed")
        assert f"waiting for rank(s) 1: no answer within {limit}" in message
        assert after.startswith(f"rank {rank}: barrier failed: ")
    assert f"{step} failed: rank 0 gave up waiting for rank(s) 1" in results[1][0]


# ---- what is left behind


def segments(pids: list[int]) -> list[str]:
    """The shared memory in /dev/shm that these processes have made."""
    return [file.name for pid in pids for file in one_machine.FOLDER.glob(f"lancet-{pid}-*")]


def mapped_bytes() -> int:
    """How much of shared memory of ours this process maps."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/lancet-" in line:
            begin, end = line.split()[0].split("-")
            total += int(end, 16) - int(begin, 16)
    return total


def close_on_rank() -> dict:
    others = mapped_bytes()  # an emulated link of an earlier test, say
    memory = SharedMemory(timeout_s=10)
    region = memory.allocate("x", (1 << 20,), torch.uint8)
    before, kept = mapped_bytes() - others, region.local
    assert not segments([os.getpid()]), "a name is left, for a rank that is killed to leave behind"
    memory.barrier()
    memory.close()
    memory.close()
    kept.fill_(1)  # the tensor keeps its memory alive
    del kept
    return {
        "mapped": (before, mapped_bytes() - others),
        "errors": [
            refusal(lambda: region.local),
            refusal(lambda: region.peers),
            refusal(lambda: memory.allocate("y", (1,), torch.float32)),
            refusal(memory.barrier),
        ],
    }


def test_close_frees(pool):
    for result in pool.run(close_on_rank):
        assert result["mapped"] == (2 << 20, 0)
        assert all("got a call after close()" in message for message in result["errors"])
        assert "region 'x'" in result["errors"][0]


def answer(function: Callable, rank: int, place: object, results) -> None:
    results.put(function(rank, place))
    results.close()
    results.join_thread()
    os._exit(0)


def in_processes(function: Callable, place: object) -> tuple[object, list]:
    """function(rank, place) in two processes, of which one dies. -> what the other says; the processes."""
    context = processes()
    results = context.Queue()
    ranks = [context.Process(target=answer, args=(function, rank, place, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        said = results.get(timeout=60)
        for process in ranks:
            process.join(30)
    finally:
        for process in ranks:
            process.kill()
    return said, ranks


def killed_between_create_and_map(rank: int, store: str) -> str:
    """Rank 1 dies when it has made its segment, before anybody has removed a name."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    if rank == 1:
        create = one_machine._create

        def create_and_die(*arguments) -> None:
            create(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        one_machine._create = create_and_die
    memory = SharedMemory(timeout_s=3.0)
    return refusal(lambda: memory.allocate("x", (4,), torch.float32), CommunicationError)


@pytest.mark.long
def test_killed_in_the_middle_of_allocating(tmp_path):
    message, ranks = in_processes(killed_between_create_and_map, f"{tmp_path}/store")
    assert "waiting for rank(s) 1" in message
    assert ranks[1].exitcode == -signal.SIGKILL
    assert segments([process.pid for process in ranks]) == []


def lose_the_store(rank: int, port: int) -> str:
    """Rank 0 keeps the store, as a process of torchrun does, and dies; the barrier of rank 1 says so."""
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    memory = SharedMemory(timeout_s=20)
    for number in range(20):
        memory.allocate(f"x{number}", (4,), torch.float32)
    memory.barrier()
    if rank == 0:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    return refusal(memory.barrier, CommunicationError)


def test_store_is_lost():
    port = dist.TCPStore("127.0.0.1", 0, 1, is_master=True).port
    message, _ = in_processes(lose_the_store, port)
    assert message.startswith("rank 1: barrier failed: no answer from the store of the process group (")


def other_machine_on_rank() -> str:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(one_machine, "machine", lambda: "another machine")
        return refusal(lambda: SharedMemory(timeout_s=10))


def test_ranks_on_two_machines(pool):
    for message in pool.run(other_machine_on_rank):
        assert "rank(s) 1 that share no memory with rank 0" in message
