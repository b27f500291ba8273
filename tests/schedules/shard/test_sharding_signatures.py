"""Every signature of every op in HiDup's models: shard, run, unshard equals the whole op."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.papers.hidup_settings import HiDupModel, hidup_config
from lancet_kernels.graph.capture.capture import capture
from lancet_kernels.graph.ops import rule_for
from lancet_kernels.graph.rules.rules import PARTIAL, WHOLE
from lancet_kernels.parallelization.one_device_model import forward_of
from lancet_kernels.schedules.shard.blocks import signatures
from lancet_kernels.schedules.shard.sharding_search import search_sharding
from lancet_kernels.schedules.time.simulate import simulate
from tests.capturing import placeholder_values
from tests.graph.cut_and_reassemble import Recorder, UnequalUnits, check_way
from tests.grids import few_of
from tests.schedules.sharding_examples import duplexed

MODELS = ("bert-sgmoe", "bert-switch", "vit-sgmoe", "vit-switch")
BOTH_WAYS = ("bert-sgmoe", "vit-switch")
"""Words and images, both kinds of layers."""
RANKS = 2


def tiny(name: str, batch: int = 4, layers: int = 2) -> tuple[HiDupModel, tuple[torch.Tensor, torch.Tensor]]:
    """Layers of small sizes, in fp64, with a random batch."""
    config = replace(
        hidup_config(name, 2, layers), width=16, heads=4, hidden=32, sequence=8, patch=6, vocab=24, experts=4
    )
    torch.manual_seed(3)
    model = HiDupModel(config).double()
    target = torch.randint(config.vocab, (batch,) if config.is_image else (batch, 8))
    if config.is_image:
        return model, (torch.randn(batch, 8, 6, dtype=torch.float64), target)
    return model, (torch.randint(config.vocab, (batch, 8)), target)


def milliseconds(instruction, tensors) -> float:
    if instruction.milliseconds is not None:
        return instruction.milliseconds
    return 1e-3 * (instruction.bytes + instruction.flops) + 0.1 * instruction.kind.is_communication


@pytest.mark.long
@pytest.mark.parametrize("name", BOTH_WAYS)
def test_every_signature_of_a_model(name):
    model, batch = tiny(name)
    captured = capture(model, batch)
    program = forward_of(captured, name)
    nodes = {node.name: node for node in captured.joint.graph.nodes}
    recorder = Recorder(captured.joint)
    recorder.run(*placeholder_values(captured.joint, model, batch))
    loss = recorder.values[captured.joint.graph.output_node().args[0][0]]
    assert loss.item() == pytest.approx(model(*batch).item())
    proofs = sums = 0
    for instruction in program.instructions:
        node = nodes[instruction.name]
        for signature in signatures(instruction, program, RANKS, milliseconds):
            way = (*signature.inputs, *signature.outputs)
            if PARTIAL in signature.inputs:
                assert way == (PARTIAL, PARTIAL)
                value = recorder.values[node.args[0]]
                summand = torch.randn(value.shape).to(value.dtype)
                parts = [node.target(x, *node.args[1:], **node.kwargs) for x in (summand, value - summand)]
                torch.testing.assert_close(sum(parts), recorder.values[node])
                sums += 1
            elif any(form != WHOLE for form in way):
                try:
                    check_way(node, recorder.values, instruction, program, rule_for(instruction), way, RANKS)
                except UnequalUnits:
                    continue
                proofs += 1
    assert proofs > 100
    assert sums > 10


@pytest.mark.parametrize("name", few_of(BOTH_WAYS))
def test_a_strategy_for_a_model_takes_what_is_simulated(name):
    model, batch = tiny(name)
    program = forward_of(capture(model, batch), name)
    strategy = search_sharding(program, RANKS, milliseconds)
    assert set().union(*(stage.computation for stage in strategy.stages)) == set(program.index)
    assert set(strategy.parameters) == set(program.parameters)
    assert simulate(duplexed(strategy), milliseconds).iteration_ms == pytest.approx(strategy.predicted_ms)
    assert strategy.predicted_ms <= strategy.serial_ms + 1e-9
    assert strategy.predicted_ms < search_sharding(program, 1, milliseconds).predicted_ms


@pytest.mark.long
@pytest.mark.parametrize("name", BOTH_WAYS)
def test_memory_is_weights_and_what_autograd_saves(name):
    model, batch = tiny(name)
    strategy = search_sharding(forward_of(capture(model, batch), name), 1, milliseconds)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(*batch)
    inputs = {t.untyped_storage().data_ptr() for t in batch}
    activations = sum(storage.nbytes() for at, storage in saved.items() if at not in own | inputs)
    assert loss.requires_grad
    # Weight, gradient and Adam's two moments; activations of two microbatches.
    assert strategy.memory_bytes == pytest.approx(4 * weights + 2 * activations, rel=0.05)
