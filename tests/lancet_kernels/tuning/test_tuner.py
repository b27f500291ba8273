"""The tuner: what it prunes and why, what it chooses, how it goes on when interrupted, how ranks agree."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import lancet_kernels
from lancet_kernels.cli import main
from lancet_kernels.errors import UserError
from lancet_kernels.kernels import compile_pool
from lancet_kernels.kernels.compile import CompiledKernel
from lancet_kernels.kernels.compile_pool import Row
from lancet_kernels.kernels.launch_model import hardware_of
from lancet_kernels.kernels.tuned_entry import KINDS, MEASURED, MODELLED
from lancet_kernels.kernels.tuning import TunedCache
from lancet_kernels.measuring.timing import Clock
from lancet_kernels.tuning import tune_tasks
from lancet_kernels.tuning.candidates import PRUNE_ABOVE, rank_candidates
from lancet_kernels.tuning.place import Place
from lancet_kernels.tuning.tune_tasks import make_tasks
from lancet_kernels.tuning.tuner import tune
from lancet_kernels.tuning.workloads import WORKLOADS, Workload, parse_workload

ROOT = Path(__file__).parents[3]
TINY = Workload("tiny", 12, 16, 32, 4, 2)
SM90 = Place.modelled(90)


def compiled(specimen, registers=100, spills=0) -> Row:
    found = CompiledKernel(
        specimen.name, specimen.config, "sm_90", registers, spills, 0, 60_000, 32 * specimen.num_warps,
        specimen.wgmma, specimen.tma, False, 0.1,
    )  # fmt: skip
    return Row(specimen, found, None)


@pytest.fixture
def compiler(monkeypatch):
    """Stands for the compiler; 8 warps spill. -> the specimens that it was given."""
    seen = []

    def compile_all(chosen, arch, *, workers, on_done):
        for _, specimen in chosen:
            seen.append(specimen)
            on_done(compiled(specimen, spills=24 if specimen.num_warps == 8 else 0))

    monkeypatch.setattr(compile_pool, "compile_all", compile_all)
    return seen


@pytest.fixture
def cache(tmp_path) -> TunedCache:
    return TunedCache(tmp_path / "tuned.json")


def test_shapes_of_a_layer_are_tuned_once_each() -> None:
    tasks = make_tasks([TINY, TINY], torch.bfloat16)
    assert len({task.key("x") for task in tasks}) == len(tasks) == 10
    (routing,) = (task for task in tasks if task.kind == "routing")
    assert routing.dtype == torch.float32


@pytest.mark.parametrize("workload", list(WORKLOADS))
def test_every_pruned_candidate_says_why_and_the_default_is_never_one(workload) -> None:
    for task in make_tasks([WORKLOADS[workload]], torch.bfloat16):
        found = rank_candidates(task, hardware_of(90), 8)
        kept = [c for c in found if c.reason is None]
        assert found[0] in kept
        assert 1 <= len(kept) <= 8
        assert len({str(c.config) for c in found}) >= len(found) // 4
        assert all(c.reason.startswith("model: ") for c in found if c not in kept)
        best = min(c.model_ms for c in found)
        assert all(c.model_ms <= PRUNE_ABOVE * best for c in kept if c is not found[0])


def test_what_spills_is_pruned_before_the_choice_and_a_modelled_entry_says_so(compiler, cache) -> None:
    tasks = make_tasks([WORKLOADS["middle"]], torch.bfloat16, ["grouped_gemm_dx"])
    outcomes = tune(tasks, SM90, cache)
    for outcome in outcomes:
        reasons = {c.reason for c in outcome.candidates if c.reason and c.reason.startswith("compiler")}
        assert reasons == {"compiler: spills 24 bytes"}
        assert outcome.status == "tuned"
        assert outcome.winner.config.num_warps == 4
        assert outcome.winner.facts.registers == 100
    entries = cache.entries()
    assert {e.how for e in entries.values()} == {MODELLED}
    assert {e.device for e in entries.values()} == {"sm_90"}
    assert len(entries) == len(tasks)


def test_what_is_known_is_not_compiled_again(compiler, cache) -> None:
    tasks = make_tasks([TINY], torch.bfloat16, ["permute", "combine"])
    tune(tasks[:1], SM90, cache)
    del compiler[:]
    outcomes = tune(tasks, SM90, cache)
    assert [o.status for o in outcomes] == ["known", "tuned"]
    assert {s.name for s in compiler} == {"combine"}
    assert [o.status for o in tune(tasks, SM90, cache, force=True)] == ["tuned", "tuned"]


def test_a_dry_run_compiles_and_writes_nothing(compiler, cache) -> None:
    (outcome,) = tune(make_tasks([TINY], torch.bfloat16, ["permute"]), SM90, cache, dry_run=True)
    assert outcome.status == "dry-run"
    assert outcome.kept
    assert not compiler
    assert not cache.path.exists()


def test_time_that_is_up_leaves_the_rest_for_the_next_run(monkeypatch, cache) -> None:
    def compile_all(chosen, arch, *, workers, on_done):
        on_done(compiled(chosen[0][1]))
        time.sleep(0.2)

    monkeypatch.setattr(compile_pool, "compile_all", compile_all)
    tasks = make_tasks([TINY], torch.bfloat16, ["permute", "combine"])
    outcomes = tune(tasks, SM90, cache, minutes=0.1 / 60)
    assert [o.status for o in outcomes] == ["left", "left"]
    assert cache.entries() == {}


def test_a_failing_compiler_is_reported(monkeypatch, cache) -> None:
    def compile_all(chosen, arch, *, workers, on_done):
        raise RuntimeError("no disk")

    monkeypatch.setattr(compile_pool, "compile_all", compile_all)
    with pytest.raises(RuntimeError, match="no disk"):
        tune(make_tasks([TINY], torch.bfloat16, ["permute"]), SM90, cache)


class FakeClock(Clock):
    """Runs nothing: the time of a run is made up. -> calls, in order."""

    def __init__(self, milliseconds) -> None:
        super().__init__(torch.device("cpu"))
        self.milliseconds, self.calls = milliseconds, []

    def once(self, work) -> float:
        self.calls.append(work)
        return self.milliseconds(work())


@pytest.fixture
def measured_place() -> Place:
    """As if there were a GPU, in whose place a made-up clock stands."""
    return Place(torch.device("cpu"), "NVIDIA H100 80GB HBM3", hardware_of(90))


def measure(place, cache, clock, monkeypatch, **options):
    """Tune permute with made-up times."""
    (task,) = make_tasks([TINY], torch.bfloat16, ["permute"])
    made_up = dataclasses.replace(task.tunable, runner=lambda task, device: lambda config: lambda: config)
    monkeypatch.setitem(tune_tasks._TUNABLES, "permute", made_up)
    return tune([task], place, cache, clock=clock, **options)


def test_the_measured_median_wins_whatever_the_model_said(
    compiler, cache, measured_place, monkeypatch
) -> None:
    jitter = iter([0.0, 9.0, 0.1] * 1000)

    def milliseconds(config):
        # One outlier in three: a mean would be fooled.
        return (1.0 if config.num_warps == 2 and config.block_tokens == 16 else 2.0) + next(jitter)

    clock = FakeClock(milliseconds)
    (outcome,) = measure(measured_place, cache, clock, monkeypatch, keep=30, rounds=5)
    timed = [c for c in outcome.candidates if c.ms is not None]
    assert len(timed) > 3
    assert outcome.winner.ms == min(c.ms for c in timed)
    (entry,) = cache.entries().values()
    assert entry.how == MEASURED
    assert entry.device == measured_place.name
    # In turn: every candidate once before the first one comes again.
    names = [id(call) for call in clock.calls]
    assert len(set(names[: len(timed)])) == len(timed)
    assert names[: len(timed)] == names[len(timed) : 2 * len(timed)]


def test_a_measurement_is_made_although_a_model_was_there_and_not_twice(
    compiler, cache, measured_place, monkeypatch
) -> None:
    clock = FakeClock(lambda config: 1.0)
    assert measure(measured_place, cache, clock, monkeypatch)[0].status == "tuned"
    assert measure(measured_place, cache, clock, monkeypatch)[0].status == "known"


def disagreeing_ranks(folder: str) -> tuple[str, dict]:
    """Rank 0 finds the first candidate fastest, rank 1 the last; both must take the same."""
    rank = dist.get_rank()

    def compile_all(chosen, arch, *, workers, on_done):
        assert rank == 0, "only rank 0 compiles"
        for _, specimen in chosen:
            on_done(compiled(specimen))

    order = {}

    def milliseconds(config):
        place = order.setdefault(str(config), len(order))
        return 1.0 + (place if rank == 0 else 5 - place)

    cache = TunedCache(Path(folder, f"rank{rank}.json"))
    place = Place(torch.device("cpu"), "made-up GPU", hardware_of(90))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_pool, "compile_all", compile_all)
        (outcome,) = measure(place, cache, FakeClock(milliseconds), patch, keep=6)
    return str(outcome.winner.config), {key: e.config for key, e in cache.entries().items()}


def test_all_ranks_agree_on_the_candidate_whose_slowest_rank_is_fastest(pool, tmp_path) -> None:
    (winner, entries), (other, other_entries) = pool.run(disagreeing_ranks, str(tmp_path))
    assert winner == other
    assert entries == other_entries
    assert len(entries) == 1


def test_workloads_by_name_and_by_numbers() -> None:
    assert parse_workload("8192,1024,4096,16,2,swiglu") == Workload(
        "given", 8192, 1024, 4096, 16, 2, "swiglu"
    )
    assert parse_workload("wide") is WORKLOADS["wide"]
    for text in ("", "1,2,3", "0,1,1,1,1", "a,b,c,d,e", "8,8,8,2,3", "8,8,8,2,1,relu"):
        with pytest.raises(UserError):
            parse_workload(text)


def command(cache: Path, *arguments: str) -> list[str]:
    return [
        sys.executable, str(ROOT / "bench" / "autotune.py"), "--cache", str(cache), "--keep", "1",
        "--workload", "64,64,64,4,1", "--json", *arguments,
    ]  # fmt: skip


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def finish(arguments: list[str]) -> dict:
    done = subprocess.run(arguments, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "no GPU here" in done.stderr
    return json.loads(done.stdout)


without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")


@pytest.mark.long
@without_gpu
def test_the_script_is_killed_and_goes_on_while_another_one_runs_and_nothing_is_lost(tmp_path) -> None:
    path = tmp_path / "tuned.json"
    arguments = command(path, "--kinds", "permute,routing")
    victim = subprocess.Popen(
        arguments, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not path.exists() and victim.poll() is None:
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    before = set(TunedCache(path).entries())
    assert before
    other = subprocess.Popen(
        command(path, "--kinds", "permute", "--dtype", "float32"),
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    resumed = finish(arguments)
    assert json.loads(other.communicate(timeout=300)[0])["counts"]["tuned"] == 1
    assert resumed["how"] == MODELLED
    assert resumed["counts"]["known"] == len(before)
    assert resumed["counts"]["tuned"] == 2 - len(before)
    assert before < set(TunedCache(path).entries())
    assert len(TunedCache(path).entries()) == 3


def tune_here(capsys, path: Path, *arguments: str) -> dict:
    assert main(["tune", *command(path, *arguments)[2:]]) == 0
    return json.loads(capsys.readouterr().out)


@without_gpu
def test_a_dry_run_names_what_is_pruned_and_why(capsys, tmp_path) -> None:
    found = tune_here(capsys, tmp_path / "tuned.json", "--dry-run", "--kinds", "grouped_gemm_dx")
    assert found["counts"]["dry-run"] == 1
    (task,) = found["tasks"]
    assert task["kept"]
    assert all(candidate["pruned"].startswith("model: ") for candidate in task["pruned"])
    assert not (tmp_path / "tuned.json").exists()
    assert main(["tune", *command(tmp_path / "tuned.json")[2:-1], "--dry-run"]) == 0
    assert "would be tuned" in capsys.readouterr().out


@without_gpu
def test_help_names_the_kinds_and_the_version_is_told(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "--help"])
    text = "".join(capsys.readouterr().out.split())
    assert f"separatedbycommas:{','.join(KINDS)}" in text
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"lancet {lancet_kernels.__version__}\n")


def test_a_single_task_is_one(capsys, tmp_path) -> None:
    one = ["--workload", "256,64,128,4,1", "--kinds", "permute", "--dry-run"]
    assert main(["tune", "--cache", str(tmp_path / "tuned.json"), *one]) == 0
    out, err = capsys.readouterr()
    assert "candidates of 1 task are" in err or "1 task on " in err
    assert "\n1 task: " in out


def test_a_corrupt_cache_is_survived(capsys, compiler, tmp_path) -> None:
    path = tmp_path / "tuned.json"
    arguments = ("--kinds", "permute,routing")
    assert tune_here(capsys, path, *arguments)["counts"]["tuned"] == 2
    assert tune_here(capsys, path, *arguments)["counts"]["known"] == 2
    path.write_text(path.read_text()[:200])
    with pytest.warns(UserWarning, match="not readable"):
        assert tune_here(capsys, path, *arguments)["counts"]["tuned"] == 2
    assert len(TunedCache(path).entries()) == 2


def test_wrong_arguments_are_one_line_each(capsys) -> None:
    assert main(["tune", "--kinds", "permute,nonsense"]) == 1
    assert "nonsense" in capsys.readouterr().err
    assert main(["tune", "--workload", "many"]) == 1
    assert "8192,1024,4096,16,2" in capsys.readouterr().err
