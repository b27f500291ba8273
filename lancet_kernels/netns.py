"""A real, slow wire on one machine: one rank per network namespace, the wire between them shaped by the
kernel.

Needs Linux, root, and the commands ip and tc (iproute2) with the tbf queue. Two ranks: a veth pair is a
wire with two ends. The namespaces are called `lancet-<pid>-0` and `-1` and go away with their maker.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from lancet_kernels.errors import RankFailed, UserError
from lancet_kernels.ranks import LAUNCHER_PID

RANKS = 2
PORT = 29500  # in a namespace of our own, where nobody else listens
_ADDRESS = "10.213.0.{}"


def missing() -> str | None:
    """What keeps this machine from having a wire of its own; None if nothing does."""
    if sys.platform != "linux":
        return "network namespaces, which only Linux has"
    if os.geteuid() != 0:
        return "root, to make network namespaces"
    absent = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if absent:
        return f"the command {absent[0]} (package iproute2)"
    probe = f"lancet-{os.getpid()}-probe"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        return "the right to make network namespaces"
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True)
    return None


@contextlib.contextmanager
def wire(gbps: float) -> Iterator[list[str]]:
    """Two namespaces with a wire of `gbps` Gbit/s in each direction between them. -> their names.

    Raises: UserError if this machine cannot have it, with the command that failed.
    """
    names = [f"lancet-{os.getpid()}-{end}" for end in range(RANKS)]
    links = [f"lan{os.getpid() % 100000}{end}" for end in range(RANKS)]
    rate = max(1, round(gbps * 1e6))
    # A bucket of 1 ms of traffic, but no less than a jumbo segment: smaller ones cannot reach the rate.
    burst = max(64_000, round(gbps * 1e9 / 8 * 1e-3))
    try:
        for name in names:
            _call("ip", "netns", "add", name)
        _call(
            "ip",
            "link",
            "add",
            links[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            links[1],
            "netns",
            names[1],
        )
        for end, (name, link) in enumerate(zip(names, links, strict=True)):
            inside = ("ip", "netns", "exec", name)
            _call(*inside, "ip", "address", "add", f"{_ADDRESS.format(end + 1)}/24", "dev", link)
            for device in ("lo", link):
                _call(*inside, "ip", "link", "set", device, "up")
            _call(
                *inside, "tc", "qdisc", "add", "dev", link, "root", "tbf",
                "rate", f"{rate}kbit", "burst", str(burst), "latency", "2s",
            )  # fmt: skip
        yield names
    finally:
        for name in names:
            # The wire goes with the namespaces.
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def run_on_wire(arguments: Sequence[str], gbps: float) -> None:
    """Run `python *arguments` as two ranks at the ends of a wire, and wait for both.

    Raises: UserError (no wire to be had), RankFailed.
    """
    with wire(gbps) as names, tempfile.TemporaryDirectory(prefix="lancet-wire-") as folder:
        errors = [Path(folder, f"rank-{rank}.json") for rank in range(RANKS)]
        ranks = [_start(arguments, rank, name, errors[rank]) for rank, name in enumerate(names)]
        try:
            _wait(ranks, errors)
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    rank.send_signal(signal.SIGKILL)
                rank.wait()


def _start(arguments: Sequence[str], rank: int, name: str, errors: Path) -> subprocess.Popen:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": _ADDRESS.format(1),
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": f"lan{os.getpid() % 100000}{rank}",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # Where a rank says what went wrong, and whose end is its end: as under `launch`.
        "TORCHELASTIC_ERROR_FILE": str(errors),
        LAUNCHER_PID: str(os.getpid()),
    }
    return subprocess.Popen(["ip", "netns", "exec", name, sys.executable, *arguments], env=environment)


def _wait(ranks: list[subprocess.Popen], errors: list[Path]) -> None:
    """Until all have ended well. Raises RankFailed for the first that has not."""
    while True:
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes):
            if code:
                raise RankFailed(rank, f"failed: {_reason(errors[rank], code)}")
        if None not in codes:
            return
        time.sleep(0.1)


def _reason(errors: Path, code: int) -> str:
    try:
        return json.loads(errors.read_text(encoding="utf-8"))["message"]["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"exit code {code}"


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            "wire between network namespaces",
            got=f"{(done.stderr or done.stdout).strip().splitlines()[-1:]} from {' '.join(command)}",
            expected="root on a Linux that has network namespaces and tc tbf",
            do="use the emulated link",
        )
