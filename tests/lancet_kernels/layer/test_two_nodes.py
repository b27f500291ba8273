"""Two nodes for real: network namespaces with a wire between them, torchrun in each with two ranks.

Parameters are sharded inside a node and replicated between nodes (HSDP); experts are shared by the ranks of a
node, or by all ranks across the wire.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lancet_kernels.measure.launch import CPU_RANK

ADDRESS, DEVICE, PORT = "10.213.0.{}", "lancet-{}", "29500"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"),
]

PROGRAM = """
import os, signal, sys
import torch, torch.distributed as dist
from torch.distributed.tensor import init_device_mesh
from lancet_kernels import Groups, fsdp, optimize
from lancet_kernels.measure.launch import report_errors, start_ranks
from tests.lancet_kernels.optimization.test_sharded import Step, batch_of

def main():
    rank = start_ranks("cpu", 30)
    expert_ranks, dies = int(sys.argv[1]), sys.argv[2:] == ["dies"]
    nodes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "inside"))
    shape = (4 // expert_ranks, expert_ranks)
    experts = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "expert"))
    groups = Groups.from_mesh(experts, "expert", "replica")
    model = fsdp(Step(groups), nodes, groups)
    step = optimize(model, (batch_of(rank.rank, 0),), strategy="lancet", groups=groups, cluster="p3dn")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
    for number in range(6):
        if dies and number == 3 and rank.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = step(batch_of(rank.rank, 0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank.rank == 0:
            print(f"loss {float(mean) / 4:.6f}", flush=True)
    assert not step.fallbacks

raise SystemExit(report_errors(main))
"""


@contextlib.contextmanager
def wire() -> Iterator[list[str]]:
    """Two namespaces with a wire between them. -> their names."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    names = [f"lancet-{os.getpid()}-{end}" for end in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ends = [("netns", name, "type", "veth") for name in names]
        ip("link", "add", DEVICE.format(0), *ends[0], "peer", DEVICE.format(1), *ends[1][:2])
        for end, name in enumerate(names):
            ip("-n", name, "address", "add", f"{ADDRESS.format(end + 1)}/24", "dev", DEVICE.format(end))
            for device in ("lo", DEVICE.format(end)):
                ip("-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def node(name: str, number: int, program: Path, *arguments: str) -> subprocess.Popen[str]:
    """torchrun with two ranks in a namespace."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number)]
    launcher += ["--nproc-per-node", "2", "--master-addr", ADDRESS.format(1), "--master-port", PORT]
    environment = {**os.environ, **CPU_RANK, "GLOO_SOCKET_IFNAME": DEVICE.format(number)}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        ["ip", "netns", "exec", name, *launcher, str(program), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def on_two_nodes(folder: Path, *arguments: str) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of both nodes."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    with wire() as names:
        nodes = [node(name, number, program, *arguments) for number, name in enumerate(names)]
        try:
            said = [one.communicate(timeout=240)[0] for one in nodes]
        finally:
            for one in nodes:
                if one.poll() is None:
                    os.killpg(one.pid, signal.SIGKILL)
    return [one.returncode for one in nodes], said


@pytest.mark.parametrize("expert_ranks", [2, 4])
def test_planned_training_on_two_nodes(tmp_path: Path, expert_ranks: int) -> None:
    codes, said = on_two_nodes(tmp_path, str(expert_ranks))
    assert codes == [0, 0], said
    losses = [float(line.split()[1]) for line in said[0].splitlines() if line.startswith("loss ")]
    assert len(losses) == 6
    assert losses[-1] < losses[0]


def test_a_node_that_dies_is_named(tmp_path: Path) -> None:
    codes, said = on_two_nodes(tmp_path, "4", "dies")
    assert all(codes), said
    lost = [line for line in said[0].splitlines() if "CommunicationError" in line]
    assert any("lost its connection" in line and ADDRESS.format(2) in line for line in lost), said[0]
