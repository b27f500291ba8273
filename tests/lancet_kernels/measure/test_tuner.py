"""The tuner: what is timed, who wins, what is stored; and its command."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lancet_kernels.__main__ import main
from lancet_kernels.errors import UserError
from lancet_kernels.kernels.config import OverlapConfig, TunedCache
from lancet_kernels.measure.fused_pass import WORKLOADS, Workload, parse_workload
from lancet_kernels.measure.tuner import Place, Task, candidates, tune
from lancet_kernels.timing import Clock

TINY = Workload("tiny", 12, 16, 32, 4, 2)
MIDDLE = Task(WORKLOADS["middle"], torch.bfloat16)
# As if there were a GPU, in whose place a made-up clock stands.
H100 = Place(torch.device("cpu"), "NVIDIA H100 80GB HBM3", 90, 132)


class FakeClock(Clock):
    """Runs nothing: the time of a run is made up. -> calls, in order."""

    def __init__(self, milliseconds=lambda config: 1.0) -> None:
        super().__init__(torch.device("cpu"))
        self.milliseconds, self.calls = milliseconds, []

    def once(self, work) -> float:
        self.calls.append(work)
        return self.milliseconds(work())


def nothing_runs(task, device):
    """A run only returns its configuration, for a `FakeClock`."""
    return lambda config: lambda: config


@pytest.fixture
def cache(tmp_path) -> TunedCache:
    return TunedCache(tmp_path / "tuned.json")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_lists_are_short_valid_and_begin_with_the_default(arch, dtype) -> None:
    place = Place.elsewhere(arch)
    for task in (Task(workload, dtype) for workload in (*WORKLOADS.values(), TINY)):
        configs, w = candidates(task, place), task.workload
        assert 2 <= len(configs) <= 15, task.key("x")
        assert len(set(configs)) == len(configs)
        assert all(config.gemm.is_valid(dtype, arch) for config in configs)
        assert configs[0] == OverlapConfig.for_gpu(w.width, w.hidden, dtype, arch, place.sms)
        gluon = arch == 90 and dtype == torch.bfloat16 and w is not TINY
        assert {config.bodies for config in configs} == ({"gluon", "triton"} if gluon else {"triton"})


def test_the_smallest_median_wins(cache) -> None:
    jitter, fastest = [0.0, 9.0, 0.1] * 1000, candidates(MIDDLE, H100)[3]

    def milliseconds(config):
        # One outlier in three: a mean would be fooled.
        return (1.0 if config == fastest else 2.0) + jitter.pop()

    clock = FakeClock(milliseconds)
    (outcome,) = tune([MIDDLE], H100, cache, clock=clock, rounds=5, runs_of=nothing_runs)
    assert outcome.winner.config == fastest
    (entry,) = cache.entries().values()
    assert (entry.config, entry.device) == (fastest, H100.name)
    assert entry.default_milliseconds > entry.milliseconds
    # In turn: every candidate once before the first one comes again.
    timed = len(outcome.candidates)
    names = [id(call) for call in clock.calls]
    assert len(set(names[:timed])) == timed > 3
    assert names[:timed] == names[timed : 2 * timed]


def test_what_is_known_is_not_timed_again(cache) -> None:
    tasks = [Task(TINY, torch.bfloat16), MIDDLE]
    options = {"clock": FakeClock(), "runs_of": nothing_runs}
    tune(tasks[:1], H100, cache, **options)
    assert [o.status for o in tune(tasks, H100, cache, **options)] == ["known", "tuned"]
    assert [o.status for o in tune(tasks, H100, cache, **options)] == ["known", "known"]
    assert [o.status for o in tune(tasks, H100, cache, force=True, **options)] == ["tuned", "tuned"]


def test_what_does_not_run_is_dropped(cache) -> None:
    def runs_of(task, device):
        def run(config):
            if config.bodies == "gluon":
                raise RuntimeError("out of registers\nmore")
            return config

        return lambda config: lambda: run(config)

    (outcome,) = tune([MIDDLE], H100, cache, clock=FakeClock(), runs_of=runs_of)
    dropped = [c for c in outcome.candidates if c.dropped]
    assert {c.dropped for c in dropped} == {"does not run: out of registers"}
    assert {c.config.bodies for c in dropped} == {"gluon"}
    assert outcome.winner.config.bodies == "triton"
    (entry,) = cache.entries().values()
    assert entry.milliseconds == entry.default_milliseconds == 1.0


def test_nothing_that_runs_is_a_failure(cache) -> None:
    def runs_of(task, device):
        return lambda config: lambda: int("none")

    (outcome,) = tune([MIDDLE], H100, cache, clock=FakeClock(), runs_of=runs_of)
    assert (outcome.status, outcome.winner, cache.entries()) == ("failed", None, {})


def test_time_that_is_up_leaves_the_rest_for_the_next_run(cache) -> None:
    options = {"clock": FakeClock(), "runs_of": nothing_runs}
    assert [o.status for o in tune([MIDDLE], H100, cache, minutes=0.0, **options)] == ["left"]
    assert cache.entries() == {}


def disagreeing_ranks(folder: str) -> tuple[str, dict]:
    """Rank 0 finds the first candidate fastest, rank 1 the last; both must take the same."""
    rank = dist.get_rank()
    order = {}

    def milliseconds(config):
        place = order.setdefault(str(config), len(order))
        return 1.0 + (place if rank == 0 else 5 - place)

    cache = TunedCache(Path(folder, f"rank{rank}.json"))
    clock = FakeClock(milliseconds)
    (outcome,) = tune([MIDDLE], H100, cache, clock=clock, most=6, runs_of=nothing_runs)
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
    arguments = ["tune", "--cache", str(tmp_path / "tuned.json"), *SMALL, "--dry-run"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counts"]["dry-run"] == 1
    (task,) = found["tasks"]
    count = len(task["candidates"])
    assert count == len(candidates(Task(parse_workload(SMALL[1]), torch.bfloat16), Place.elsewhere(90)))
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert f"    {count} candidates:\n" in out
    assert out.count("put_rows=") == count
    assert "\n1 task: 1 would be tuned" in out
    assert "1 task on sm_90 (no GPU here)" in err
    assert not list(tmp_path.iterdir())


def test_wrong_arguments_are_one_line_each(capsys) -> None:
    assert main(["tune", "--workload", "many"]) == 1
    assert "8192,1024,4096,16,2" in capsys.readouterr().err
