"""MoELayer on 1, 2 and 4 ranks against `tests.moe_reference`; compiled, in other dtypes, with bad input."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lancet_kernels import MoELayer, UserError, expert_parameters, moe_losses, set_routing_step
from tests import moe_reference as reference
from tests.grids import few_of
from tests.moe_reference import Case

GATE_CASES = {
    "switch": Case(),
    "topk": Case("topk", top_k=2),
    "topk-after": Case("topk", {"softmax": "after"}, top_k=3),
    "topk-renormalized": Case("topk", {"renormalize": True}, top_k=2),
    "gshard": Case("gshard", top_k=2),
    "batch-prioritized": Case("batch-prioritized", top_k=2),
    "batch-prioritized-sum": Case("batch-prioritized", {"importance": "sum"}, top_k=2),
    "expert-choice": Case("expert-choice"),
    "hash": Case("hash", top_k=2),
    "random": Case("random", top_k=2),
    "sigmoid": Case("sigmoid", {"renormalize": False}, top_k=2),
    "sigmoid-groups": Case("sigmoid", {"groups": 2, "top_groups": 1, "scale": 2.5}, top_k=2),
}
# (experts per rank, activation, bias, shared, skewed): each value of each appears.
VARIANTS = [(1, "gelu", False, None, False), (2, "silu", True, 8, True), (4, "swiglu", True, 5, True)]


def build_layer(case: Case, dtype: torch.dtype = torch.float64) -> MoELayer:
    """The layer of a case with the case's parameters, on however many ranks there are."""
    layer = MoELayer(
        case.width,
        case.hidden,
        case.experts,
        top_k=case.top_k,
        gate=case.spec,
        capacity_factor=case.capacity_factor,
        activation=case.activation,
        bias=case.bias,
        shared_expert_d_ff=case.shared,
        dtype=dtype,
    )
    layer.load_state_dict(reference.make_parameters(case, dtype), strict=False)
    set_routing_step(layer, case.step)
    return layer


def gradients(layer: MoELayer) -> dict[str, Tensor]:
    """The gradient of each parameter under its name in the state_dict, experts one by one."""
    found = {}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        if name in ("w1", "w2", "b1", "b2"):
            for e, grad in zip(layer.expert_ids(), parameter.grad, strict=True):
                found[f"grad.experts.{e}.{name}"] = grad
        else:
            found[f"grad.{name}"] = parameter.grad
    return found


def run_layer(layer: nn.Module, x: Tensor, dy: Tensor, ids: Tensor | None) -> dict[str, Tensor]:
    """y, dx and the losses of one forward and backward."""
    x = x.clone().requires_grad_()
    y, sums = layer(x, token_ids=ids, return_sums=True)
    losses = moe_losses([sums])
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, **{k: v.detach() for k, v in losses._asdict().items()}}


def layer_on_rank(cases: list[Case]) -> list[dict[str, Tensor]]:
    """What this rank computes for each case."""
    results = []
    rank = dist.get_rank() if dist.is_initialized() else 0
    for case in cases:
        layer = build_layer(case)
        x, dy, ids = (t[rank] for t in reference.make_tokens(case))
        results.append(run_layer(layer, x, dy, ids) | gradients(layer))
    return results


def run_cases(pool, cases: list[Case]) -> list[list[dict[str, Tensor]]]:
    """[case][rank]: one process without torch.distributed, or the pool's workers."""
    if cases[0].ranks == 1:
        return [[result] for result in layer_on_rank(cases)]
    by_rank = pool.run(layer_on_rank, cases, ranks=cases[0].ranks)
    return [list(results) for results in zip(*by_rank, strict=True)]


def check_against_reference(case: Case, by_rank: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Forward, statistics and all gradients; replicated gradients are the sum over the ranks."""
    expected = reference.forward_and_backward(case)

    def close(what: str, actual: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-11, msg=lambda m: f"{case} {what}: {m}")

    total, assigned = {}, expected["assigned"].sum(0)
    for rank, got in enumerate(by_rank):
        close(f"y of rank {rank}", got["y"], expected["y"][rank])
        close(f"dx of rank {rank}", got["dx"], expected["dx"][rank])
        assert torch.equal(got["assigned"][0], assigned), case
        dropped = 1 - expected["kept"].sum() / assigned.sum()
        torch.testing.assert_close(got["dropped"].double(), dropped.double()[None], rtol=1e-6, atol=1e-6)
        if "probability" in expected:
            share = assigned.double() / assigned.sum()
            balance = case.experts * (share * expected["probability"][rank]).sum()
            close("balance", got["balance"], balance[None])
            close("z", got["z"], expected["logsumexp2"][rank][None])
        for name, grad in got.items():
            if name.startswith("grad."):
                total[name] = total.get(name, 0) + grad
    assert total.keys() == {name for name in expected if name.startswith("grad.")}
    for name, grad in total.items():
        close(name, grad, expected[name])
    return expected


@pytest.mark.parametrize(("dropless", "ranks"), few_of([(False, 2), (True, 1), (True, 2), (False, 4)]))
@pytest.mark.parametrize("gate", few_of(GATE_CASES, 1, 5, 7, 11))
def test_layer_equals_reference(pool, gate, dropless, ranks):
    if gate == "expert-choice" and dropless:
        pytest.skip("not allowed; see the bad-input tests")
    base = replace(GATE_CASES[gate], ranks=ranks, capacity_factor=None if dropless else 0.75)
    cases = [
        replace(base, experts=experts, activation=act, bias=bias, shared=shared, skewed=skewed)
        for per_rank, act, bias, shared, skewed in VARIANTS
        # Fewer experts than choices, or than groups can give, is another test.
        if (experts := per_rank * ranks) >= 4
    ]
    for case, by_rank in zip(cases, run_cases(pool, cases), strict=True):
        expected = check_against_reference(case, by_rank)
        dropped = expected["kept"].sum() < expected["assigned"].sum()
        if case.skewed and gate not in ("expert-choice", "random"):
            assert dropped == (not dropless), "the case was meant to drop tokens"
        if case.skewed and gate == "switch":
            assert (expected["assigned"].sum(0) == 0).any(), "the case was meant to leave experts empty"


@pytest.mark.parametrize("ranks", few_of([1, 2, 4], 1))
def test_one_token_per_rank(pool, ranks):
    cases = [replace(case, ranks=ranks, tokens=1, experts=8) for case in GATE_CASES.values()]
    for case, by_rank in zip(cases, run_cases(pool, cases), strict=True):
        check_against_reference(case, by_rank)


def test_shape_of_x_does_not_matter():
    case = Case("topk", top_k=2, ranks=1, tokens=6)
    x = reference.make_tokens(case)[0][0]
    layer = build_layer(case)
    y = layer(x)
    assert torch.equal(layer(x.view(2, 3, -1)), y.view(2, 3, -1))
    assert not layer(x.view(2, 3, -1))._is_view(), "one that is written into loses FSDP's hook"
    torch.testing.assert_close(layer(x.T.contiguous().T), y, rtol=1e-12, atol=1e-13)
    one = build_layer(replace(case, tokens=1))
    assert torch.equal(one(x[0]), one(x[:1])[0])
    assert one(x[0]).shape == (case.width,)
    assert layer(x[:0]).shape == (0, case.width)


# ---- gates that keep something between steps


def routing(layer: MoELayer, x: Tensor, ids: Tensor | None = None) -> Tensor:
    """What the routing does to the output: the same outputs, up to rounding, mean the same routing."""
    with torch.no_grad():
        return layer(x, token_ids=ids)


def random_on_rank(case: Case) -> Tensor:
    x = reference.make_tokens(replace(case, ranks=4, tokens=6))[0].flatten(0, 1)
    ranks = dist.get_world_size()
    return routing(build_layer(case), x.chunk(ranks)[dist.get_rank()])


def test_random_gate_draws_anew_each_step_whatever_the_cut(pool):
    case = Case("random", ranks=1, capacity_factor=None, step=3)
    x = reference.make_tokens(replace(case, ranks=4, tokens=6))[0].flatten(0, 1)
    layer = build_layer(case)
    third = routing(layer, x)
    assert torch.equal(routing(layer, x), third), "a step is not reproducible"
    set_routing_step(layer, 4)
    moved = ~torch.isclose(routing(layer, x), third).all(-1)
    assert moved.sum() > 4, "another step, the same routing"
    for ranks in (2, 4):
        cut = torch.cat(pool.run(random_on_rank, replace(case, ranks=ranks), ranks=ranks))
        torch.testing.assert_close(cut, third, rtol=1e-12, atol=1e-13)


def test_ids_of_the_hash_gate_are_positions_by_default_and_of_any_integers():
    case = Case("hash", ranks=1, experts=4, capacity_factor=None)
    layer, (x, _, _) = build_layer(case), reference.make_tokens(case)
    same = x[0, :1].repeat(case.tokens, 1)
    positions = torch.arange(case.tokens)
    y = routing(layer, same)
    assert torch.equal(routing(layer, same, positions), y)
    assert torch.equal(routing(layer, same, positions.to(torch.int32)), y)
    assert not torch.allclose(routing(layer, same, positions + 1), y)


@pytest.mark.parametrize("to_16_bits", [nn.Module.bfloat16, nn.Module.half, lambda m: m.to(torch.bfloat16)])
def test_the_correction_bias_keeps_small_updates_in_a_model_of_16_bits(to_16_bits):
    layer = MoELayer(8, 8, 4, gate="sigmoid", top_k=2)
    layer.update_correction_bias(torch.tensor([8, 0, 0, 0]), rate=1.0)
    to_16_bits(layer)
    for _ in range(8):
        layer.update_correction_bias(torch.tensor([0, 8, 0, 0]), rate=1e-4)
    assert layer.w1.dtype.itemsize == 2
    assert layer.correction_bias.dtype == torch.float32
    assert layer.correction_bias[0].item() == pytest.approx(-1 + 8e-4, abs=1e-6)
    saved = {name: t.to(torch.bfloat16) for name, t in layer.state_dict().items()}
    for assign in (False, True):
        layer.load_state_dict(saved, assign=assign)
        assert layer.correction_bias.dtype == torch.float32
    assert layer.to("meta").correction_bias.is_meta


@pytest.mark.parametrize(("gate", "buffer"), [("sigmoid", "correction_bias"), ("random", "routing_step")])
def test_what_was_on_the_meta_device_is_reset_with_its_buffers(gate, buffer):
    """`to_empty` leaves in them what was in memory before."""
    layer = MoELayer(4, 8, 4, gate=gate, device="meta").to_empty(device="cpu")
    getattr(layer, buffer).fill_(77)
    layer.reset_parameters()
    assert not getattr(layer, buffer).any()


def test_update_correction_bias():
    layer = MoELayer(4, 4, 4, gate="sigmoid", top_k=2)
    layer.update_correction_bias(torch.tensor([10, 6, 0, 8]), rate=0.25)  # mean 6
    assert layer.correction_bias.tolist() == [-0.25, 0.0, 0.25, -0.25]
    layer.update_correction_bias(torch.tensor([0, 0, 8, 0]), rate=0.5)
    assert layer.correction_bias.tolist() == [0.25, 0.5, -0.25, 0.25]
    assert "correction_bias" in layer.state_dict()
    with pytest.raises(UserError, match="only that gate has a correction bias"):
        MoELayer(4, 4, 4).update_correction_bias(torch.zeros(4), 0.1)


def test_correction_bias_steers_selection_not_weights():
    case = Case("sigmoid", ranks=1, top_k=1, capacity_factor=None)
    layer, x = build_layer(case), reference.make_tokens(case)[0][0]
    layer.correction_bias += torch.tensor([0.0, 0.0, 9.0, 0.0])
    y, sums = layer(x, return_sums=True)
    assert sums.assigned_E.tolist() == [0, 0, case.tokens, 0]
    p = reference.make_parameters(case)
    only = reference.feed_forward(x, p["experts.2.w1"], p["experts.2.w2"], None, None, "gelu")
    torch.testing.assert_close(y, only, rtol=1e-9, atol=1e-11)  # renormalized over one: weight 1


# ---- compiled


@pytest.fixture
def fresh_compiler():
    """No graph of one test counts against the limit of another."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("gate", few_of(GATE_CASES, 1))
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_layer_equals_eager(gate):
    shared = 8 if gate == "topk" else None
    case = replace(GATE_CASES[gate], ranks=1, experts=4, shared=shared, bias=gate == "topk", skewed=True)
    check_compiled(case, "aot_eager")


@pytest.mark.long
@pytest.mark.usefixtures("fresh_compiler")
def test_layer_compiled_by_inductor_equals_eager():
    check_compiled(Case("topk", top_k=2, ranks=1, shared=8, activation="swiglu"), "inductor")


def check_compiled(case: Case, backend: str) -> None:
    x, dy, ids = (t[0] for t in reference.make_tokens(case))
    eager, layer = build_layer(case), build_layer(case)
    wanted = run_layer(eager, x, dy, ids) | gradients(eager)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    got = run_layer(compiled, x, dy, ids) | gradients(layer)
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.long
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_layer_takes_another_number_of_tokens():
    case = Case("topk", top_k=2, ranks=1)
    layer, x = build_layer(case), reference.make_tokens(replace(case, tokens=40))[0][0]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for tokens in (40, 17, 33):
        torch.testing.assert_close(compiled(x[:tokens]), layer(x[:tokens]), rtol=1e-10, atol=1e-12)


def compiled_on_rank(case: Case) -> bool:
    x, dy, ids = (t[dist.get_rank()] for t in reference.make_tokens(case))
    eager, compiled = build_layer(case), build_layer(case)
    wanted = run_layer(eager, x, dy, ids) | gradients(eager)
    torch._dynamo.reset()
    whole = torch.compile(step_with_losses, backend="aot_eager", fullgraph=True)
    x = x.clone().requires_grad_()
    y, balance = whole(compiled, x, ids)
    y.backward(dy)
    got = {"y": y.detach(), "balance": balance, "dx": x.grad} | gradients(compiled)
    return all(torch.allclose(got[name], wanted[name], rtol=1e-10, atol=1e-12) for name in got)


def step_with_losses(layer: MoELayer, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    y, sums = layer(x, token_ids=ids, return_sums=True)
    return y, moe_losses([sums]).balance.detach()


@pytest.mark.long
def test_compiled_layer_equals_eager_on_two_ranks(pool):
    assert pool.run(compiled_on_rank, Case("topk", top_k=2), ranks=2) == [True, True]


# ---- other dtypes


def reference_in(case: Case, rounded: torch.dtype, dtype: torch.dtype) -> dict[str, Tensor]:
    """y and all gradients of the reference, computed in `dtype` from parameters and tokens in `rounded`."""
    parameters = reference.make_parameters(case, rounded)
    parameters = {name: p.to(dtype).requires_grad_() for name, p in parameters.items()}
    x, dy, ids = reference.make_tokens(case, rounded)
    x = x.to(dtype).requires_grad_()
    y = reference.forward(case, parameters, x, ids)["y"]
    y.backward(dy.to(dtype))
    return {"y": y.detach(), "dx": x.grad} | {f"grad.{name}": p.grad for name, p in parameters.items()}


@pytest.mark.parametrize("width", [6, 16], ids=["mm", "grouped_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_layer_in_lower_precision(dtype, width):
    """Not worse than the reference in the same dtype, whose router rounds too (ours does not)."""
    case = Case("hash", top_k=2, ranks=1, width=width, hidden=2 * width, capacity_factor=None, bias=True)
    exact, same_dtype = (reference_in(case, dtype, other) for other in (torch.float64, dtype))
    x, dy, ids = (t[0] for t in reference.make_tokens(case, dtype))
    layer = build_layer(case, dtype)
    got = run_layer(layer, x, dy, ids) | gradients(layer)
    for name, wanted in exact.items():
        assert got[name].dtype == dtype
        distance, allowed = (
            (of[name].view(wanted.shape).double() - wanted).norm().item() for of in (got, same_dtype)
        )
        assert distance <= 2 * allowed + 1e-3 * torch.finfo(dtype).eps, name


def test_router_of_a_bf16_layer_runs_in_fp32():
    case = Case("topk", top_k=2, ranks=1, experts=16, capacity_factor=None)
    layer = build_layer(case, torch.bfloat16)
    x = reference.make_tokens(case, torch.bfloat16)[0][0]
    _, sums = layer(x, return_sums=True)
    assert sums.probability_E.dtype == torch.float32
    logits = x.float() @ layer.router.float().T
    expected = torch.softmax(logits, -1).sum(0)
    torch.testing.assert_close(sums.probability_E, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shared", [None, 16])
def test_autocast_on_cpu(shared):
    case = Case("topk", top_k=2, ranks=1, width=16, hidden=32, bias=True, shared=shared)
    layer, x = build_layer(case, torch.float32), reference.make_tokens(case, torch.float32)[0][0]
    exact, exact_sums = layer(x, return_sums=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, sums = layer(x, return_sums=True)
    assert y.dtype == torch.bfloat16
    assert torch.equal(sums.probability_E, exact_sums.probability_E), "autocast reached the router"
    assert torch.equal(sums.assigned_E, exact_sums.assigned_E)
    relative = (y.float() - exact).norm() / exact.norm()
    assert 1e-4 < relative < 2e-2, "not bf16, or wrong"
    y.float().sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()


def test_gradients_of_gradients_are_refused():
    """A penalty on gradients would lack what comes through the experts, without a word."""
    x = torch.randn(3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(MoELayer(4, 8, 4)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        gradient.square().sum().backward()


# ---- copies


@pytest.mark.parametrize("how", ["deepcopy", "to_empty"])
def test_experts_of_a_copy_are_known_as_experts(how):
    """A copy whose experts were taken for replicated ones would train wrongly without a word."""
    if how == "deepcopy":
        layer = copy.deepcopy(MoELayer(4, 8, 4, bias=True))
    else:
        layer = MoELayer(4, 8, 4, bias=True, device="meta").to_empty(device="cpu")
    names = {name for name, p in layer.named_parameters() if any(p is q for q in expert_parameters(layer))}
    assert names == {"w1", "w2", "b1", "b2"}
