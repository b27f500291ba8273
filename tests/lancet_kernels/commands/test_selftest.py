"""`lancet selftest`: passes here, and fails where a result is wrong or a rank dies."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lancet_kernels import MoELayer
from lancet_kernels.cli import main
from lancet_kernels.commands import self_test, selftest
from lancet_kernels.errors import RankFailed
from lancet_kernels.training.ranks import Rank
from tests.ranks import RankPool


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_passes_on_the_cpu(ranks: int) -> None:
    command = [sys.executable, "-m", "lancet_kernels", "selftest", "--ranks", str(ranks), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["failed"] == 0
    on_cpu = [check for check in found["checks"] if check["device"] == "cpu"]
    assert [check["status"] for check in on_cpu] == ["ok" if ranks > 1 else "skipped", *["ok"] * 4]
    assert done.stderr.count("\n") >= len(on_cpu)


def checks_on_rank(folder: str) -> list[str]:
    """The lines that this rank shows."""
    lines: list[str] = []
    rank = Rank(dist.get_rank(), dist.get_world_size(), dist.get_rank(), torch.device("cpu"))
    self_test.run_checks(rank, Path(folder, "results.json"), lines.append)
    return lines


@pytest.mark.long
def test_checks_pass_on_two_ranks(pool: RankPool, tmp_path: Path) -> None:
    shown, nothing = pool.run(checks_on_rank, str(tmp_path), timeout_s=180, collective_timeout_s=90)
    results = json.loads((tmp_path / "results.json").read_text())
    assert [result["status"] for result in results] == ["ok"] * 5
    (plan,) = (result["detail"] for result in results if result["name"].startswith("a plan"))
    assert "ranges in parts: " in plan
    assert "ranges in parts: 0" not in plan
    assert len(shown) == 5
    assert nothing == []


def run_alone(folder: Path) -> list[dict]:
    """All checks on this process as the only rank."""
    file = folder / "results.json"
    self_test.run_checks(Rank(0, 1, 0, torch.device("cpu")), file, lambda _line: None)
    return json.loads(file.read_text())


def test_a_wrong_layer_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forward: Callable = MoELayer.forward
    monkeypatch.setattr(MoELayer, "forward", lambda *a, **k: 1.001 * forward(*a, **k))
    monkeypatch.setattr(
        self_test, "_plan", lambda _rank: self_test.Difference(float("nan"), 1.0, "no number")
    )
    by_name = {result["name"]: result for result in run_alone(tmp_path)}
    assert by_name["MoELayer, backend torch, 1 rank"]["status"] == "failed"
    assert "difference 1.0e-03" in by_name["MoELayer, backend torch, 1 rank"]["detail"]
    assert by_name["a plan applied, 1 rank"]["status"] == "failed"
    assert by_name["kernel of rows in Triton's interpreter"]["status"] == "ok"


def test_a_rank_that_dies_fails_its_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def launch(_ranks: int, arguments: list[str], **_: object) -> None:
        file = Path(arguments[arguments.index("--results") + 1])
        rows = [{"name": "first", "device": "cpu", "status": "ok"}, {"name": "second", "device": "cpu"}]
        file.write_text(json.dumps(rows))
        raise RankFailed(1, "was killed by SIGKILL")

    monkeypatch.setattr(selftest, "launch", launch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["selftest"]) == 1
    out = capsys.readouterr().out
    assert "cpu: second: rank 1 was killed by SIGKILL" in out
    assert out.endswith("1 passed, 1 failed, 0 skipped\n")


def test_ranks_that_do_not_start_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def launch(*_: object, **__: object) -> None:
        raise RankFailed(0, "ended with exit code 1")

    monkeypatch.setattr(selftest, "launch", launch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["selftest", "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [(check["name"], check["status"]) for check in checks] == [("start of the ranks", "failed")]


def test_gpu_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["selftest", "--gpu"]) == 1
    assert "--gpu: got no GPU" in capsys.readouterr().err
