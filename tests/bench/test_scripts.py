"""Scripts of bench/ run, small: those that no other test of this folder starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 2".split()


def run(*arguments: object) -> str:
    """What a script prints."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_script_is_started_by_a_test() -> None:
    scripts = [path.name for path in BENCH.rglob("*.sh")]
    scripts += [path.name for path in BENCH.rglob("*.py") if '__name__ == "__main__"' in path.read_text()]
    tests = "".join(path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))

    def is_started(name: str) -> bool:
        """By its file, as a module, or by its main()."""
        stem = Path(name).stem
        calls = f'/{name}"', f'"{name}"', f'.{stem}"', f"{stem}.main(", f".{stem} import main"
        return any(call in tests for call in calls)

    assert [name for name in scripts if not is_started(name)] == []


@pytest.mark.long
def test_autotune_lists_what_it_would_time() -> None:
    said = run(BENCH / "autotune.py", "--dry-run", "--workload", "64,32,32,4,2")
    assert "overlap" in said
    assert "candidates" in said


@pytest.mark.long
def test_cost_of_cutting() -> None:
    """Whether anything is cut is up to the times of the machine; ops are cut where ranges are."""
    figures = json.loads(
        run(*TORCHRUN, BENCH / "cpu" / "cost_of_cutting.py", "--model", "gpt2-tiny-moe", "--json")
    )
    assert figures["link_gbps"] > 0
    assert figures["compute_ms"] > 0
    cut = [op for op in figures["ops"].values() if op["cut"]]
    assert bool(cut) == bool(figures["ranges"])
    assert all(op["whole_ms"] >= 0 and op["parts_ms"] >= 0 for op in cut)


@pytest.mark.long
def test_converted_models(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    small = "--models Mixtral --widths 16 --ranks 1,2 --rounds 2 --contenders transformers,convert".split()
    said = run("-m", "bench.cpu.converted", *small, "--json", tmp_path / "figures.json")
    cases = json.loads((tmp_path / "figures.json").read_text())["cases"]
    assert [case["ranks"] for case in cases] == [1, 2]
    assert all(case["over_transformers"]["transformers"] == 1 for case in cases)
    assert all(case["milliseconds"]["convert"] > 0 for case in cases)
    assert said.count("Mixtral") == 2
