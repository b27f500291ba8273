"""Predictions: full depth against every microbatch simulated, sharding, memory by hand, and the command."""

import json
import re
from dataclasses import replace

import pytest

from lancet_kernels.cli.main import main
from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs.costs import durations
from lancet_kernels.graph.program.program import Kind
from lancet_kernels.predict.answer import CUTTING, STRATEGIES, answer, check_fits, host_of, parts_of
from lancet_kernels.predict.orders import PAIRED, Orders, pair_of
from lancet_kernels.predict.question import Question, gib
from lancet_kernels.predict.step import chained
from lancet_kernels.schedules.strategies import Planner, PlanningOptions
from lancet_kernels.schedules.time.simulate import exposed_intervals, run
from tests.lancet_kernels.predict.small_models import DEEPSEEK, DENSE, QWEN3, written

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def question(tmp_path_factory):
    return Question(
        written(tmp_path_factory.mktemp("qwen3"), QWEN3), "dgx-h100", 16, 16, sequence=64, accumulate=6
    )


def step_of(question, microbatches):
    parts = parts_of(question)
    step = chained(parts, question, microbatches)
    return step, durations(step.program, question.cost)


@pytest.mark.long
@pytest.mark.parametrize("sharding", ["none", "optimizer", "full"])
def test_further_microbatches_take_as_long_as_the_third(question, sharding):
    """Three microbatches extended to six, against all six simulated."""
    asked = replace(question, sharding=sharding, dispatch="hybridep")
    predicted = answer(asked, ["none"]).strategies["none"]
    step, ms = step_of(asked, 6)
    order = Orders(parts_of(asked), asked).of("none", step, ms)
    host = host_of(step.program, asked.cost)
    times = run(step.program, ms, order.positions, blocking=order.blocking, host=host)
    assert predicted.step_ms == pytest.approx(times.iteration_ms, rel=2e-3)


@pytest.mark.parametrize("sharding", ["optimizer", "full"])
def test_every_order_is_valid_and_complete(question, sharding):
    asked = replace(question, sharding=sharding)
    step, ms = step_of(asked, 3)
    orders = Orders(parts_of(asked), asked)
    for strategy in STRATEGIES:
        positions = orders.of(strategy, step, ms).positions
        assert len(step.program.reordered(positions)) == len(step.program)


def test_microbatches_run_as_the_planner_plans_one(question):
    """What `schedules.Planner` says of one microbatch, without a host, is what is predicted of one."""
    asked = replace(question, accumulate=1)
    step, ms = step_of(asked, 1)
    planner = Planner(step.program, asked.cost, PlanningOptions(memory_limit_gb=80))
    for strategy in ("none", "lancet-dw"):
        plan = planner.plan(strategy)
        order = Orders(parts_of(asked), asked).of(strategy, step, ms)
        assert [step.program.instructions[i].name for i in order.positions] == list(plan.order)
        assert order.blocking == set(plan.blocking)
        times = run(step.program, ms, order.positions, blocking=order.blocking)
        assert times.iteration_ms == pytest.approx(plan.report.predicted.iteration_ms)


def test_a_pair_is_a_backward_with_the_next_forward(question):
    step, _ = step_of(question, 2)
    pair = pair_of(step)
    first, *others = pair.instructions
    names = {i.name for i in others}
    assert names == {
        step.program.instructions[i].name
        for block in step.blocks
        if (block.microbatch, block.phase.value) in ((0, "backward"), (1, "forward"))
        for i in block.alone
    }
    # What the first forward kept dies in the pair, what the second keeps does not.
    assert not set(first.outputs) & pair.output_set
    assert {t.split(".")[0] for t in pair.output_set} <= {"m0", "m1"}
    assert any(t.startswith("m1.") for t in pair.output_set)


def test_overlap_hides_and_never_beats_the_bound(question):
    result = answer(replace(question, dispatch="deepep"))
    none, *others = (result.strategies[name] for name in STRATEGIES)
    assert all(one.step_ms < none.step_ms * 1.02 for one in others)
    assert result.strategies["megatron"].step_ms < none.step_ms
    for one in (none, *others):
        assert one.lower_bound_ms <= one.step_ms
        assert one.compute_ms + sum(one.exposed_ms.values()) <= one.step_ms * (1 + 1e-9)


def test_small_kernels_wait_for_the_host(question):
    """64 tokens: the GPU waits for launches; without a host it does not wait at all."""
    result = answer(question, ["none"])
    assert result.figures("none")["host_ms"] > 0.5 * result.strategies["none"].step_ms
    step, ms = step_of(question, 3)
    order = Orders(parts_of(question), question).of("none", step, ms)
    times = run(step.program, ms, order.positions, blocking=order.blocking)
    busy = sum(ms[i] for i in times.compute) + sum(exposed_intervals(times).values())
    assert busy == pytest.approx(times.iteration_ms)


def test_what_runs_beside_messages_is_slower(question):
    result = answer(question)
    assert result.strategies["megatron"].compute_ms > result.strategies["none"].compute_ms


def test_memory_by_hand(question):
    numbers_dense = 512 * 64 * 2 + 64 + 3 * (64 * 64 * 2 + 64 * 32 * 2 + 2 * 16 + 16 * 64 + 2 * 64)
    numbers_experts = 3 * (3 * 64 * 32)
    memory = answer(question, ["none"]).strategies["none"].memory
    assert memory["parameters"] == pytest.approx(gib(2 * (numbers_dense + numbers_experts)), rel=1e-3)
    assert memory["gradients"] == pytest.approx(gib(4 * (numbers_dense + numbers_experts)), rel=1e-3)
    assert memory["optimizer"] == pytest.approx(gib(12 * (numbers_dense / 16 + numbers_experts)), rel=1e-3)
    full = answer(replace(question, sharding="full"), ["none"]).strategies["none"].memory
    assert full["parameters"] == pytest.approx(gib(2 * (numbers_dense / 16 + numbers_experts)), rel=1e-3)


def test_what_sharding_sends(question):
    counts = {}
    for sharding in ("none", "optimizer", "full"):
        step, _ = step_of(replace(question, sharding=sharding), 2)
        kinds = [
            i.attributes["collective"] for i in step.program.instructions if "collective" in i.attributes
        ]
        counts[sharding] = {kind: kinds.count(kind) for kind in set(kinds)}
    # 5 parts with parameters that all ranks have, 2 microbatches; experts are on one rank each.
    assert counts["none"] == {"all_reduce": 5}
    assert counts["optimizer"] == {"all_gather": 5, "reduce_scatter": 5}
    assert counts["full"] == {"all_gather": 2 * (5 + 4), "reduce_scatter": 2 * 5}


def test_recomputation_trades_time_for_memory(question):
    none, full = (
        answer(replace(question, recompute=r), ["none"]).strategies["none"] for r in ("none", "full")
    )
    assert full.step_ms > none.step_ms
    assert full.memory["activations"] < none.memory["activations"]
    assert answer(replace(question, recompute="full")).flops == pytest.approx(answer(question).flops)


def test_one_microbatch_has_nothing_beside_it(question):
    result = answer(replace(question, accumulate=1))
    assert set(result.impossible) == {*PAIRED, *CUTTING}
    assert set(result.strategies) == {"none", "lancet-dw"}


def test_a_strategy_that_cuts_is_refused(question, capsys):
    arguments = ["plan", "--hf", question.hf, "--cluster", "dgx-h100", "--gpus", "16", "--sequence", "64"]
    assert main([*arguments, "--accumulate", "2", "--strategy", "lancet"]) != 0
    assert "lancet" in capsys.readouterr().err


@pytest.mark.long
def test_a_dense_model_and_one_with_dense_layers(tmp_path):
    (tmp_path / "dense").mkdir()
    dense = answer(Question(written(tmp_path / "dense", DENSE), "dgx-h100", 8, 1, "full", 64, 1, 4))
    assert "all_to_all" not in dense.strategies["none"].exposed_ms
    deepseek = Question(written(tmp_path, DEEPSEEK), "dgx-b200", 8, 8, sequence=64, accumulate=2)
    step, _ = step_of(deepseek, 1)
    assert len(step.program.positions(Kind.ALL_TO_ALL)) == 4 * 3


def test_microbatches_that_differ_only_in_number_scale_tokens(question):
    one, two = (answer(replace(question, accumulate=n), ["none"]) for n in (6, 12))
    assert two.flops == pytest.approx(2 * one.flops)
    assert replace(question, accumulate=12).tokens == 2 * question.tokens


def test_command_prints_one_object(question, capsys):
    arguments = ["plan", "--hf", question.hf, "--cluster", "dgx-h100", "--gpus", "16", "--experts-over", "16"]
    assert main([*arguments, "--sequence", "64", "--accumulate", "4", "--dispatch", "deepep", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["strategies"]) == {*STRATEGIES, "auto"}
    for figures in found["strategies"].values():
        assert {
            "step_ms", "tokens_per_s_per_gpu", "tflops_per_gpu", "peak_memory_gib", "exposed_ms",
            "lower_bound_ms",
        } <= set(figures)  # fmt: skip
    assert found["assumed"]
    assert found["experts_over"] == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--experts-over", "3"], "--experts-over: got 3 of 16 GPUs"),
        (["--cluster", "nowhere"], "cluster: got 'nowhere'"),
        (["--cluster", "p4de"], "no table .kernels."),
        (["--dispatch", "pigeons"], "dispatch: got 'pigeons'"),
        (["--gpus", "12"], "number of GPUs: got 12"),
        (["--fsdp", "--replicate"], "got --fsdp and --replicate"),
        (["--gate", "gshard"], "got --hf and --gate"),
        (["--save", "plan.json"], "got --hf and --save"),
    ],
)
def test_bad_configurations_are_one_line(question, capsys, changes, message):
    arguments = ["plan", "--hf", question.hf, "--cluster", "dgx-h100", "--gpus", "16", "--sequence", "64"]
    assert main([*arguments, *changes]) != 0
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    assert re.search(message, error)


@pytest.mark.long  # by default: test_outputs.py, layouts that fit
def test_what_does_not_fit_is_one_line(tmp_path):
    asked = Question(
        written(tmp_path, QWEN3, num_hidden_layers=2, vocab_size=20_000_000), "dgx-v100", 8, 8, "none"
    )
    with pytest.raises(UserError, match="GiB per GPU"):
        check_fits(answer(replace(asked, sequence=64), ["none"]))


@pytest.mark.long
def test_tied_embeddings_are_counted_once(tmp_path):
    """512 x 64 numbers of the embedding, which the head reads, too, in every kind of sharding."""
    counted = []
    for tied in (False, True):
        (tmp_path / str(tied)).mkdir()
        hf = written(tmp_path / str(tied), DENSE, tie_word_embeddings=tied)
        for sharding in ("none", "optimizer", "full"):
            step, _ = step_of(Question(hf, "dgx-h100", 8, 1, sharding, sequence=64, accumulate=2), 2)
            assert step.program.reordered(range(len(step.program)))
            states = sum(step.program.tensors[t].bytes for t in step.program.inputs)
            counted.append(states * 8 if sharding == "full" else states)
    per_number = 2 + 4 + 12, 2 + 4 + 12 / 8, 2 + 4 + 12
    for untied, tied, each in zip(counted[:3], counted[3:], per_number, strict=True):
        assert untied - tied == pytest.approx(512 * 64 * each, rel=1e-3)
