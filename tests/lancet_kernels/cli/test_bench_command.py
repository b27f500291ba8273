"""`lancet bench FILE.py:make_step`: a user's own step, measured beside its baselines."""

import json
from pathlib import Path

import pytest

from lancet_kernels.__main__ import main
from tests.processes import printed

STEP = f"{Path(__file__).parents[2] / 'own_steps/readme_step.py'}:make_step"
FIGURES = ("iteration_ms", "exposed_ms", "waited_ms", "peak_memory_gb")


def test_own_step_on_one_rank(capsys, tmp_path, monkeypatch) -> None:
    output, temporary = tmp_path / "figures.json", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    command = ["bench", STEP, "--ranks", "1", "--strategies", "none", "--rounds", "2", "--json"]
    assert main([*command, "--output", str(output), "--timeline", str(tmp_path / "timeline.png")]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    figures = json.loads(line)
    assert figures == json.loads(output.read_text())
    assert not [*temporary.glob("*lancet*")], "a file that stays for good"
    assert (figures["model"], figures["ranks"], figures["link"]) == (STEP, 1, "real")
    for name in FIGURES:
        assert set(figures[name]) == {"plain", "none"}, name
    assert set(figures["predicted_ms"]) == {"none"}
    assert (tmp_path / "timeline.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.long
@pytest.mark.parametrize("step", [STEP, "overlap"])
def test_two_ranks_over_an_emulated_link(step: str) -> None:
    """The blocking plan waits for the wire and is predicted to; an own model goes the same way as the
    library's."""
    small = ["--batch", "1", "--sequence", "16"] if step == "overlap" else []
    command = ["bench", step, *small, "--strategies", "none,lancet", "--link-gbps", "0.05", "--rounds", "2"]
    (line,) = printed("-m", "lancet_kernels", *command, "--json").splitlines()
    figures = json.loads(line)
    assert set(figures["iteration_ms"]) == {"plain", "ddp-like", "none", "lancet"}
    assert (figures["link"], figures["link_gbps"], figures["ranks"]) == ("emulated", 0.05, 2)
    assert figures["waited_ms"]["none"]["all_to_all"] > 0
    assert figures["predicted_exposed_ms"]["none"] > 0


@pytest.mark.long
def test_one_process_stands_for_eight_ranks() -> None:
    """The wire's share of the blocking step is the one asked for; the account adds up to the step; what the
    blocking plan waits for is what was predicted."""
    command = ["bench", STEP, "--stands-for", "8", "--strategies", "none,lancet", "--rounds", "2"]
    (line,) = printed("-m", "lancet_kernels", *command, "--share", "0.4", "--json").splitlines()
    figures = json.loads(line)
    assert (figures["link"], figures["ranks"]) == ("emulated wire, one rank stands for 8", 8)
    assert set(figures["iteration_ms"]) == {"plain", "ddp-like", "none", "lancet"}
    for name, step_ms in figures["iteration_ms"].items():
        assert sum(figures["account_ms"][name].values()) == pytest.approx(step_ms)
    assert figures["predicted_exposed_ms"]["none"] >= figures["predicted_exposed_ms"]["lancet"] > 0
    assert figures["waited_ms"]["none"]["all_to_all"] > 0.5 * figures["predicted_exposed_ms"]["none"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--stands-for 8", "link of stand-in ranks: got no speed, expected one; "),
        ("--stands-for 8 --share 0.4 --ranks 4", "options: got --stands-for and --ranks"),
        ("--gate hash", "options: got "),
        ("--share 0.4 --device cuda", "link: got device cuda, expected cpu, because only CPU ranks "),
        ("--strategies none,fast", "got 'fast', expected some of none, tutel"),
        ("--share 1", "--share: got 1, expected a number between 0 and 1"),
    ],
)
def test_what_does_not_fit_is_one_line(refused, arguments: str, message: str) -> None:
    assert message in refused("bench", STEP, *arguments.split())


@pytest.mark.parametrize(("option", "file"), [("--output", "none/figures.json"), ("--timeline", "a.picture")])
def test_figures_are_said_before_a_file_cannot_be_written(capfd, tmp_path, option: str, file: str) -> None:
    command = ["bench", STEP, *"--ranks 1 --strategies none --rounds 1 --warmup 0 --json".split()]
    assert main([*command, option, str(tmp_path / file)]) == 1
    out, err = capfd.readouterr()
    assert json.loads(out)["rounds"] == 1
    assert err.splitlines()[-1].startswith(f"lancet: file to write: got {tmp_path / file} (")


def test_a_function_that_is_not_there(refused) -> None:
    assert "module: got no make in " in refused("bench", STEP.replace("make_step", "make"))


def test_function_that_fails_on_a_rank_is_named(refused, tmp_path) -> None:
    file = tmp_path / "step.py"
    file.write_text("def make_step():\n    raise KeyError('no bread')\n")
    error = refused("bench", f"{file}:make_step", "--ranks", 1)
    assert "got KeyError: 'no bread' (step.py, line 2), expected (module, example inputs)" in error
