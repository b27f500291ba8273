"""`bench/cpu/memory_limit.py` on a step of two layers: ours hides at least what torch's pass hides, within
the limit."""

from dataclasses import replace

import pytest

from bench.cpu import fsdp_step, memory_limit


@pytest.mark.long
def test_ours_hides_at_least_as_much_within_the_limit():
    shape = replace(fsdp_step.SHAPES["deepseek-like"], name="small", layers=2, batch=2)
    with fsdp_step.captured(shape) as step:
        found = list(memory_limit.rows(step, (1.03, None)))
    assert len(step.program) > 300
    assert {i.op.split(".")[1] for i in step.program.instructions if i.kind.is_communication} == {
        "all_gather_into_tensor",
        "all_to_all_single",
        "reduce_scatter_tensor",
    }
    original, torchs, ours, _, free = found
    assert original.hidden < torchs.hidden
    assert ours.peak <= 1.03
    assert ours.hidden >= torchs.hidden > 0.5
    assert free.iteration_ms <= ours.iteration_ms + 1e-9
    assert "| 1.03 | ours |" in memory_limit.table(found)


@pytest.mark.long
def test_no_limit_on_memory_is_worse_than_a_tighter_one_over_slow_links():
    shape = replace(fsdp_step.SHAPES["mixtral-like"], name="small", layers=2)
    for _, found in memory_limit.measured(shape, (10.0, 5.0, 2.0)):
        ours = [row.exposed_ms for row in found if row.method == "ours"]
        torchs = [row.exposed_ms for row in found if row.method == "torch"]
        assert ours == sorted(ours, reverse=True)
        assert all(o <= t for o, t in zip(ours, torchs, strict=True))


@pytest.mark.long
def test_the_script_prints_a_table(capsys):
    assert memory_limit.main(["--steps", "deepseek-like", "--layers", "2"]) == 0
    said = capsys.readouterr().out
    assert "deepseek-like: " in said
    assert said.count("| torch |") == said.count("| ours |") == len(memory_limit.LIMITS)
