"""`MoELayer(backend="fused")` on one GPU: as good as backend="torch", against the same layer in float64."""

import copy

import pytest
import torch

from lancet_kernels import MoELayer, ops
from lancet_kernels.ops.moe.fused_experts import fused_experts

pytestmark = pytest.mark.gpu
CASES = [
    {"gate": "switch", "top_k": 1, "capacity_factor": 1.0},
    {"gate": "topk", "top_k": 2, "capacity_factor": None, "activation": "swiglu", "bias": True},
    {"gate": "gshard", "top_k": 2, "capacity_factor": 1.25, "bias": True},
    {"gate": "hash", "top_k": 1, "capacity_factor": 0.5, "activation": "silu"},
]


class FusedLayer(MoELayer):
    """Fused launches on one rank, which the layer itself replaces by grouped GEMMs."""

    def __init__(self, *sizes: int, **options: object) -> None:
        super().__init__(*sizes, backend="fused", **options)

    def _experts(self, x_TD, expert_TK, slot_TK, weight_TK, used_E, capacity: int, real_T1) -> torch.Tensor:
        count_WL = ops.kept_counts(used_E, capacity, self.ranks)
        return fused_experts(
            x_TD, expert_TK, slot_TK, weight_TK, count_WL, capacity, self.w1, self.b1, self.w2, self.b2,
            self.exchange,
        )  # fmt: skip


def step(layer: MoELayer, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and all gradients, in float64 on the CPU."""
    layer.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    found = {"y": y.detach(), "x": x.grad}
    found |= {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return {name: tensor.cpu().double() for name, tensor in found.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("options", CASES, ids=lambda o: o["gate"])
def test_fused_is_as_good_as_torch(options, dtype):
    torch.manual_seed(0)
    fused = FusedLayer(192, 320, 8, device="cuda", dtype=dtype, **options)
    plain = MoELayer(192, 320, 8, device="cuda", dtype=dtype, **options)
    plain.load_state_dict(fused.state_dict())
    # The router is float32 whatever the dtype: in float64 a tie could go the other way.
    exact = copy.deepcopy(plain).float() if dtype == torch.bfloat16 else None
    for _ in range(3):
        x = torch.randn(3, 333, 192, device="cuda", dtype=dtype)
        dy = torch.randn_like(x)
        mine, theirs = step(fused, x, dy), step(plain, x, dy)
        assert mine.keys() == theirs.keys()
        right = theirs if exact is None else step(exact, x.float(), dy.float())
        for name, wanted in right.items():
            scale = wanted.abs().max().clamp_min(1e-6)
            off = float((mine[name] - wanted).abs().max() / scale)
            allowed = 3 * float((theirs[name] - wanted).abs().max() / scale) + 1e-4
            allowed += torch.finfo(dtype).eps
            assert off <= allowed, f"{name}: off by {off:.2e}, allowed {allowed:.2e}"


def test_without_gradients_any_number_of_passes():
    layer = FusedLayer(64, 96, 4, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(50, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        outs = [layer(x) for _ in range(5)]
    assert all(torch.equal(outs[0], out) for out in outs)


def test_layers_that_share_a_backward_exchange_for_several_steps():
    torch.manual_seed(0)
    make = {"device": "cuda", "top_k": 2, "gate": "topk"}
    models = []
    for kind in (FusedLayer, MoELayer):
        models.append(torch.nn.ModuleList(kind(64, 96, 4, **make) for _ in range(3)))
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    for _ in range(4):
        x = torch.randn(100, 64, device="cuda")
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            y = x
            for layer in model:
                y = y + layer(y)
            loss = y.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)
