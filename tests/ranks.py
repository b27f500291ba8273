"""Ranks for tests: four worker processes, started once, that run a function of a test file on 1 to 4 of them.

    def double(value):                   # module level: workers import it from the test file
        total = torch.tensor(value)
        dist.all_reduce(total)
        return total.item()

    def test_double(pool):
        assert pool.run(double, 3, ranks=2) == [6, 6]

Every call gets a process group of its own (gloo, world = `ranks`), so nothing of one test, not even a failed
collective, reaches the next. A worker that dies or hangs fails the test that it ran, and all are replaced.
"""

from __future__ import annotations

import contextlib
import faulthandler
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.processes import processes

WORKERS = 4
# How long a collective may wait for a peer; a test that waits for the timeout asks for less.
COLLECTIVE_TIMEOUT_S = 60.0


class RankError(RuntimeError):
    """A function failed on a rank: the message has the rank and its traceback."""


class RankPool:
    """The workers; see the module's text."""

    def __init__(self, workers: int = WORKERS) -> None:
        self._count = workers
        self._workers: list[tuple[Any, Connection]] = []

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: int = 2,
        timeout_s: float = 120.0,
        collective_timeout_s: float = COLLECTIVE_TIMEOUT_S,
        leave_together: bool = True,
    ) -> list[Any]:
        """`function(*arguments)` on each rank, inside a process group. -> the results, by rank.

        leave_together: ranks wait for each other at the end; not for a function that breaks the group.
        Raises: RankError, with the error of the rank that failed first, or saying which ranks died or hang.
        """
        if not all(process.is_alive() for process, _ in self._workers):
            self.close()
        if not self._workers:
            self._start()
        workers = self._workers[:ranks]
        with tempfile.TemporaryDirectory(prefix="lancet-tests-") as folder:
            for rank, (_, connection) in enumerate(workers):
                place = (f"{folder}/store", rank, ranks, collective_timeout_s)
                task = (function, arguments, place, leave_together)
                connection.send_bytes(pickle.dumps(task))
            answers = self._collect(workers, function.__name__, timeout_s)
        errors = [answer for answer in answers if answer[0] == "error"]
        if errors:
            raise RankError(min(errors, key=lambda answer: answer[1])[2])
        return [answer[2] for answer in answers]

    def _collect(self, workers: list, name: str, timeout_s: float) -> list[tuple]:
        deadline = time.monotonic() + timeout_s
        answers: dict[int, tuple] = {}
        while len(answers) < len(workers):
            pending = {workers[rank][1]: rank for rank in range(len(workers)) if rank not in answers}
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                hanging = sorted(pending.values())
                raise RankError(f"{name}: no answer from rank(s) {hanging} within {timeout_s:g} s")
            for connection in ready:
                rank = pending[connection]
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    workers[rank][0].join(5.0)
                    code = workers[rank][0].exitcode
                    self.close()
                    raise RankError(f"{name}: rank {rank} died (exit code {code})") from None
        return [answers[rank] for rank in range(len(workers))]

    def _start(self) -> None:
        context = processes()
        for number in range(self._count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, number), name=f"rank-{number}", daemon=True
            )
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def pids(self) -> list[int]:
        """The process ids of the workers, by rank; empty before the first run."""
        return [process.pid for process, _ in self._workers]

    def close(self) -> None:
        """End the workers; the next run starts new ones."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join(60.0)  # on a busy machine
            process.close()
        self._workers = []


def _serve(connection: Connection, rank: int) -> None:
    """Worker number `rank`: run what comes until the other side is gone."""
    # A crash in native code says in which Python line, on stderr, which pytest shows.
    faulthandler.enable()
    # Ctrl-C is for pytest, which closes the connection.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            reply = pickle.dumps(("result", time.monotonic(), _run(*pickle.loads(message))))
        except BaseException as error:
            failed_at = getattr(error, "failed_at", time.monotonic())
            reply = pickle.dumps(("error", failed_at, f"rank {rank}: {traceback.format_exc()}"))
        with contextlib.suppress(OSError):
            connection.send_bytes(reply)


def _run(function: Callable[..., Any], arguments: tuple, place: tuple, leave_together: bool) -> Any:
    import torch
    import torch.distributed as dist

    from lancet_kernels.ops.comm.link import emulate_link, link
    from lancet_kernels.ops.comm.waiting import enter_layer

    store, rank, ranks, timeout_s = place
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        # A rank that fails at once must not take the store away from peers that still look for it.
        dist.barrier()
        link.read()
        result = function(*arguments)
        # The rank that leaves first closes its connections: wait, so that no peer sees that as a failure.
        if leave_together:
            dist.barrier()
        return result
    except BaseException as error:
        # Before the group is destroyed, at which the others fail too.
        error.failed_at = time.monotonic()
        raise
    finally:
        emulate_link(None)
        enter_layer("")
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Clear caches of meshes: in torch's a mesh of the next process group is equal to one of this, and what a
    cache keeps alive has threads of gloo, which may spin when the peer has gone."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _collective_utils, _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    from lancet_kernels.graph.capture import fsdp_parameters
    from lancet_kernels.ops.comm import groups

    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    for planners in (getattr(_redistribute, "_planner_cache", {}), fsdp_parameters._MESHES, groups._MESHES):
        planners.clear()
