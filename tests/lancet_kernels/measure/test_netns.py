"""A wire between network namespaces: as fast as asked for, and gone however its maker ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lancet_kernels.errors import RankFailed, UserError
from lancet_kernels.measure import netns
from tests.grids import few_of
from tests.processes import started

LACKING = netns.missing()
pytestmark = pytest.mark.skipif(LACKING is not None, reason=f"this machine lacks {LACKING}")

RANK = """
import json, os, subprocess, sys, time
import torch, torch.distributed as dist
from lancet_kernels.measure.ranks import report_errors, start_ranks
def main():
    rank = start_ranks("cpu", 20)
    if sys.argv[1:] == ["fail"] and rank.rank == 1:
        raise ValueError("no bread")
    sent = torch.zeros(1 << 22, dtype=torch.uint8)
    received = torch.empty_like(sent)
    counts, other = torch.zeros(2, 64, dtype=torch.int64), dist.new_group([0, 1])
    seconds, overtaken = [], []
    for _ in range(3):
        dist.barrier()
        begin = time.monotonic()
        rows = dist.all_to_all_single(received, sent, async_op=True)
        dist.all_to_all_single(torch.empty_like(counts), counts, group=other)
        overtaken.append(not rows.is_completed())
        rows.wait()
        seconds.append(time.monotonic() - begin)
    tc = ["tc", "-s", "class", "show", "dev", os.environ["GLOO_SOCKET_IFNAME"]]
    classes = subprocess.run(tc, capture_output=True, text=True).stdout
    if rank.rank == 0:
        with open(os.environ["TIMES"], "w") as file:
            json.dump({"seconds": seconds, "overtaken": overtaken, "classes": classes}, file)
raise SystemExit(report_errors(main))
"""
HOLD = """
import time
from lancet_kernels.measure.netns import wire
with wire(0.1) as names:
    print(*names, flush=True)
    time.sleep(100)
"""


def names_of(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"lancet-{pid}-")]


def wait_until_gone(pid: int, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while left := names_of(pid):
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIMES", str(tmp_path / "times.json"))
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    return path


@pytest.mark.long
def test_the_wire_has_its_speed(script: Path) -> None:
    """Two megabytes to the other rank at 0.05 Gbit/s take 336 ms. At least half of that is required, because
    the ranks leave the barrier at different times; without the wire it is a few milliseconds. Counts overtake
    the rows: they leave in the class of small packets."""
    netns.run_on_wire([str(script)], 0.05)
    exchanges = json.loads((script.parent / "times.json").read_text())
    assert min(exchanges["seconds"]) > 0.168
    assert any(exchanges["overtaken"])
    sent = re.findall(r"class htb 1:(\d) .*?prio (\d).*?\n Sent (\d+) bytes (\d+) pkt", exchanges["classes"])
    by_class = {name: (prio, int(size), int(packets)) for name, prio, size, packets in sent}
    prio, size, _ = by_class["2"]
    assert (prio, size > 2 * (1 << 21)) == ("1", True)  # the last rows may still wait
    prio, size, packets = by_class["3"]
    assert (prio, packets > 0) == ("0", True)
    assert size / packets < 1024
    assert names_of(os.getpid()) == []


@pytest.mark.long
def test_rank_that_fails_is_named(script: Path) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 failed: ValueError: no bread"):
        netns.run_on_wire([str(script), "fail"], 0.05)
    assert names_of(os.getpid()) == []


def test_block_that_fails_leaves_nothing() -> None:
    with pytest.raises(ZeroDivisionError), netns.wire(0.1):
        raise ZeroDivisionError(names_of(os.getpid()))
    assert names_of(os.getpid()) == []


def test_wire_that_cannot_be_had_is_one_line_and_leaves_nothing() -> None:
    with netns.wire(0.1), pytest.raises(UserError, match="wire between network namespaces"), netns.wire(0.1):
        pass
    wait_until_gone(os.getpid())


@pytest.mark.long
@pytest.mark.parametrize("number", few_of([signal.SIGKILL, signal.SIGINT, signal.SIGTERM]))
def test_maker_that_is_stopped_leaves_nothing(number: signal.Signals) -> None:
    with started(sys.executable, "-c", HOLD, stderr=subprocess.DEVNULL) as maker:
        names = maker.stdout.readline().split()
        assert sorted(names_of(maker.pid)) == sorted(names)
        maker.send_signal(number)
        maker.wait(10)
        wait_until_gone(maker.pid)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_bench_that_is_stopped_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "lancet_kernels", "bench", "overlap", "--link", "netns"]
    command += ["--link-gbps", "0.1", "--sequence", "32", "--batch", "2"]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with started(*command, **streams, env=os.environ | {"TMPDIR": str(tmp_path)}) as bench:
        assert "planning" in bench.stderr.readline(), "a rank says this when all have met"
        assert len(names_of(bench.pid)) == 2
        bench.send_signal(number)
        bench.wait(15)
        assert bench.returncode == (130 if number == signal.SIGINT else -number)
        wait_until_gone(bench.pid)
