"""The contenders of `lancet bench` compute the same, and the table says what was measured."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lancet_kernels.cli.bench import table
from lancet_kernels.errors import UserError
from lancet_kernels.measure import step_bench
from lancet_kernels.measure.step_bench import (
    DDP,
    DDP_LIKE,
    PLAIN,
    Measured,
    baselines,
    measure,
)
from lancet_kernels.ops.comm.link import emulate_link
from lancet_kernels.optimization.optimize import optimize_each
from lancet_kernels.optimization.paired import loss_of
from lancet_kernels.schedules.time.timeline import Prediction
from tests.setups import Model, batch

OURS = ("none", "lancet")


class WithUnused(Model):
    """A parameter that no gradient reaches, with which DistributedDataParallel must be told to deal."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(3, dtype=torch.float64))


def contenders_on_a_rank(folder: str) -> dict[str, object]:
    model, inputs = WithUnused(), batch()
    plans = optimize_each(model, inputs, OURS, times=f"{folder}/times.json")
    contenders = {**baselines(model, inputs), **plans}
    emulate_link(0.01)
    contenders |= baselines(model, inputs)
    gradients = {}
    for name, module in contenders.items():
        step_bench.iteration(module, inputs)
        owner = module.module if hasattr(module, "module") else module
        gradients[name] = {n: p.grad.clone() for n, p in owner.named_parameters() if p.grad is not None}
    measured = measure(contenders, inputs, rounds=2, warmup=1)
    # But for experts, whose gradients come from all ranks already.
    gradients[PLAIN] = {n: g for n, g in gradients[PLAIN].items() if "layer.w" not in n}
    for gradient in gradients[PLAIN].values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    off = {
        name: max(float((g - gradients["none"][n]).abs().max()) for n, g in gradients[name].items())
        for name in (PLAIN, DDP, DDP_LIKE)
    }
    return {"off": off, "measured": measured}


@pytest.mark.long
def test_ddp_and_plans_average_the_gradients_of_the_plain_step(pool, tmp_path) -> None:
    for of_rank in pool.run(contenders_on_a_rank, str(tmp_path)):
        assert all(off < 1e-12 for off in of_rank["off"].values()), of_rank["off"]
        measured = of_rank["measured"]
        assert list(measured) == [PLAIN, DDP, *OURS, DDP_LIKE]
        for name, one in measured.items():
            assert one.exposed_ms > 0
            assert 0 <= one.late_ms <= one.exposed_ms <= one.waited_ms["all_to_all"]
            assert sum(one.account(100.0).values()) == pytest.approx(one.iteration_ms)
            assert one.peak_memory_gb > 0
            assert (one.predicted is None) == (name not in OURS)
            # DistributedDataParallel waits out of our sight.
            assert ("all_reduce" in one.waited_ms) == (name in (*OURS, DDP_LIKE))
        assert set(step_bench.report(measured, "lancet", "emulated")["prediction_errors"]) == set(OURS)


def test_table_compares_with_ddp() -> None:
    of_none, of_lancet = Prediction(189.0, 40.0, 2.4), Prediction(160.0, 4.0, 2.4)
    waited = {"all_to_all": 5.0, "all_reduce": 4.0, "exchange_counts": 1.5}
    measured = {
        DDP: Measured(200.0, 50.0, 60.0, 120.0, {"all_to_all": 50.0}, peak_memory_gb=2.0),
        "none": Measured(
            210.0,
            50.0,
            60.0,
            130.0,
            {"all_to_all": 50.0, "all_reduce": 7.0},
            peak_memory_gb=2.5,
            predicted=of_none,
        ),
        "lancet": Measured(
            160.0,
            5.0,
            60.0,
            135.0,
            waited,
            late_ms=2.0,
            no_core_ms=6.0,
            peak_memory_gb=2.5,
            predicted=of_lancet,
        ),
    }
    figures = step_bench.report(measured, "lancet", "real")
    assert figures["speedup_vs_best_baseline"] == pytest.approx(210 / 160)
    head, ddp, none, lancet, *foot = table(figures).splitlines()
    assert head.split() == (
        "step ms saved waits all-reduce waits all-to-all peak GB predicted ms off peak GB".split()
    )
    assert ddp.split() == ["ddp", "200.0", "0.0%", "?", "50.0", "2"]
    assert none.split() == ["none", "210.0", "-5.0%", "7.0", "50.0", "2.5", "189.0", "10%", "2.4"]
    assert lancet.split() == ["lancet", "160.0", "20.0%", "4.0", "5.0", "2.5", "160.0", "0%", "2.4"]
    accounts = [line for line in foot if line.startswith(("of the step", "lancet  "))]
    assert [line.split() for line in accounts] == [
        "of the step, ms computation cutting exposed all-to-all late rank no core other "
        "exposed all-reduce".split(),
        "lancet 130.0 5.0 3.0 3.5 6.0 8.5 4.0".split(),
    ]
    assert foot[-1] == "link real; lancet against ddp 1.25x, exposed all-to-all -90% against none"


def test_the_loss_is_the_first_number_with_a_gradient() -> None:
    loss = torch.ones((), requires_grad=True)
    assert (
        loss_of({"logits": torch.ones(3, requires_grad=True), "loss": loss, "z": loss + 1}, "the step")
        is loss
    )
    with pytest.raises(UserError, match=r"result of the step: got no number .* return the loss"):
        loss_of((loss.detach(), torch.ones(2, requires_grad=True)), "the step")
