"""`lancet selftest`: passes here, and fails where a result is wrong or a rank dies."""

import sys
from collections.abc import Callable

import pytest
import torch

from lancet_kernels import MoELayer
from lancet_kernels.cli import selftest
from lancet_kernels.errors import UserError
from lancet_kernels.measure.launch import Rank
from tests.processes import run

RANK = Rank(0, 1, 0, torch.device("cpu"))


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("ranks", [1, 3])
def test_passes_on_the_cpu(ranks: int) -> None:
    done = run(sys.executable, "-m", "lancet_kernels", "selftest", "--ranks", ranks)
    assert done.returncode == 0, done.stderr
    on_cpu = [line for line in done.stdout.splitlines() if line.startswith("cpu: ")]
    assert len(on_cpu) == 3, "only the first rank says something"
    assert all("ok       difference " in line for line in on_cpu)


def test_a_wrong_layer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    forward: Callable = MoELayer.forward
    monkeypatch.setattr(MoELayer, "forward", lambda *a, **k: 1.001 * forward(*a, **k))
    with pytest.raises(
        UserError, match=r"backend torch, 1 rank: got a difference of 1\.0e-03, expected at most"
    ):
        selftest.run_checks(RANK)


def test_a_gradient_that_is_no_number_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the last one that is compared."""
    forward: Callable = MoELayer.forward

    def broken(layer: MoELayer, *arguments, **by_name):
        layer.w2.register_hook(lambda gradient: gradient * float("nan"))
        return forward(layer, *arguments, **by_name)

    monkeypatch.setattr(MoELayer, "forward", broken)
    with pytest.raises(UserError, match="backend torch, 1 rank: got a difference of inf"):
        selftest.run_checks(RANK)


def test_a_plan_that_gives_no_number_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(selftest, "_plan", lambda _rank: (float("nan"), 1.0))
    with pytest.raises(UserError, match="a plan applied, 1 rank: got a difference of"):
        selftest.run_checks(RANK)
    assert "MoELayer, backend torch, 1 rank" in capsys.readouterr().out


def test_gpu_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, refused) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--gpu: got no GPU" in refused("selftest", "--gpu")
