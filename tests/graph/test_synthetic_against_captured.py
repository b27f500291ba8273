"""The step that is written down by hand, against the one that torch captures of the real model."""

import pytest
import torch

from lancet_kernels.graph.capture import capture
from lancet_kernels.graph.from_fx import program_from_fx
from lancet_kernels.graph.program import Kind, Phase
from lancet_kernels.graph.reachability import bitset
from lancet_kernels.graph.synthetic import GATES, ModelShape, training_step
from lancet_kernels.ops import gates
from lancet_kernels.training.models import GPT2MoE, model_config
from lancet_kernels.training.step import TrainingStep
from tests.grids import few_of

GEMMS = ("aten.mm", "aten.addmm", "lancet.grouped_gemm", "lancet.grouped_gemm_dx", "lancet.grouped_gemm_dw")
BATCH = 2


@pytest.fixture(
    scope="module",
    params=few_of(map(pytest.param, [("gpt2-tiny-moe", 4), ("gpt2-s-moe", 2)])),
    ids=lambda p: p[0],
)
def pair(request):
    name, layers = request.param
    config = model_config(name, layers=layers)
    shape = ModelShape(name, layers, config.width, config.heads, config.vocab, config.sequence, padded=False)
    written = training_step(shape, gpus=1, batch=BATCH)
    tokens = torch.zeros(BATCH, config.sequence, dtype=torch.long)
    captured = capture(TrainingStep(GPT2MoE(config), 1), (tokens, tokens))
    return written, program_from_fx(captured.joint)


def gemms(program, phase):
    return [i for i in program.instructions if i.op in GEMMS and i.phase is phase]


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD])
def test_the_same_products(pair, phase):
    written, captured = (gemms(p, phase) for p in pair)
    assert len(written) == len(captured)
    assert sum(i.flops for i in written) == pytest.approx(sum(i.flops for i in captured), rel=0.02)


def test_the_same_weight_gradients(pair):
    written, captured = (weight_gradient_gemms(p) for p in pair)
    assert written == captured == len(gemms(pair[0], Phase.FORWARD)) + 1


def weight_gradient_gemms(program):
    """How many products of the backward no all-to-all and no other product waits for.

    Of every forward product's two, that is the one for its weight; the first one's other one is, too.
    """
    products = [program.index[i.name] for i in gemms(program, Phase.BACKWARD)]
    waiting = bitset([*products, *program.positions(Kind.ALL_TO_ALL)])
    return sum(not program.reachability.descendants[i] & waiting for i in products)


def test_the_same_all_to_alls(pair):
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        written, captured = (
            [i.bytes for i in p.instructions if i.kind is Kind.ALL_TO_ALL and i.phase is phase] for p in pair
        )
        assert written == captured


def test_the_same_attention(pair):
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        written, captured = (
            [i for i in p.instructions if "attention" in i.op and i.phase is phase] for p in pair
        )
        assert [i.flops for i in written] == [i.flops for i in captured]


def test_the_same_gates():
    assert {name: gate.partitionable for name, gate in gates.GATES.items()} == GATES
