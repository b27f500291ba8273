"""Routing as an input: loads by hand, files, and skewed steps against a simulation rank by rank."""

import json
from dataclasses import replace

import pytest
import torch

from lancet_kernels.errors import UserError
from lancet_kernels.graph.program import Kind
from lancet_kernels.layer.model_layers import RoutingCounts
from lancet_kernels.predict.answer import Captured
from lancet_kernels.predict.question import Load, Question, Routing
from lancet_kernels.predict.recomputation import layer_of
from tests.lancet_kernels.predict.small_models import QWEN3, written
from tests.transformers_families import tiny_config


def test_loads_by_hand():
    """The example of the module."""
    routing = Routing(((3, 1, 2, 2), (1, 1, 3, 3)))
    assert routing.load(2) == Load(time=1.25, memory=1.25)
    assert routing.load(1) == Load()
    # At most 1.25 even shares of 2: an expert with 3 drops 0.5.
    capped = replace(routing, capacity=1.25).load(2)
    assert capped.time == pytest.approx((4 / 4 + 5 / 4) / 2)
    assert capped.dropped == pytest.approx((0.5 + 0.5 + 0.5) / 16)


def test_balanced_is_even_and_zipf_is_not():
    assert Routing.of("balanced", 16, 3).load(8) == Load()
    assert Routing.of("balanced,capacity:", 16, 3).capacity is None
    even, skewed, more = (Routing.of(f"zipf:{s}", 64, 8).load(16) for s in (0, 0.5, 1.2))
    assert even == Load()
    assert 1 < skewed.time < more.time
    # In every layer another rank is the busiest.
    assert more.memory < more.time
    capped = Routing.of("zipf:1.2,capacity:1.25", 64, 8).load(16)
    assert capped.time <= 1.25
    assert capped.dropped > 0.2


def test_counts_of_a_run(tmp_path):
    counts = RoutingCounts()
    with pytest.raises(UserError, match="counts: got none"):
        counts.save(tmp_path / "counts.json")
    for step in ([[3, 0, 1, 2], [1, 1, 0, 3]], [[0, 1, 1, 0], [0, 0, 3, 0]]):
        counts.add(torch.tensor(step))
    counts.save(tmp_path / "counts.json")
    assert Routing.of(str(tmp_path / "counts.json"), 4, 9).counts == ((3, 1, 2, 2), (1, 1, 3, 3))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("skewed", "got 'skewed'"),
        ("zipf:much", "got 'zipf:much'"),
        ("balanced,capacity:0", "got 'balanced,capacity:0'"),
        ("nowhere.json", "nowhere.json .*No such file"),
        ("counts.json", "with \\[4\\] experts in its layers"),
        ("none.json", "got counts of none.json, expected none below 0, and some above"),
        ("nan.json", "got counts of nan.json, expected none below 0, and some above"),
    ],
)
def test_bad_routing_is_one_line(tmp_path, monkeypatch, spec, message):
    monkeypatch.chdir(tmp_path)
    counts = {"counts": [1, 2, 3, 4], "none": [0] * 16, "nan": [1] * 15 + [float("nan")]}
    for name, layer in counts.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"assigned": [layer]}))
    with pytest.raises(UserError, match=message):
        Routing.of(spec, 16, 3)


@pytest.mark.parametrize("family", ["aria", "dbrx", "gemma4", "mixtral"])
def test_choices_per_token_are_those_of_the_model(tmp_path, family):
    """Whatever its configuration calls their number."""
    pytest.importorskip("transformers")
    tiny_config(family).save_pretrained(tmp_path)
    assert Question(str(tmp_path), "dgx-h100", 8, 8).cost.top_k == 2


def test_a_skewed_step_is_that_of_ranks_that_wait_for_each_other(tmp_path):
    """16 ranks, each with the rows of its own experts in each layer, meet in every exchange."""
    pytest.importorskip("transformers")
    wide = {"hidden_size": 1024, "moe_intermediate_size": 512}
    hf = written(tmp_path, QWEN3, **wide)
    generator = torch.Generator().manual_seed(3)
    assigned = torch.randint(200, 1000, (3, 16), generator=generator)
    (tmp_path / "counts.json").write_text(json.dumps({"assigned": assigned.tolist()}))
    asked = Question(hf, "dgx-h100", 16, 16, sequence=2048, routing=str(tmp_path / "counts.json"))
    one = Captured.of(asked).microbatches[1]
    program, cost = one.program, one.step.cost
    closed = sum(cost(i, program.tensors) for i in program.instructions)
    loads = assigned / assigned.double().mean(1, keepdim=True)
    layers = {node.name: layer_of(node) for node in one.step.module.graph.nodes}
    clocks = [0.0] * 16
    for i in program.instructions:
        layer = layers.get(i.name, "")
        own = loads[int(layer)].tolist() if layer else [1.0] * 16
        ms = [replace(cost, busiest=load)(i, program.tensors) for load in own]
        if i.kind is Kind.ALL_TO_ALL:
            clocks = [max(clocks) + max(ms)] * 16
        else:
            clocks = [clock + t for clock, t in zip(clocks, ms, strict=True)]
    assert asked.load.time > 1.2
    assert closed == pytest.approx(max(clocks), rel=0.01)
    balanced = Captured.of(replace(asked, routing="balanced")).microbatches[1]
    even = sum(balanced.step.cost(i, balanced.program.tensors) for i in balanced.program.instructions)
    assert closed > 1.05 * even
    assert one.kept_bytes > balanced.kept_bytes
