"""The examples, on two ranks: each against a plain loop with the same numbers.

The ranks of the pool run `main()`; that the files also start under torchrun is a long test.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lancet_kernels import CausalLMStep, ddp
from tests.processes import ROOT, TORCHRUN, printed, wait_for
from tests.ranks import RankPool

FOLDER = ROOT / "examples"
# float32, sums in another order, 20 steps of AdamW
BOUND = 2e-3


def example(name: str) -> ModuleType:
    with mock.patch.object(sys, "path", [str(FOLDER), *sys.path]):
        return importlib.import_module(name)


def losses_of(name: str, *arguments: object) -> list[float]:
    """What the example's `main` returns on this rank of the pool, which has its process group already."""
    module = example(name)
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
        return module.main(*arguments)


def differs(got: list[float], expected: list[float]) -> float:
    assert len(got) == len(expected) == 20
    return max(abs(a - b) for a, b in zip(got, expected, strict=True))


def trained(model: nn.Module, lr: float, loss_of_step: Callable[[int], torch.Tensor]) -> list[float]:
    """The losses of a plain loop of 20 steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for number in range(20):
        loss = loss_of_step(number)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.long
def test_hugging_face_trains_like_the_original(pool: RankPool) -> None:
    """In one process, with both ranks' batches in one."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    got = pool.run(losses_of, "hugging_face", timeout_s=180)
    assert got[0] == got[1]
    module = example("hugging_face")
    torch.manual_seed(0)
    model = CausalLMStep(transformers.OlmoeForCausalLM(module.CONFIG))
    # One after the other: the model's own load-balance loss is that of a batch.
    expected = trained(
        model, 1e-2, lambda n: sum(model(**module.make_batch(n, rank)) / 2 for rank in range(2))
    )
    assert expected[-1] < 0.5 * expected[0]
    assert differs(got[0], expected) < BOUND


def fsdp_and_data_parallel() -> tuple[list[float], list[float]]:
    """The example, and its loop around a model that `ddp` wraps."""
    got, module = losses_of("fsdp2"), example("fsdp2")
    torch.manual_seed(0)
    model = ddp(nn.Sequential(module.Block(), module.Block()))
    generator = torch.Generator().manual_seed(dist.get_rank())

    def loss_of_step(_number: int) -> torch.Tensor:
        x = torch.randn(8, 16, 32, generator=generator)
        return (model(x) - x.roll(1, dims=-1)).square().mean()

    losses = torch.tensor(trained(model, 3e-3, loss_of_step))
    dist.all_reduce(losses)
    return got, (losses / dist.get_world_size()).tolist()


@pytest.mark.long
def test_fsdp2_trains_like_data_parallel(pool: RankPool) -> None:
    for got, expected in pool.run(fsdp_and_data_parallel, timeout_s=120):
        assert expected[-1] < 0.7 * expected[0]
        assert differs(got, expected) < BOUND


def ddp_and_one_rank() -> tuple[list[float], list[float]]:
    """The ddp example, and the same with all experts on each rank in torch's own DistributedDataParallel."""
    got, module = losses_of("ddp"), example("ddp")
    single = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    make = module.MoELayer

    def whole(*arguments: object, **options: object) -> nn.Module:
        return make(*arguments, **options, groups=single)

    with (
        mock.patch.object(module, "MoELayer", whole),
        mock.patch.object(module, "ddp", DistributedDataParallel),
    ):
        return got, losses_of("ddp")


def test_ddp_trains_like_replicated_experts(pool: RankPool) -> None:
    for got, expected in pool.run(ddp_and_one_rank, timeout_s=120):
        assert expected[-1] < 0.9 * expected[0]
        assert differs(got, expected) < BOUND


def told_to_stop_and_whole(folder: str) -> tuple[dict[int, float], list[dict[int, float]]]:
    """The losses of the own loop by step: left alone; told to stop on one rank in step 4, then resumed."""
    module = example("own_loop")
    batch, handlers = module.batch, [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]

    def told(step: int, rank: int) -> torch.Tensor:
        if (step, rank) == (4, 1):
            signal.raise_signal(signal.SIGTERM)
        return batch(step, rank)

    try:
        whole = losses_of("own_loop", f"{folder}/whole", 12)
        with mock.patch.object(module, "batch", told):
            stopped = losses_of("own_loop", f"{folder}/told", 12)
        resumed = losses_of("own_loop", f"{folder}/told", 12)
        assert losses_of("own_loop", f"{folder}/told", 12) == {}, "nothing is left to train"
        return whole, [stopped, resumed]
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True):
            signal.signal(number, handler)


def test_own_loop_that_is_told_to_stop_goes_on_with_the_very_losses(pool: RankPool, tmp_path: Path) -> None:
    for whole, (stopped, resumed) in pool.run(told_to_stop_and_whole, str(tmp_path), timeout_s=120):
        assert list(stopped) == [1, 2, 3, 4], "both ranks stop behind the step in which one was told to"
        assert list(resumed) == list(range(5, 13))
        assert stopped | resumed == whole


@pytest.mark.long
def test_own_loop_that_is_killed_goes_on_with_the_very_losses(tmp_path: Path) -> None:
    """Under torchrun: the last line of a run that was stopped and started again is that of one left alone."""
    command = [*TORCHRUN, "2", FOLDER / "own_loop.py"]
    whole = printed(*command, tmp_path / "whole", 60, timeout_s=120)
    for number in (signal.SIGKILL, signal.SIGTERM):
        folder = tmp_path / number.name
        killed = subprocess.Popen([sys.executable, *command, folder, "60"], start_new_session=True)
        wait_for((folder / "latest").exists, 100)
        if number == signal.SIGKILL:
            # The ranks are in sessions of their own.
            for rank in ranks_of(killed.pid):
                os.kill(rank, signal.SIGKILL)
        killed.send_signal(number)
        killed.wait(60)
        assert printed(*command, folder, 60, timeout_s=120) == whole, number.name


def ranks_of(launcher: int) -> list[int]:
    """The processes that a launcher has started."""
    return [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]


def both_of_torchtitan(folder: str) -> tuple[list[float], list[float]]:
    config = example("torchtitan_style").JobConfig
    planned = losses_of("torchtitan_style", config(plan=True))
    return losses_of("torchtitan_style", config(checkpoint=folder)), planned


@pytest.mark.long
def test_torchtitan_style_with_fsdp_trains_as_with_a_plan(pool: RankPool, tmp_path: Path) -> None:
    for sharded, planned in pool.run(both_of_torchtitan, str(tmp_path / "saved"), timeout_s=240):
        assert planned[-1] < 0.1 * planned[0]
        assert differs(sharded, planned) < BOUND
    assert len(list((tmp_path / "saved").glob("*.distcp"))) == 2


def square_and_one_rank() -> tuple[list[float], list[float], float]:
    """The example, the same training with `nn.Linear`, and the share of its bytes that a rank holds."""
    module, got = example("square_linear"), losses_of("square_linear")
    torch.manual_seed(0)
    model = module.Mlp()
    torch.manual_seed(0)
    width = module.WIDTH
    whole = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    expected, held = module.train(whole)
    return got, expected, module.train(model)[1] / held


@pytest.mark.long
def test_square_linear_trains_like_linear(pool: RankPool) -> None:
    for got, expected, share in pool.run(square_and_one_rank, ranks=4):
        assert expected[-1] < 0.6 * expected[0]
        assert differs(got, expected) < BOUND
        # Of the biases, a half.
        assert 1 / 4 < share < 0.26


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize(
    "command",
    [
        "hugging_face.py",
        "ddp.py",
        "fsdp2.py",
        "torchtitan_style.py --plan",
        "transformers_trainer.py",
        "transformers_trainer.py --plan",
    ],
)
def test_under_torchrun(command: str) -> None:
    if command.startswith(("hugging", "transformers")):
        pytest.importorskip("transformers", reason="transformers is not installed")
    if command.startswith("transformers_trainer"):
        pytest.importorskip("accelerate", reason="accelerate is not installed")
    name, *options = command.split()
    said = printed(*TORCHRUN, 2, FOLDER / name, *options)
    first, last = said.splitlines()[-1].split(",")[0].removeprefix("loss ").split(" -> ")
    assert float(last) < 0.8 * float(first)


def last_words_of_a_trainer(folder: Path, steps: int, *options: str, ranks: int = 2) -> list[str]:
    """The words of `loss 4.181 -> 1.750 behind step 10`, of a run of the example."""
    script = FOLDER / "transformers_expert_parallel.py"
    return printed(*TORCHRUN, ranks, script, folder, "--steps", steps, *options).splitlines()[-1].split()


@pytest.mark.long
@pytest.mark.alone
def test_a_trainer_with_expert_parallelism_goes_on_where_one_ended(tmp_path: Path) -> None:
    """Twelve steps are six and six more, and nearly those of which the first six are planned."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    whole = last_words_of_a_trainer(tmp_path / "whole", 12)
    first, second = (last_words_of_a_trainer(tmp_path / "parts", 6) for _ in range(2))
    assert (first[1], second[3:]) == (whole[1], whole[3:])
    assert float(whole[3]) < 0.5 * float(whole[1])
    planned = last_words_of_a_trainer(tmp_path / "planned", 6, "--plan")
    assert float(planned[1]) == pytest.approx(float(whole[1]), abs=2e-3)
    second = last_words_of_a_trainer(tmp_path / "planned", 6)
    assert float(second[3]) == pytest.approx(float(whole[3]), rel=0.01)
    assert second[-1] == whole[-1] == "12"


@pytest.mark.long
@pytest.mark.alone
def test_a_trainer_plans_microbatches(tmp_path: Path) -> None:
    """Eight steps with a plan and without; then four on four ranks, where experts are sharded, too."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    several = "--accumulate", "2"
    plain = last_words_of_a_trainer(tmp_path / "plain", 8, *several)
    planned = last_words_of_a_trainer(tmp_path / "planned", 8, *several, "--plan")
    assert float(planned[1]) == pytest.approx(float(plain[1]), abs=2e-3)
    assert float(planned[3]) == pytest.approx(float(plain[3]), rel=0.01)
    sharded = last_words_of_a_trainer(tmp_path / "planned", 4, *several, "--plan", ranks=4)
    assert float(sharded[3]) < float(planned[3]) < float(planned[1])


def losses_on_one_device() -> list[float]:
    """The example's loop without `parallelize`."""
    module = example("shard_model")
    torch.manual_seed(0)
    size = module.BATCH, 1
    first = torch.arange(module.SEQUENCE)
    torch.randint(module.VOCABULARY, size)
    model = module.Model()

    def loss_of_step(_number: int) -> torch.Tensor:
        return model((first + torch.randint(module.VOCABULARY, size)) % module.VOCABULARY)

    return trained(model, 3e-3, loss_of_step)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["hidup", "data parallel"])
def test_a_sharded_model_trains_as_on_one_device(pool: RankPool, strategy: str) -> None:
    expected = losses_on_one_device()
    assert expected[-1] < 0.5 * expected[0]
    for got in pool.run(losses_of, "shard_model", strategy, "p3dn", timeout_s=180):
        assert differs(got, expected) < BOUND
