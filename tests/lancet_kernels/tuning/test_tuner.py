"""The tuner: what it times, what it drops and why, what it chooses, how ranks agree."""

import dataclasses
import json
import runpy
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import lancet_kernels
from lancet_kernels.cli import main
from lancet_kernels.compiling.compile import CompiledKernel
from lancet_kernels.compiling.compile_pool import Row
from lancet_kernels.errors import UserError
from lancet_kernels.kernels.moe.row_config import RowConfig
from lancet_kernels.kernels.moe.topk import RoutingConfig
from lancet_kernels.kernels.overlap import config_for_gpu
from lancet_kernels.kernels.tuned_entry import KINDS, MEASURED, config_fields, is_usable
from lancet_kernels.kernels.tuning import TunedCache
from lancet_kernels.measuring.timing import Clock
from lancet_kernels.tuning import background_compiler, tune_tasks
from lancet_kernels.tuning.candidates import MOST_CANDIDATES
from lancet_kernels.tuning.place import Place
from lancet_kernels.tuning.tune_tasks import make_tasks
from lancet_kernels.tuning.tuner import tune
from lancet_kernels.tuning.workloads import WORKLOADS, Workload, parse_workload

TINY = Workload("tiny", 12, 16, 32, 4, 2)
# As if there were a GPU, in whose place a made-up clock stands.
H100 = Place(torch.device("cpu"), "NVIDIA H100 80GB HBM3", 90, 132)


def compiled(specimen, registers=100, spills=0) -> Row:
    found = CompiledKernel(
        specimen.name, specimen.config, "sm_90", registers, spills, 0, 60_000,
        32 * specimen.arguments["num_warps"], specimen.wgmma, specimen.tma, False, 0.1,
    )  # fmt: skip
    return Row(specimen, found, None)


class FakePool:
    """Stands for the compiler: what `row_of(specimen)` says. specimens: that it was given."""

    def __init__(self, row_of=compiled) -> None:
        self.row_of, self.specimens = row_of, []

    def __call__(self, arch, workers):
        """In place of the class."""
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass

    def submit(self, specimen):
        self.specimens.append(specimen)
        future = Future()
        try:
            row = self.row_of(specimen)
        except RuntimeError as error:
            future.set_exception(error)
        else:
            if row is not None:  # else it never is done
                future.set_result(row)
        return future


@pytest.fixture
def compiler(monkeypatch) -> FakePool:
    """8 warps spill."""
    fake = FakePool(
        lambda specimen: compiled(specimen, spills=240 if specimen.arguments["num_warps"] == 8 else 0)
    )
    monkeypatch.setattr(background_compiler, "CompilePool", fake)
    return fake


class FakeClock(Clock):
    """Runs nothing: the time of a run is made up. -> calls, in order."""

    def __init__(self, milliseconds=lambda config: 1.0) -> None:
        super().__init__(torch.device("cpu"))
        self.milliseconds, self.calls = milliseconds, []

    def once(self, work) -> float:
        self.calls.append(work)
        return self.milliseconds(work())


@pytest.fixture
def nothing_runs(monkeypatch) -> None:
    """A run only returns its configuration, for a `FakeClock`."""
    for kind, tunable in tune_tasks._TUNABLES.items():
        made_up = dataclasses.replace(tunable, runner=lambda task, device: lambda config: lambda: config)
        monkeypatch.setitem(tune_tasks._TUNABLES, kind, made_up)


@pytest.fixture
def cache(tmp_path) -> TunedCache:
    return TunedCache(tmp_path / "tuned.json")


def test_shapes_of_a_layer_are_tuned_once_each() -> None:
    tasks = make_tasks([TINY, TINY], torch.bfloat16)
    assert len({task.key("x") for task in tasks}) == len(tasks) == 4
    (routing,) = (task for task in tasks if task.kind == "routing")
    assert routing.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_lists_are_short_valid_and_begin_with_the_default(arch, dtype) -> None:
    """Not cut by MOST_CANDIDATES: a list that a user writes is timed in full."""
    place = Place.elsewhere(arch)
    for task in make_tasks([*WORKLOADS.values(), TINY], dtype):
        configs = list(task.tunable.candidates(task, place))
        assert 2 <= len(configs) <= MOST_CANDIDATES, task.key("x")
        assert len(set(configs)) == len(configs)
        assert all(is_usable(task.kind, config, task.shape, task.dtype, arch) for config in configs)
        assert configs[0] == default_of(task, place)


def default_of(task, place):
    w = task.workload
    if task.kind == "overlap":
        sizes = w.width, w.hidden, w.activation
        return config_for_gpu(*sizes, task.dtype, place.arch, place.sms)
    if task.kind == "routing":
        return RoutingConfig.default(w.experts, w.choices)
    return RowConfig.default(w.width)


def test_what_spills_is_dropped_untimed(compiler, cache, nothing_runs) -> None:
    tasks = make_tasks([WORKLOADS["middle"]], torch.bfloat16, ["permute", "combine"])
    clock = FakeClock()
    for outcome in tune(tasks, H100, cache, clock=clock):
        assert {c.reason for c in outcome.candidates if c.reason} == {"compiler: spills 240 bytes"}
        assert outcome.status == "tuned"
        assert all(c.config.num_warps == 4 and c.ms == 1.0 for c in outcome.kept)
        entry = cache.entries()[outcome.key]
        assert (entry.how, entry.device) == (MEASURED, H100.name)
        assert entry.milliseconds == entry.default_milliseconds == 1.0
    assert {work().num_warps for work in clock.calls} == {4}


def test_what_is_known_is_not_compiled_again(compiler, cache, nothing_runs) -> None:
    tasks = make_tasks([TINY], torch.bfloat16, ["permute", "combine"])
    options = {"clock": FakeClock()}
    tune(tasks[:1], H100, cache, **options)
    del compiler.specimens[:]
    assert [o.status for o in tune(tasks, H100, cache, **options)] == ["known", "tuned"]
    assert {s.name for s in compiler.specimens} == {"combine"}
    assert [o.status for o in tune(tasks, H100, cache, **options)] == ["known", "known"]
    assert [o.status for o in tune(tasks, H100, cache, force=True, **options)] == ["tuned", "tuned"]


def test_a_dry_run_compiles_and_writes_nothing(compiler, cache) -> None:
    tasks = make_tasks([TINY], torch.bfloat16, ["permute"])
    (outcome,) = tune(tasks, Place.elsewhere(90), cache, dry_run=True)
    assert outcome.status == "dry-run"
    assert outcome.config == outcome.candidates[0].config
    assert not compiler.specimens
    assert not cache.path.exists()


def test_time_that_is_up_leaves_the_rest_for_the_next_run(monkeypatch, cache, nothing_runs) -> None:
    first = []

    def row_of(specimen):
        first.append(specimen)
        return compiled(specimen) if len(first) == 1 else None

    monkeypatch.setattr(background_compiler, "CompilePool", FakePool(row_of))
    tasks = make_tasks([TINY], torch.bfloat16, ["permute", "combine"])
    outcomes = tune(tasks, H100, cache, minutes=0.1 / 60, clock=FakeClock())
    assert [o.status for o in outcomes] == ["left", "left"]
    assert cache.entries() == {}


def test_a_failing_compiler_is_reported(monkeypatch, cache) -> None:
    def row_of(specimen):
        raise RuntimeError("no disk")

    monkeypatch.setattr(background_compiler, "CompilePool", FakePool(row_of))
    with pytest.raises(RuntimeError, match="no disk"):
        tune(make_tasks([TINY], torch.bfloat16, ["permute"]), H100, cache, clock=FakeClock())


def test_the_smallest_median_wins(compiler, cache, nothing_runs) -> None:
    jitter, fastest = iter([0.0, 9.0, 0.1] * 1000), RowConfig(2, 512, 4)

    def milliseconds(config):
        # One outlier in three: a mean would be fooled.
        return (1.0 if config == fastest else 2.0) + next(jitter)

    clock = FakeClock(milliseconds)
    tasks = make_tasks([WORKLOADS["middle"]], torch.bfloat16, ["permute"])
    (outcome,) = tune(tasks, H100, cache, clock=clock, rounds=5)
    timed = [c for c in outcome.candidates if c.ms is not None]
    assert len(timed) > 3
    assert outcome.winner.config == fastest
    (entry,) = cache.entries().values()
    assert entry.configuration() == fastest
    assert entry.default_milliseconds > entry.milliseconds
    # In turn: every candidate once before the first one comes again.
    names = [id(call) for call in clock.calls]
    assert len(set(names[: len(timed)])) == len(timed)
    assert names[: len(timed)] == names[len(timed) : 2 * len(timed)]


def test_only_the_first_candidates_if_so_wanted(compiler, cache, nothing_runs) -> None:
    tasks = make_tasks([WORKLOADS["middle"]], torch.bfloat16, ["permute"])
    (outcome,) = tune(tasks, H100, cache, clock=FakeClock(), most=1)
    assert outcome.winner.config == RowConfig.default(1536)
    assert len(compiler.specimens) == 1


def disagreeing_ranks(folder: str) -> tuple[str, dict]:
    """Rank 0 finds the first candidate fastest, rank 1 the last; both must take the same."""
    rank = dist.get_rank()
    order = {}

    def milliseconds(config):
        place = order.setdefault(str(config), len(order))
        return 1.0 + (place if rank == 0 else 5 - place)

    def row_of(specimen):
        assert rank == 0, "only rank 0 compiles"
        return compiled(specimen)

    cache = TunedCache(Path(folder, f"rank{rank}.json"))
    (task,) = make_tasks([WORKLOADS["middle"]], torch.bfloat16, ["permute"])
    made_up = dataclasses.replace(task.tunable, runner=lambda task, device: lambda config: lambda: config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background_compiler, "CompilePool", FakePool(row_of))
        patch.setitem(tune_tasks._TUNABLES, "permute", made_up)
        (outcome,) = tune([task], H100, cache, clock=FakeClock(milliseconds), most=6)
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


without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")
SMALL = ["--workload", "64,64,64,4,1"]


@without_gpu
def test_without_a_gpu_it_refuses_in_one_line(capsys, tmp_path) -> None:
    path = tmp_path / "tuned.json"
    assert main(["tune", "--cache", str(path), *SMALL, "--arch", "sm_100"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    for said in ("no GPU", "`lancet tune --dry-run`", "`lancet kernels --arch sm_100`"):
        assert said in err
    assert not list(tmp_path.iterdir())


@without_gpu
def test_a_dry_run_lists_what_would_be_timed(capsys, tmp_path) -> None:
    arguments = ["tune", "--cache", str(tmp_path / "tuned.json"), *SMALL, "--kinds", "permute", "--dry-run"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counts"]["dry-run"] == 1
    (task,) = found["tasks"]
    configs = [candidate["config"] for candidate in task["candidates"]]
    assert configs == [config_fields(config) for config in RowConfig.candidates(64)]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert f"    {len(configs)} candidates:\n" in out
    assert out.count("block_tokens=") == len(configs)
    assert "\n1 task: 1 would be tuned" in out
    assert "1 task on sm_90 (no GPU here)" in err
    assert not list(tmp_path.iterdir())


def test_the_script_is_the_command(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["autotune.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(Path(__file__).parents[3] / "bench" / "autotune.py"), run_name="__main__")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: lancet tune ")


@without_gpu
def test_help_names_the_kinds_and_the_version_is_told(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "--help"])
    text = "".join(capsys.readouterr().out.split())
    assert f"separatedbycommas:{','.join(KINDS)}" in text
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"lancet {lancet_kernels.__version__}\n")


def test_a_corrupt_cache_is_survived(compiler, cache, nothing_runs) -> None:
    tasks, options = make_tasks([TINY], torch.bfloat16, ["permute", "routing"]), {"clock": FakeClock()}
    tune(tasks, H100, cache, **options)
    cache.path.write_text(cache.path.read_text()[:200])
    with pytest.warns(UserWarning, match="not readable"):
        assert [o.status for o in tune(tasks, H100, cache, **options)] == ["tuned", "tuned"]
    assert len(TunedCache(cache.path).entries()) == 2


def test_wrong_arguments_are_one_line_each(capsys) -> None:
    assert main(["tune", "--kinds", "permute,nonsense"]) == 1
    assert "nonsense" in capsys.readouterr().err
    assert main(["tune", "--workload", "many"]) == 1
    assert "8192,1024,4096,16,2" in capsys.readouterr().err
