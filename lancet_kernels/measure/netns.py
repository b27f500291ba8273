"""A real, slow wire on one machine: one rank per network namespace, the wire between them shaped by the
kernel.

Needs Linux, root, and the commands ip and tc (iproute2) with the htb queue and the u32 filter. Two ranks: a
veth pair is a wire with two ends. Small packets pass first, as control traffic does in a cluster's network.
The namespaces are called `lancet-<pid>-0` and `-1`. They are removed when the process that created them ends,
also when it is killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

from lancet_kernels.errors import UserError
from lancet_kernels.measure.launch import CPU_RANK, run_ranks

RANKS = 2
PORT = 29500  # always free, because the namespace is new
_ADDRESS = "10.213.0.{}"
_SMALL = "1:3"
"""The class of small packets."""
# Waits for the end of its input, which is the end of this process, however it ends.
_KEEPER = 'cat > /dev/null; for name in "$@"; do ip netns delete "$name"; done'


def missing() -> str | None:
    """What this machine lacks for such a wire; None if it lacks nothing."""
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
    tc = ["ip", "netns", "exec", probe, "tc"]
    queue = [*tc, *"qdisc add dev lo root handle 1: htb".split()]
    filters = [*tc, *"filter add dev lo parent 1: protocol ip u32 match u32 0 0 flowid 1:1".split()]
    shaped = all(subprocess.run(c, capture_output=True).returncode == 0 for c in (queue, filters))
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True)
    return None if shaped else "the queue htb and the filter u32 in its kernel"


@contextlib.contextmanager
def wire(gbps: float) -> Iterator[list[str]]:
    """Two namespaces with a wire of `gbps` Gbit/s in each direction between them. -> their names.

    Raises: UserError if this machine cannot have it, with the command that failed.
    """
    names = [f"lancet-{os.getpid()}-{end}" for end in range(RANKS)]
    with _removed_in_the_end(names):
        for name in names:
            _call("ip", "netns", "add", name)
        ends = [("netns", name, "type", "veth") for name in names]
        _call("ip", "link", "add", device(0), *ends[0], "peer", device(1), *ends[1][:2])
        for end, name in enumerate(names):
            _set_up(name, end, gbps)
        yield names


def _set_up(name: str, end: int, gbps: float) -> None:
    """Address and speed of one end."""
    rate = max(1, round(gbps * 1e6))
    # What passes at once after a pause: half a millisecond of traffic, but a segment of 64 KiB fits in. The
    # kernel would split one that does not into packets, on the cores that compute, as network cards do.
    burst = max(70_000, round(gbps * 1e9 / 8 * 0.5e-3))
    inside = ("ip", "netns", "exec", name)
    _call(*inside, "ip", "address", "add", f"{address(end)}/24", "dev", device(end))
    for name_of in ("lo", device(end)):
        _call(*inside, "ip", "link", "set", name_of, "up")

    def tc(kind: str, *words: str) -> None:
        _call(*inside, "tc", kind, "add", "dev", device(end), *words)

    whole = ("ceil", f"{rate}kbit", "burst", str(burst), "cburst", str(burst))
    tc("qdisc", "root", "handle", "1:", "htb", "default", "2")
    tc("class", "parent", "1:", "classid", "1:1", "htb", "rate", f"{rate}kbit", *whole)
    # Small packets are acknowledgements and counts of rows. In one queue, an exchange of counts would wait
    # until the rows of others before it have left.
    for class_id, priority in (("1:2", "1"), (_SMALL, "0")):
        half = ("rate", f"{max(1, rate // 2)}kbit", *whole)
        tc("class", "parent", "1:1", "classid", class_id, "htb", *half, "prio", priority)
    below_1024_bytes = ("match", "u16", "0", "0xfc00", "at", "2")
    tc("filter", "parent", "1:", "protocol", "ip", "prio", "1", "u32", *below_1024_bytes, "flowid", _SMALL)


def address(end: int) -> str:
    """The address of one end."""
    return _ADDRESS.format(end + 1)


def device(end: int) -> str:
    """The interface at one end; the kernel allows 15 characters."""
    return f"lan{os.getpid() % 100000}-{end}"


@contextlib.contextmanager
def _removed_in_the_end(names: Sequence[str]) -> Iterator[None]:
    """The namespaces go away when the block ends or this process does: by another process, which no signal to
    this one or to its terminal reaches. The wire goes with them."""
    keeper = subprocess.Popen(
        ["sh", "-c", _KEEPER, "keeper", *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        keeper.communicate()


def run_on_wire(arguments: Sequence[str], gbps: float) -> None:
    """Run `python *arguments` as two ranks at the ends of a wire, and wait for both.

    Raises: UserError (no wire to be had), RankFailed; SystemExit when this process is told to stop. Ranks and
    wire are gone by then.
    """
    with wire(gbps) as names:
        run_ranks(
            "ip",
            [["netns", "exec", name, sys.executable, *arguments] for name in names],
            [_environment(rank) for rank in range(RANKS)],
        )


def _environment(rank: int) -> dict[str, str]:
    return CPU_RANK | {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": device(rank),
    }


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            "wire between network namespaces",
            got=f"{(done.stderr or done.stdout).strip().splitlines()[-1:]} from {' '.join(command)}",
            expected="root on a Linux that has network namespaces, tc htb and tc u32",
            do="use the emulated link",
        )
