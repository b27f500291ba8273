"""Predictions: against capture by hand and full depth, sharding, memory by hand, and the command."""

import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import fx

from lancet_kernels.__main__ import main
from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs.costs import INSIDE_NODES, collective_of, durations
from lancet_kernels.graph.program import Kind
from lancet_kernels.ops.comm.groups import Groups
from lancet_kernels.optimization.guards import example_arguments
from lancet_kernels.optimization.step import capture_step
from lancet_kernels.predict import answer as answers
from lancet_kernels.predict.answer import (
    GRAPH_TRAINER,
    STRATEGIES,
    Answer,
    Captured,
    answer,
    check_fits,
)
from lancet_kernels.predict.config import Depths, load_config, meta_model
from lancet_kernels.predict.microbatch import Microbatch
from lancet_kernels.predict.model_step import model_step, weights_inside_experts
from lancet_kernels.predict.own_step import fake_ranks, without_contents
from lancet_kernels.predict.question import Question, gib
from lancet_kernels.predict.recomputation import recompute_as
from lancet_kernels.schedules.order.megatron import paired_order, with_delayed_weight_gradients
from lancet_kernels.schedules.strategies import DUPLEX
from lancet_kernels.transformers.convert import CausalLMStep, convert
from tests.grids import few_of
from tests.lancet_kernels.predict.small_models import DEEPSEEK, DENSE, QWEN3, SPARSE_ATTENTION, written
from tests.transformers_families import tiny_config

pytest.importorskip("transformers")


NUMBERS = 512 * 64 * 2 + 64 + 3 * (64 * 64 * 2 + 64 * 32 * 2 + 2 * 16 + 16 * 64 + 2 * 64)
"""The numbers in all parameters of QWEN3 but its experts'."""


@pytest.fixture(scope="module")
def question(tmp_path_factory):
    return Question(
        written(tmp_path_factory.mktemp("qwen3"), QWEN3), "dgx-h100", 16, 16, sequence=64, accumulate=6
    )


def alone(question) -> Microbatch:
    """All three layers of a microbatch."""
    return Captured.of(question).microbatches[1]


def test_what_a_configuration_records_is_not_planned(question, tmp_path):
    """Logits of routers, for a loss that predictions leave out."""
    hf = written(tmp_path, QWEN3, output_router_logits=True)
    own, plain = (alone(q).program.instructions for q in (replace(question, hf=hf), question))
    assert [i.op for i in own] == [i.op for i in plain]


def test_the_planner_of_optimize_plans_what_is_predicted(question):
    """Captured by hand, as a user would, the model has the same plan, and times within 1 %."""
    asked = replace(question, accumulate=1, sharding="none")
    with fake_ranks(16):
        groups = Groups.of_consecutive(16, 16)
        model = meta_model(load_config(asked.hf))
        convert(model, groups)
        own = CausalLMStep(model)
        with without_contents():
            own.to_empty(device="cpu")
            ids = torch.zeros(1, 64, dtype=torch.int64)
        arguments = example_arguments(own, {"input_ids": ids, "labels": ids})

        def rewrite(joint: fx.GraphModule) -> None:
            weights_inside_experts(joint)
            recompute_as(joint, "none")

        step = capture_step(own, arguments, "mean", groups=groups, rewrite=rewrite)
    by_hand, predicted = Microbatch.of(asked, step).planner(80.0), alone(asked).planner(80.0)
    for strategy in ("none", "lancet-dw", "lancet"):
        one, other = by_hand.plan(strategy), predicted.plan(strategy)
        assert len(one.ranges) == len(other.ranges)
        assert len(one.blocking) == len(other.blocking)
        ms = other.report.predicted.iteration_ms
        assert one.report.predicted.iteration_ms == pytest.approx(ms, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("sharding", ["optimizer", "full"])
def test_two_depths_say_what_all_layers_do(tmp_path, sharding):
    """Nine layers of 1,024 tokens, predicted from three and six."""
    hf = written(tmp_path, QWEN3, num_hidden_layers=9, hidden_size=512, moe_intermediate_size=256)
    asked = Question(hf, "dgx-h100", 16, 16, sharding, sequence=1024, dispatch="deepep")
    shallow = answer(asked, ("none", "lancet-dw"))
    with mock.patch("lancet_kernels.predict.answer.depths", return_value=Depths(9, 9, 0)):
        Captured.of.cache_clear()
        deep = answer(asked, ("none", "lancet-dw"))
    Captured.of.cache_clear()
    assert shallow.flops == pytest.approx(deep.flops, rel=1e-9)
    for name, one in deep.strategies.items():
        other = shallow.strategies[name]
        assert other.step_ms == pytest.approx(one.step_ms, rel=0.01)
        assert other.compute_ms == pytest.approx(one.compute_ms, rel=0.01)
        assert other.peak_memory_gib == pytest.approx(one.peak_memory_gib, rel=0.02)


@pytest.mark.parametrize("sharding", few_of(["optimizer", "full", "none"]))
def test_a_pair_is_a_backward_with_the_next_forward(question, sharding):
    one = alone(replace(question, sharding=sharding))
    pair, single = one.pair, one.program
    first = pair.program.instructions[0]
    # Views that nothing reads are gone.
    read = {t for i in single.instructions for t in i.inputs} | single.output_set
    busy = {i.name for i in single.instructions if not i.is_free and read.intersection(i.outputs)}
    assert busy <= set(pair.original.values())
    # What the first forward kept dies in the pair, what the second keeps does not.
    assert not set(first.outputs) & pair.program.output_set
    backward, forward = pair.blocks
    assert len(backward) == len(forward) == 5  # the embedding, three layers, the head
    assert sorted(n for block in (*backward, *forward) for n in block) == list(range(1, len(pair.program)))
    order = [0, *paired_order(pair.program, backward, forward)]
    assert pair.program.reordered(order)
    messages = [
        [sum(pair.program.instructions[n].kind is Kind.ALL_TO_ALL for n in block) for block in half]
        for half in (backward, forward)
    ]
    assert [sum(half) for half in messages] == [6, 6]
    assert messages[1] == [0, 2, 2, 2, 0]
    ms = durations(pair.program, one.step.cost)
    delayed = with_delayed_weight_gradients(pair.program, ms, order, pair.weight_gradients)
    assert pair.program.reordered(delayed)
    assert len(pair.weight_gradients) > 3 * 6


def test_overlap_hides_and_never_beats_the_bound(question):
    result = answer(replace(question, dispatch="deepep"))
    assert set(result.strategies) == {*STRATEGIES} - {*DUPLEX, GRAPH_TRAINER}  # of one sequence
    none, *others = result.strategies.values()
    assert all(one.step_ms < none.step_ms * 1.02 for one in others)
    assert result.strategies["megatron"].step_ms < none.step_ms
    for one in (none, *others):
        assert one.lower_bound_ms <= one.step_ms
        assert one.compute_ms + sum(one.exposed_ms.values()) <= one.step_ms * (1 + 1e-9)


def test_the_best_is_what_optimize_runs(question):
    result = answer(question, ("none", "lancet-dw", "megatron"))
    fast = {"megatron": replace(result.strategies["megatron"], step_ms=1e-3)}
    assert replace(result, strategies={**result.strategies, **fast}).best in ("none", "lancet-dw")
    none = {"none": result.strategies["none"]}
    assert replace(result, strategies={**none, **fast}).best == "megatron", "nothing else overlaps"


def test_small_kernels_wait_for_the_host(question):
    """64 tokens: the GPU waits for launches."""
    result = answer(question, ["none"])
    assert result.figures("none")["host_ms"] > 0.5 * result.strategies["none"].step_ms


def test_what_runs_beside_messages_is_slower(question):
    result = answer(question, ("none", "lancet-dw"))
    assert result.strategies["lancet-dw"].compute_ms > result.strategies["none"].compute_ms


def test_memory_by_hand(question):
    experts = 3 * (3 * 64 * 32)
    memory = answer(question, ["none"]).strategies["none"].memory
    assert memory["parameters"] == pytest.approx(gib(2 * (NUMBERS + experts)), rel=1e-3)
    assert memory["gradients"] == pytest.approx(gib(4 * (NUMBERS + experts)), rel=1e-3)
    assert memory["optimizer"] == pytest.approx(gib(12 * (NUMBERS / 16 + experts)), rel=1e-3)
    full = answer(replace(question, sharding="full"), ["none"]).strategies["none"].memory
    assert full["parameters"] == pytest.approx(gib(2 * (NUMBERS / 16 + experts)), rel=1e-2)


def test_what_sharding_sends(question):
    sent = {}
    for sharding in ("none", "optimizer", "full"):
        program = alone(replace(question, sharding=sharding)).program
        sent[sharding] = {}
        for i in program.instructions:
            if i.kind.is_communication and i.kind is not Kind.ALL_TO_ALL:
                kind = collective_of(i)
                sent[sharding][kind] = sent[sharding].get(kind, 0.0) + i.bytes / 2
    # Numbers that all ranks have; experts are on one rank each. Sums of several microbatches are float32.
    assert sent["none"] == {"all_reduce": pytest.approx(2 * NUMBERS)}
    assert sent["optimizer"] == pytest.approx(
        {"all_gather": NUMBERS, "reduce_scatter": 2 * NUMBERS}, rel=0.01
    )
    # Again for the backward, but the embedding, which it does not read.
    again = 2 * NUMBERS - 512 * 64
    assert sent["full"] == pytest.approx({"all_gather": again, "reduce_scatter": NUMBERS}, rel=0.01)


def test_fsdp_gathers_and_sums_beside_the_computation_of_a_unit(question):
    """As FSDP2 prefetches by default: unpacked where the unit is read, scaled when the next sums start."""
    program = alone(replace(question, sharding="full")).program
    place = {i.name: n for n, i in enumerate(program.instructions)}
    starts = [i for i in program.instructions if i.kind is Kind.OTHER_COMMUNICATION]
    beside = {"all_gather": 0, "reduce_scatter": 0}
    for i in starts:
        first = min((place[program.instructions[n].name] for n in program.consumers[i.outputs[0]]), default=0)
        between = program.instructions[place[i.name] + 1 : first]
        beside[collective_of(i)] += any(x.flops for x in between)
    sent = Counter(collective_of(i) for i in starts)
    # Nothing computes before what is read first, in the forward and in the backward, nor behind the last sum.
    assert beside["all_gather"] >= sent["all_gather"] - 4
    assert beside["reduce_scatter"] >= sent["reduce_scatter"] - 2
    assert {i.attributes.get("link") for i in starts} == {None}, "16 experts over 16 GPUs: all leave a node"


def test_messages_inside_nodes_have_a_link_of_their_own(tmp_path):
    """Experts over 8 of 16 GPUs: exchanges stay in a node, sums do not; parts of exchanges are such, too."""
    hf = written(tmp_path, QWEN3, num_hidden_layers=1)
    asked = Question(hf, "dgx-h100", 16, 8, "full", sequence=64, microbatch=2)
    one = alone(asked)
    plans = [one.planner(80.0).plan("none"), *one.planner(80.0)._tutel_degrees()]
    for plan in plans:
        links = {
            (collective_of(i), i.attributes.get("link"))
            for i in one.cut(plan.ranges).instructions
            if i.kind.is_communication
        }
        assert links == {("all_to_all", INSIDE_NODES), ("all_gather", None), ("reduce_scatter", None)}
    assert any(plan.ranges for plan in plans)
    pair = alone(replace(asked, accumulate=2)).pair.program
    assert {i.attributes.get("link") for i in pair.instructions if i.kind is Kind.ALL_TO_ALL} == {
        INSIDE_NODES
    }


@pytest.mark.long
def test_recomputation_trades_time_for_memory(question):
    none, full = (
        answer(replace(question, recompute=r), ["none"]).strategies["none"] for r in ("none", "full")
    )
    assert full.step_ms > none.step_ms
    assert full.memory["activations"] < none.memory["activations"]
    assert answer(replace(question, recompute="full")).flops == pytest.approx(answer(question).flops)


def test_one_microbatch_has_nothing_beside_it(question):
    result = answer(replace(question, accumulate=1), ("lancet-dw", "duplex", "microbatches"))
    assert set(result.strategies) == {"lancet-dw"}
    assert "batch of 1" in result.impossible["duplex"]
    assert "nothing to run beside" in result.impossible["microbatches"]


@pytest.mark.long
def test_strategies_that_cut_hide_all_to_alls(tmp_path):
    """Wide layers on eight nodes, two sequences: most of a step is all-to-all."""
    wide = {"hidden_size": 2048, "moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8}
    asked = Question(written(tmp_path, QWEN3, **wide), "dgx-h100", 64, 64, "none", 4096, microbatch=2)
    result = answer(asked, ("none", "tutel", "lancet-partition", "lancet", "duplex", GRAPH_TRAINER))
    exposed = {name: one.exposed_ms["all_to_all"] for name, one in result.strategies.items()}
    steps = {name: one.step_ms for name, one in result.strategies.items()}
    for name in ("lancet-partition", "lancet", "duplex", GRAPH_TRAINER):
        assert exposed[name] < exposed["none"]
        assert steps[name] < steps["none"]
    assert steps["tutel"] <= steps["none"]  # slices of the capacity cost more than they hide here
    assert steps["lancet"] <= min(steps["tutel"], steps["lancet-partition"])
    assert 0.5 * steps["none"] < steps["lancet"]


@pytest.mark.long
def test_a_dense_model_and_one_with_dense_layers(tmp_path):
    (tmp_path / "dense").mkdir()
    dense = answer(Question(written(tmp_path / "dense", DENSE), "dgx-h100", 8, 1, "full", 64, 1, 4))
    assert "all_to_all" not in dense.strategies["none"].exposed_ms
    deepseek = Question(written(tmp_path, DEEPSEEK), "dgx-b200", 8, 8, sequence=64, accumulate=2)
    assert len(alone(deepseek).program.positions(Kind.ALL_TO_ALL)) == 4 * 3


@pytest.mark.long
def test_chosen_keys_cost_what_a_window_of_as_many_does(tmp_path):
    config = written(tmp_path, SPARSE_ATTENTION, num_hidden_layers=2)
    program = Captured.of(Question(config, "dgx-h100", 8, 8, sequence=64)).microbatches[-1].program
    one, two, back, _ = (i for i in program.instructions if "attention" in i.op)
    # Query x key of 24 numbers, probabilities x value of 16; two FLOPs each, 4 heads.
    pairs = sum(min(position + 0.5, 16) for position in range(64))
    assert one.flops == two.flops == 2 * 4 * pairs * (24 + 16)
    assert back.flops == 2 * 4 * pairs * (3 * 24 + 2 * 16)
    chosen = [t for t in program.tensors.values() if t.shape == (1, 64, 16) and t.dtype == "int32"]
    assert chosen, "the indexer is not in the step"


def test_an_indexer_that_loops_over_queries_is_named_by_its_line(tmp_path):
    tiny_config("qwen4_exp").save_pretrained(tmp_path)
    with pytest.raises(
        UserError, match=r"modeling_qwen4_exp\.py, line \d+, .if num_complete_blocks > 0"
    ) as caught:
        Captured.of(Question(str(tmp_path), "dgx-h100", 8, 8, sequence=8))
    assert len(str(caught.value)) < 300


def test_of_a_multimodal_model_the_answer_says_that_it_is_the_text_model(tmp_path):
    texts = []
    for config in ({"model_type": "ernie4_5_vl_moe"}, DENSE):
        (tmp_path / config["model_type"]).mkdir()
        asked = Question(written(tmp_path / config["model_type"], config), "dgx-h100", 8)
        texts.append(Answer(asked, {}, {}, 0.0).assumed)
    multimodal, dense = texts
    assert (
        multimodal[0] == "of ernie4_5_vl_moe only its text model, ernie4_5_vl_moe_text, is planned, on text"
    )
    assert multimodal[1:] == dense
    assert not any("text model" in line for line in dense)


def test_microbatches_that_differ_only_in_number_scale_tokens(question):
    """And are captured once, like all questions that differ in prices alone."""
    one, two = (answer(replace(question, accumulate=n), ["none"]) for n in (6, 12))
    other = replace(question, cluster="dgx-h200", dispatch="deepep", routing="zipf:1.2")
    assert alone(other).step.captured is alone(question).step.captured
    assert alone(replace(question, sharding="none")).step.captured is not alone(question).step.captured
    assert two.flops == pytest.approx(2 * one.flops)
    assert replace(question, accumulate=12).tokens == 2 * question.tokens


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--experts-over", "3"], "--experts-over: got 3 of 16 GPUs"),
        (["--gpus", "64", "--experts-over", "32"], "32 ranks for 16 experts"),
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


def test_a_model_that_cannot_be_traced_is_one_line_of_its_own(tmp_path, monkeypatch):
    def forward(self, x):
        return self.missing.dtype

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP.forward", forward)
    hf = written(tmp_path, DENSE, num_hidden_layers=1)
    with pytest.raises(UserError) as caught:
        model_step(Question(hf, "dgx-h100", 8, 1, sequence=64), 1)
    assert re.fullmatch(
        r"--hf: got llama, which torch cannot trace: \S+, line \d+, \".*\": .*raised exception Attribute.*, "
        r"expected a model .* accepts; plan your own step with --module",
        str(caught.value),
    )
    assert len(str(caught.value)) < 300


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
            program = alone(Question(hf, "dgx-h100", 8, 1, sharding, sequence=64, accumulate=2)).program
            states = sum(program.tensors[t].bytes for t in program.inputs)
            counted.append(states * 8 if sharding == "full" else states)
    per_number = 2 + 4 + 12, 2 + 4 + 12 / 8, 2 + 4 + 12
    for untied, tied, each in zip(counted[:3], counted[3:], per_number, strict=True):
        assert untied - tied == pytest.approx(512 * 64 * each, rel=1e-3)


def test_a_plan_that_loses_between_layers_is_not_taken_for_a_deep_model(monkeypatch):
    """At 4 and at 8 layers it is faster than `none`, but 48 ms for 4 more layers are 3 too many for 8 x 4."""
    ms = {"lancet-dw": (80.0, 128.0), "none": (85.0, 130.0)}

    def planner():
        plans = {name: SimpleNamespace(strategy=name, ranges=()) for name in ms}
        return SimpleNamespace(candidates=lambda name: [plans[name]], plan=plans.__getitem__, limit_gb=80.0)

    def simulated(depth, plan):
        return SimpleNamespace(step_ms=ms[plan.strategy][depth], peak_memory_gib=1.0)

    monkeypatch.setattr(answers, "_of_microbatches", simulated)
    captured = answers.Captured(Depths(4, 8, 8.0), (0, 1), (planner(), planner()))
    assert [one.step_ms for one in captured.at_depths("lancet-dw")] == [85.0, 130.0]
    captured = answers.Captured(Depths(8, 8, 0.0), (0, 1), (planner(), planner()))
    assert captured.at_depths("lancet-dw")[1].step_ms == 128.0


def test_a_model_that_is_captured_whole_is_planned_once(tmp_path):
    asked = Question(written(tmp_path, DENSE), "dgx-h100", 8, sequence=64)
    captured = answers.Captured.of(asked)
    fewer, more = captured.microbatches
    assert fewer is more
    assert captured.planners[0] is captured.planners[1]
    of_fewer, of_more = captured.at_depths("lancet-dw")
    assert of_fewer is of_more
