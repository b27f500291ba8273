"""Scripts of bench/ run, small: those that no other test of this folder starts."""

import json
from pathlib import Path

import pytest

from tests.processes import BENCH, printed


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
    said = printed(BENCH / "autotune.py", "--dry-run", "--workload", "64,32,32,4,2")
    assert "overlap" in said
    assert "candidates" in said


@pytest.mark.long
def test_converted_models(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    small = "--models Mixtral --widths 16 --ranks 1,2 --rounds 2 --contenders transformers,convert".split()
    said = printed("-m", "bench.cpu.converted", *small, "--json", tmp_path / "figures.json")
    cases = json.loads((tmp_path / "figures.json").read_text())["cases"]
    assert [case["ranks"] for case in cases] == [1, 2]
    assert all(case["over_transformers"]["transformers"] == 1 for case in cases)
    assert all(case["milliseconds"]["convert"] > 0 for case in cases)
    assert said.count("Mixtral") == 2
