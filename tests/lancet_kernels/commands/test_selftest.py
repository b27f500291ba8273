"""`lancet selftest`: passes here, and fails where a result is wrong or a rank dies."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lancet_kernels import MoELayer
from lancet_kernels.cli import main
from lancet_kernels.commands import selftest
from lancet_kernels.errors import RankFailed
from lancet_kernels.training.ranks import Rank
from tests.processes import run


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_passes_on_the_cpu(ranks: int) -> None:
    done = run(sys.executable, "-m", "lancet_kernels", "selftest", "--ranks", ranks, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["failed"] == 0
    on_cpu = [check for check in found["checks"] if check["device"] == "cpu"]
    assert [check["status"] for check in on_cpu] == ["ok" if ranks > 1 else "skipped", *["ok"] * 4]
    (plan,) = (check["detail"] for check in on_cpu if check["name"].startswith("a plan"))
    assert "ranges in parts: " in plan
    assert "ranges in parts: 0" not in plan or ranks == 1
    # Only the first rank shows its lines.
    assert done.stderr.count(": MoELayer, backend torch") == len(found["checks"]) // len(on_cpu)


def test_a_wrong_layer_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forward: Callable = MoELayer.forward
    monkeypatch.setattr(MoELayer, "forward", lambda *a, **k: 1.001 * forward(*a, **k))
    no_number = selftest.Difference(float("nan"), 1.0, "no number")
    monkeypatch.setattr(selftest, "_plan", lambda _rank: no_number)
    file = tmp_path / "results.json"
    selftest.run_checks(Rank(0, 1, 0, torch.device("cpu")), file, lambda _line: None)
    by_name = {result["name"]: result for result in json.loads(file.read_text())}
    assert by_name["MoELayer, backend torch, 1 rank"]["status"] == "failed"
    assert "difference 1.0e-03" in by_name["MoELayer, backend torch, 1 rank"]["detail"]
    assert by_name["a plan applied, 1 rank"]["status"] == "failed"
    assert by_name["kernel of rows in Triton's interpreter"]["status"] == "ok"


@pytest.mark.parametrize(
    ("written", "named", "counted"),
    [
        (["ok", "running"], "check 1", "1 passed, 1 failed, 0 skipped"),
        ([], "start of the ranks", "0 passed, 1 failed, 0 skipped"),
    ],
)
def test_a_rank_that_dies_fails_its_check(monkeypatch, capsys, written, named, counted) -> None:
    def launch(_ranks: int, arguments: list[str], **_: object) -> None:
        file = Path(arguments[arguments.index("--results") + 1])
        rows = [{"name": f"check {n}", "device": "cpu", "status": s} for n, s in enumerate(written)]
        file.write_text(json.dumps(rows))
        raise RankFailed(1, "was killed by SIGKILL")

    monkeypatch.setattr(selftest, "launch", launch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["selftest"]) == 1
    out = capsys.readouterr().out
    assert f"cpu: {named}: rank 1 was killed by SIGKILL" in out
    assert out.endswith(f"{counted}\n")


def test_gpu_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["selftest", "--gpu"]) == 1
    assert "--gpu: got no GPU" in capsys.readouterr().err
