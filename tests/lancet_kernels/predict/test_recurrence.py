"""Recurrent layers in a prediction: FLOPs by hand, one instruction for each, gradients of all operands."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lancet_kernels.errors import UserError
from lancet_kernels.graph.costs.clusters import load_cluster
from lancet_kernels.graph.costs.costs import RECURRENCE_OPS
from lancet_kernels.graph.rules import derived
from lancet_kernels.predict import recurrence
from lancet_kernels.predict.answer import Captured
from lancet_kernels.predict.question import Question
from tests.grids import few_of
from tests.transformers_families import tiny_config


def fake(*shape: int) -> torch.Tensor:
    return torch.empty(shape, requires_grad=True)


def flops_of(call) -> float:
    with FakeTensorMode(), torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def mamba2() -> None:
    """1 sequence of 8 tokens, 2 heads of width 3 in one group, states of 5, chunks of 4."""
    state = fake(1, 8, 1, 5)
    recurrence.mamba2_chunk_scan(fake(1, 8, 2, 3), fake(1, 8, 2), fake(2), state, state, 4, D=fake(2))


def gated_delta_rule() -> None:
    """1 sequence of 64 tokens, 2 heads with values of 16, 1 head of keys of 8, chunks of 64."""
    key = fake(1, 64, 1, 8)
    recurrence.chunk_gated_delta_rule(key, key, fake(1, 64, 2, 16), fake(1, 64, 2), fake(1, 64, 2))


def mamba() -> None:
    """1 sequence of 8 tokens, 6 channels, states of 5."""
    x, state = fake(1, 6, 8), fake(1, 5, 8)
    recurrence.mamba_selective_scan(x, x, fake(6, 5), state, state, z=x)


def convolution_and_its_backward() -> None:
    """2 sequences of 8 tokens over 4, 6 channels: 2 * 2 * 8 * 6 * 4; the backward has three times as many."""
    recurrence.causal_conv1d_fn(fake(2, 6, 8), fake(6, 4)).sum().backward()


@pytest.mark.parametrize(
    ("call", "flops"),
    [
        (mamba2, 8 * (1 * 4 * 5 + 2 * (4 * 3 + 4 * 3 * 5))),
        (gated_delta_rule, 64 * 2 * (64 * (3 * 8 + 2 * 16) + 6 * 8 * 16)),
        (mamba, 9 * 8 * 6 * 5),
        (convolution_and_its_backward, 2 * 2 * 8 * 6 * 4 * (1 + 3)),
    ],
)
def test_flops_by_hand(call: Callable[[], None], flops: int) -> None:
    assert flops_of(call) == flops


def test_a_cluster_file_has_what_its_source_measured():
    """FLA on H200, 8,192 tokens, 16 heads of queries and keys, 32 of values, all of 128: 0.472 ms."""

    def call():
        key, gate = fake(1, 8192, 16, 128), fake(1, 8192, 32)
        recurrence.chunk_gated_delta_rule(key, key, fake(1, 8192, 32, 128), gate, gate)

    cluster = load_cluster("dgx-h200")
    fraction = flops_of(call) / 0.472e-3 / (cluster.peak_tflops["bfloat16"] * 1e12)
    assert cluster.kernels.recurrence == pytest.approx(fraction, rel=0.01)


def test_the_rule_cuts_sequences_and_sums_gradients_of_parameters():
    forward = derived.recurrence([(2, 6, 8), (6, 4)], [(2, 6, 8)], {})
    assert forward == "b i0x1! i0x2!, i1x0! i1x1! -> b o0x1! o0x2!"
    backward = derived.recurrence([(2, 6, 8), (2, 6, 8), (6, 4)], [(2, 6, 8), (6, 4)], {})
    assert backward == "b+ i0x1! i0x2!, b+ i1x1! i1x2!, i2x0! i2x1! -> b o0x1! o0x2!, o1x0! o1x1!"


def test_backward_gives_gradients_like_the_operands():
    with FakeTensorMode():
        operands = fake(2, 6, 8), fake(6, 4), fake(6)
        y = recurrence.causal_conv1d_fn(*operands)
        gradients = torch.autograd.grad(y.sum(), operands)
    assert [g.shape for g in gradients] == [o.shape for o in operands]
    assert y.shape == operands[0].shape


@pytest.mark.parametrize("family", few_of(["nemotron_h", "qwen3_next", "jamba", "kimi_linear"], 2))
def test_a_layer_is_one_instruction(family: str, tmp_path: Path) -> None:
    """Mamba-2, gated delta rule, Mamba, Kimi Delta Attention, each beside attention: token by token, or chunk
    by chunk, 512 tokens would be thousands."""
    pytest.importorskip("transformers")
    tiny_config(family).save_pretrained(tmp_path)
    question = Question(str(tmp_path), "dgx-h100", 8, 4, sequence=512, sharding="none")
    program = Captured.of(question).microbatches[-1].program
    ops = Counter(i.op for i in program.instructions)
    assert [ops[op] for op in RECURRENCE_OPS] == [2, 2], "a convolution and a scan, forward and backward"


def test_a_file_without_functions_is_refused() -> None:
    """As before transformers 5.23: layers would be captured token by token."""
    mixer = torch.nn.Module()
    mixer.A_log = torch.nn.Parameter(torch.zeros(2))
    message = "whose recurrent layers have no function of their own"
    with pytest.raises(UserError, match=message), recurrence.as_instructions(mixer):
        pass
