"""A padded batch against the same batch without the padding: outputs, sums, losses, gradients, statistics."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lancet_kernels import MoELayer, moe_losses, ops
from lancet_kernels.layer.moe_layer import CheckpointedRun
from lancet_kernels.ops.base import during
from tests.examples import examples
from tests.grids import few_of
from tests.ops.moe.test_gate import KEYED, SPECS, gate_args, top_k_of
from tests.ops.op_cases import SEEDS

D, F, E, B, S = 16, 24, 8, 3, 6
CASES = {
    "dropless": {"gate": "topk", "top_k": 2, "capacity_factor": None},
    "capacity": {"gate": "topk", "top_k": 2, "capacity_factor": 0.75},
    "switch": {"gate": "switch", "capacity_factor": 1.0},
    "gshard": {"gate": "gshard", "top_k": 2, "capacity_factor": 0.75},
    "batch-prioritized": {"gate": "batch-prioritized", "top_k": 2, "capacity_factor": 0.5},
    "expert-choice": {"gate": "expert-choice", "capacity_factor": 1.0},
    "sigmoid": {"gate": "sigmoid", "top_k": 2, "capacity_factor": 0.75},
    "hash": {"gate": "hash", "top_k": 2, "capacity_factor": 0.75},
    "bias": {"gate": "topk", "top_k": 2, "capacity_factor": None, "bias": True, "activation": "swiglu"},
}


@given(
    spec=st.sampled_from(SPECS + KEYED),
    tokens=st.integers(0, 12),
    share=st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    capacity=st.integers(0, 4),
    seed=SEEDS,
)
@examples(300)
def test_a_gate_routes_as_if_padding_were_not_there(spec, tokens, share, capacity, seed) -> None:
    logits_TE, used_E, key_T, bias_E, *_ = gate_args(spec, tokens, seed=seed)
    real_T = torch.rand(tokens, generator=torch.Generator().manual_seed(seed)) < share
    if spec != "expert-choice":
        used_E = used_E + torch.arange(6) % 3
    rest = spec, top_k_of(spec), capacity

    def of_real(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[real_T]

    expert_TK, slot_TK, weight_TK, after_E = ops.gate(
        logits_TE, used_E, key_T, bias_E, *rest, real_T[:, None]
    )
    expected = ops.gate(of_real(logits_TE), used_E, of_real(key_T), bias_E, *rest)
    kept_TK = expected[1] < capacity
    assert torch.equal(expert_TK[real_T], expected[0])
    assert torch.equal(slot_TK[real_T] < capacity, kept_TK)
    assert torch.equal(slot_TK[real_T][kept_TK], expected[1][kept_TK])
    assert torch.equal(weight_TK[real_T], expected[2])
    assert torch.equal(after_E, expected[3])
    assert (slot_TK[~real_T] >= 10**9).all()


class Batch:
    """x, the gradient of y, token ids and a mask of this rank; padding lies before, between and behind."""

    def __init__(self, rank: int, dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(rank)
        self.x, self.dy = (torch.randn(B, S, D, generator=generator).to(dtype) for _ in range(2))
        self.ids = torch.randint(50, (B, S), generator=generator)
        self.mask = torch.zeros(B, S, dtype=torch.int64)
        self.mask[0, : lengths[0]] = 1
        self.mask[1, S - lengths[1] :] = 1
        self.mask[2, torch.randperm(S, generator=generator)[: lengths[2]]] = 1
        self.x[self.mask == 0] = 7.0  # as an embedding of padding gives: everywhere the same


LENGTHS = (((4, 3, 2), (6, 1, 0)), ((0, 0, 0), (1, 6, 3)))
"""Lengths on two ranks, twice: a whole rank may be padding."""


def build(options: dict, dtype: torch.dtype) -> MoELayer:
    """The same experts on any number of ranks, routed unevenly."""
    torch.manual_seed(5)
    layer = MoELayer(D, F, E, **options).to(dtype)
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(50).add_(torch.linspace(-1, 1, p.shape[-1], dtype=dtype))  # biases begin with 0
        if layer.correction_bias is not None:
            layer.correction_bias += 0.01 * torch.arange(E)
    return layer


def step(layer: MoELayer, x: Tensor, dy: Tensor, ids: Tensor, mask: Tensor | None, kind: str) -> dict:
    x = x.clone().requires_grad_()

    def forward(x: Tensor) -> tuple[Tensor, ...]:
        y, sums = layer(x, mask=mask if kind != "context" else None, token_ids=ids, return_sums=True)
        return y, *sums

    with during(padding_mask=mask) if kind == "context" else contextlib.nullcontext():
        if kind.endswith("reentrant"):
            y, *sums = checkpoint(forward, x, use_reentrant=kind == "reentrant")
        else:
            y, *sums = forward(x)
    losses = moe_losses([ops.RoutingSums(*sums)])
    layer.zero_grad()
    ((y * dy).sum() + (losses.balance + losses.z).sum()).backward()
    results = {"y": y, "dx": x.grad, "sums": torch.stack(sums[:2]), "tokens": sums[4], **losses._asdict()}
    results |= {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    if layer.correction_bias is not None:
        bias_E = layer.correction_bias.clone()
        layer.update_correction_bias(losses.assigned[0], 0.1)
        results["bias"] = layer.correction_bias.clone()
        layer.correction_bias.copy_(bias_E)
    return {name: value.detach() for name, value in results.items()}


def compare(name: str, dtype: torch.dtype, kind: str, options: dict) -> None:
    layer = build({**CASES[name], **options}, dtype)
    reference = build(CASES[name], dtype)
    rank = dist.get_rank() if dist.is_initialized() else 0
    bound = 1e-10 if dtype == torch.float64 else 2e-5
    for lengths in LENGTHS:
        b = Batch(rank, dtype, lengths[rank])
        real = b.mask.bool()
        got = step(layer, b.x, b.dy, b.ids, b.mask, kind)
        # The capacity is that of the padded batch.
        with mock.patch.object(MoELayer, "capacity", return_value=layer.capacity(B * S)):
            expected = step(reference, b.x[real], b.dy[real], b.ids[real], None, "plain")
        for key in ("y", "dx"):
            assert not got[key][~real].any(), key
            got[key] = got[key][real]
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            # Sums round by their largest terms.
            largest = value.abs().max().item() if value.numel() else 0.0
            atol = bound * max(1.0, largest)
            close = torch.testing.assert_close
            close(got[key], value, rtol=bound, atol=atol, msg=lambda m, k=key: f"{k}: {m}")


KINDS = ("plain", "context", "reentrant", "not reentrant")


@pytest.mark.parametrize("dtype", few_of([torch.float64, torch.float32]), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_as_without_padding(name: str, dtype: torch.dtype) -> None:
    for kind in KINDS:
        compare(name, dtype, kind, {})


def on_ranks(names: list[str], dtype: torch.dtype, kinds: tuple[str, ...], options: dict) -> None:
    for name in names:
        for kind in kinds:
            compare(name, dtype, kind, options)


def test_on_two_ranks(pool) -> None:
    pool.run(on_ranks, list(CASES), torch.float64, ("plain", "reentrant"), {}, ranks=2, timeout_s=200)


@pytest.mark.long
@pytest.mark.parametrize("name", ["capacity", "bias"])
def test_in_fused_launches(pool, name: str) -> None:
    """In the interpreter."""
    fused = {"backend": "fused", "max_tokens": B * S}
    pool.run(on_ranks, [name], torch.float32, ("plain", "not reentrant"), fused, ranks=2, timeout_s=300)


def test_the_mask_of_a_batch_is_there_when_a_block_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward is over by then."""
    layer = build(CASES["capacity"], torch.float64)
    b = Batch(0, torch.float64, (4, 3, 2))
    kept = []
    as_at_first = CheckpointedRun.as_at_first

    def watched(run: CheckpointedRun, *given: object) -> object:
        kept.append((run.again is not None, as_at_first(run, *given)))
        return kept[-1][1]

    monkeypatch.setattr(CheckpointedRun, "as_at_first", watched)
    x = b.x.clone().requires_grad_()
    with during(padding_mask=b.mask):
        y = checkpoint(layer, x, use_reentrant=False)
    y.sum().backward()
    masks = [value for again, value in kept if again and isinstance(value, Tensor)]
    assert torch.equal(masks[0], b.mask.bool().view(-1, 1))
    assert not x.grad[b.mask == 0].any()
