"""`make gpu` without a GPU: it says what is missing. What it measures with runs, tiny, in the interpreter."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.processes import printed, run, started, wait_for

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


@pytest.mark.long
def test_without_a_gpu_it_says_so_in_a_line() -> None:
    done = run("bash", "bench/gpu/gpu.sh", PYTHON=sys.executable)
    assert done.returncode == 2
    assert done.stderr == f"make gpu: no CUDA device that torch {torch.__version__} can use\n"
    assert done.stdout == ""


@pytest.mark.long
def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    done = run(sys.executable, "-m", "bench.gpu.gpu_measure", "--out", str(tmp_path / "x.json"))
    assert done.returncode == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    """Even where it is ignored, as in a background process of a shell; a second one changes nothing."""
    out = tmp_path / "smoke.json"
    shell = 'trap "" INT; exec "$0" -m bench.gpu.gpu_measure --smoke --rounds 999 --out "$1"'
    with started("bash", "-c", shell, sys.executable, out, stderr=subprocess.PIPE) as process:
        wait_for(lambda: out.exists() or process.poll() is not None, 120)
        begun = json.loads(out.read_text())
        assert not begun["complete"]
        assert [missing["what"] for missing in begun["not_measured"]] == begun["planned"]
        for _ in range(2):
            process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1, stderr
    found = json.loads(out.read_text())
    assert not found["complete"]
    assert stdout.startswith("smoke: interpreter, no figures")
    for missing in found["not_measured"]:
        assert f"not measured: {missing['what']}: not reached\n" in stdout


@pytest.mark.long
def test_every_measurement_runs(tmp_path: Path) -> None:
    out = tmp_path / "smoke.json"
    said = printed("-m", "bench.gpu.gpu_measure", "--smoke", "--out", out)
    assert said.startswith("smoke: interpreter, no figures")
    found = json.loads(out.read_text())
    assert found["label"] == "smoke: interpreter, no figures"
    assert found["complete"]
    assert len(found["planned"]) == 3
    assert found["not_measured"] == found["wrong"] == []
    assert {"date", "device", "versions", "commit"} <= found.keys()
    assert [figure["figure"] for figure in found["figures"]] == [
        *["fused launch, forward", "fused launch, backward"] * 2,
        "MoE layer EP=1, forward", "MoE layer EP=1, forward and backward",
    ]  # fmt: skip
    for figure in found["figures"]:
        assert set(figure["sizes"]) >= set("TDFEK")
        for spread in (*figure["ms"].values(), *(ratio["value"] for ratio in figure["ratios"])):
            assert 0 < spread["p10"] <= spread["median"] <= spread["p90"]
            assert spread["rounds"] == 1
        # What the launches compute is right.
        assert figure.get("largest_difference", 0.0) < 1e-5
