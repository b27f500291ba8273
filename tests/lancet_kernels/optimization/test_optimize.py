"""`optimize(verbose=True)` says what it does; without it the library writes nothing but log records."""

import logging

import pytest
import torch

from lancet_kernels import MoELayer, UserError, optimize
from lancet_kernels.optimization.optimize import Progress

STAGES = ["capturing the step", "measuring ops", "planning", "applying the plan"]


def names(lines: list[str]) -> list[str]:
    assert all(line.endswith(" s") and float(line.split(": ")[1].split()[0]) >= 0 for line in lines)
    return [line.split(": ")[0] for line in lines]


class Step(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = MoELayer(8, 8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


@pytest.mark.parametrize("verbose", [True, pytest.param(False, marks=pytest.mark.long)])
def test_optimize_shows_its_stages(
    verbose: bool, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lancet_kernels")
    optimize(Step(), (torch.randn(4, 8),), strategy="none", cluster="local", verbose=verbose)
    out, err = capsys.readouterr()
    assert out == ""
    assert names(err.splitlines()) == STAGES * verbose
    logged = [r.message for r in caplog.records if r.name == optimize.__module__]
    assert names(logged) == STAGES


def test_an_optimized_module_is_not_optimized_again() -> None:
    x = torch.randn(4, 8)
    step = optimize(Step(), (x,), strategy="none", cluster="local")
    for model in (step, torch.nn.Sequential(step)):
        with pytest.raises(UserError, match=r"model: got a module that optimize\(\) gave"):
            optimize(model, (x,))
    optimize(step.module, (x,), strategy="none", cluster="local")(x).backward()


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    progress = Progress(("one", "two"), shown=True)
    progress.begin("one")
    progress.begin("two")
    progress.end()
    err = capsys.readouterr().err
    assert "two (2 of 2)" in err
    assert "one: 0.0 s" in err
