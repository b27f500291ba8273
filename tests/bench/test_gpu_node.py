"""The check of a machine with several GPUs, dry: two CPU ranks in the interpreter; what counts as wrong."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from bench.gpu import gpu_node
from tests.processes import TORCHRUN, printed, run


@pytest.mark.long
def test_a_dry_run_on_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "node.json"
    said = printed(*TORCHRUN, 2, "-m", "bench.gpu.gpu_node", "--device", "cpu", "--out", out, timeout_s=400)
    assert said.startswith("dry run: interpreter, no figures; 2 ranks, 2 steps, 2 checked: 0 wrong")
    found = json.loads(out.read_text())
    correct = found["correctness"]
    assert (correct["steps"], correct["checked"], correct["wrong"]) == (2, 2, [])
    assert 0 < correct["largest_difference"] <= correct["difference_allowed"]
    assert set(found["ms"]) == {"fused", "nothing sent"}
    assert set(found["absent"]) == {"torch"}


def test_ranks_have_other_tokens_in_every_step_that_all_can_make_again() -> None:
    node, like = gpu_node.Node(tokens=100, width=4), torch.empty(0)
    numbers = {
        (step, rank): len(gpu_node.tokens_of(node, step, rank, like)[0])
        for step in range(20)
        for rank in range(2)
    }
    assert len(set(numbers.values())) > 20
    assert [place for place, number in numbers.items() if number == 0] == [(0, 1), (1, 0)]
    for a, b in zip(*(gpu_node.tokens_of(node, 3, 1, like) for _ in range(2)), strict=True):
        assert torch.equal(a, b)


def test_what_is_wrong_is_seen() -> None:
    wanted = torch.tensor([1.0, -4.0])
    assert gpu_node.largest_difference(wanted, wanted) == 0
    assert gpu_node.largest_difference(torch.tensor([2.0, -4.0]), wanted) == 0.25
    assert gpu_node.largest_difference(torch.tensor([math.nan, -4.0]), wanted) == math.inf
    assert gpu_node.largest_difference(torch.empty(0), torch.empty(0)) == 0


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="about machines without several GPUs")
def test_without_gpus_it_says_so_in_a_line() -> None:
    done = run("bash", "bench/gpu/gpu_node.sh", PYTHON=sys.executable)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(
        f"gpu_node: it needs 2 to 8 GPUs with NVLink, here are {torch.cuda.device_count()};"
    )
    assert done.stderr.count("\n") == 1
