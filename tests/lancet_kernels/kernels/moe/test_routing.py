"""Routing kernels against the gates of `lancet_kernels.ops`, bit for bit."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lancet_kernels import ops
from lancet_kernels.errors import UserError
from lancet_kernels.kernels.moe import routing, topk
from lancet_kernels.kernels.moe import slots as slots_kernel
from lancet_kernels.kernels.moe.routing import Routed, RoutingConfig
from lancet_kernels.ops.moe.gates import GATES, Sigmoid, parse_gate
from lancet_kernels.ops.moe.gates.group_limit import mask_other_groups
from lancet_kernels.ops.moe.gates.slots import slots_in_token_order, top_k_stable
from lancet_kernels.ops.moe.gates.weights import sigmoid
from tests.grids import few_of
from tests.guarded_memory import guarded_memory

# (T, E, K): none, one, odd, a block and one more, one expert, all experts, many experts
SIZES = [(0, 3, 2), (1, 1, 1), (7, 5, 3), (65, 64, 8), (65, 6, 1), (33, 6, 6), (19, 512, 8)]
SPECS = ["switch", "topk", "sigmoid", "hash(seed=5)", "random(seed=-3)"]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_logits(kind: str, tokens: int, experts: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """normal; ties: three values; skewed: some experts overflow, some stay empty; one: all tokens alike."""
    normal_TE = torch.randn(tokens, experts, dtype=dtype, generator=generator(tokens + experts))
    if kind == "ties":
        return torch.randint(-1, 2, (tokens, experts), generator=generator(3)).to(dtype)
    if kind == "skewed":
        return normal_TE + 4 * torch.arange(experts).remainder(5).to(dtype)
    return normal_TE[:1].repeat(tokens, 1) if kind == "one" else normal_TE


def route(
    spec: str, given_T: Tensor, bias_E: Tensor | None, used_E: Tensor, top_k: int, capacity: int
) -> Routed:
    """Call the kernels as the gate `spec` would, with the logits or keys of T tokens."""
    gate = parse_gate(spec)
    with guarded_memory():
        if gate.key is not None:
            return routing.route_keys(given_T, used_E, top_k, capacity, seed=gate.seed)
        if not isinstance(gate, Sigmoid):
            return routing.route_scores(given_T, used_E, top_k, capacity)
        score_TE = sigmoid(given_T) if bias_E is None else sigmoid(given_T) + bias_E
        groups = {"groups": gate.groups, "top_groups": gate.top_groups}
        return routing.route_scores(score_TE, used_E, top_k, capacity, **groups)


def reference(spec: str, given_T: Tensor, bias_E: Tensor | None, used_E: Tensor, top_k: int, capacity: int):
    """The same by the op. -> expert_TK, slot_TK, weight_TK, used'_E."""
    keyed = parse_gate(spec).key is not None
    logits_TE, key_T = (None, given_T) if keyed else (given_T, None)
    return ops.gate(logits_TE, used_E, key_T, bias_E, spec, top_k, capacity)


def given_for(spec: str, kind: str, tokens: int, experts: int) -> tuple[Tensor, Tensor | None]:
    """Logits [T, E] or keys [T], and the selection bias."""
    gate = parse_gate(spec)
    if gate.key is not None:
        wide = torch.randint(-(2**63), 2**63 - 1, (tokens,), generator=generator(1))
        return (wide % 3 if kind == "one" else wide), None
    bias_E = torch.randn(experts, generator=generator(2)) if gate.uses_correction_bias else None
    return make_logits(kind, tokens, experts), bias_E


def assert_routed(routed: Routed, expected: tuple[Tensor, ...], capacity: int) -> None:
    expert_TK, slot_TK, used_E = expected
    for name, got, wanted in zip(("expert", "slot", "used"), routed[:3], expected, strict=True):
        assert got.dtype == torch.int64
        assert torch.equal(got, wanted), name
    assert torch.equal(routed.kept_E, torch.bincount(expert_TK[slot_TK < capacity], minlength=len(used_E)))


def test_every_partitionable_gate_is_tested() -> None:
    assert {parse_gate(spec).name for spec in SPECS} == {n for n, g in GATES.items() if g.partitionable}


@pytest.mark.parametrize("kind", few_of(["normal", "ties", "skewed", "one"], 1))
@pytest.mark.parametrize("spec", SPECS)
def test_every_gate_against_the_op(spec: str, kind: str, device: torch.device) -> None:
    for tokens, experts, top_k in SIZES:
        top_k = 1 if spec == "switch" else top_k
        given_T, bias_E = given_for(spec, kind, tokens, experts)
        used_E = torch.randint(0, 5, (experts,), generator=generator(4))
        capacity = 3 + tokens * top_k // experts
        expert_TK, slot_TK, weight_TK, used_out_E = reference(spec, given_T, bias_E, used_E, top_k, capacity)
        inputs = [None if x is None else x.to(device) for x in (given_T, bias_E, used_E)]
        routed = Routed(*(x.cpu() for x in route(spec, *inputs, top_k, capacity)))
        assert_routed(routed, (expert_TK, slot_TK, used_out_E), capacity)
        # The weights are the gate's own function of the experts, so the same experts give the same bits.
        gate, logits_TE = parse_gate(spec), given_T if parse_gate(spec).uses_logits else None
        weights = gate.weights(logits_TE, routed.expert_TK, torch.float32)
        assert torch.equal(weights, weight_TK)


@pytest.mark.parametrize("dtype", few_of([torch.float32, torch.float64]))
@pytest.mark.parametrize(
    ("groups", "top_groups", "experts", "top_k"),
    few_of(
        [
            (4, 2, 16, 3),
            (3, 1, 15, 5),
            (8, 3, 8, 3),
            (2, 2, 6, 4),
            (1, 1, 7, 2),
            (8, 4, 64, 8),
            (5, 4, 10, 7),
        ],
        0,
        1,
        3,
    ),
)
def test_group_limited_selection(
    groups: int, top_groups: int, experts: int, top_k: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Powers of two and not, groups of one expert, all groups open, K as many as are open."""
    gate = Sigmoid(groups=groups, top_groups=top_groups)
    for kind in ("normal", "ties"):
        logits_TE = make_logits(kind, 37, experts, dtype)
        bias_E = torch.randint(-1, 2, (experts,), generator=generator(9)).to(dtype) / 4
        score_TE = sigmoid(logits_TE) + bias_E
        expected = gate.select(logits_TE, None, bias_E, experts, top_k)
        with guarded_memory():
            expert_TK, _ = topk.choose_by_score(
                score_TE.to(device), top_k, groups=groups, top_groups=top_groups
            )
        assert torch.equal(expert_TK.cpu(), expected)


@pytest.mark.parametrize("dtype", few_of([torch.float32, torch.float64]))
@pytest.mark.parametrize("top_k", few_of([1, 2, 5, 9], 1))
def test_not_finite_scores_order_as_in_torch(top_k: int, dtype: torch.dtype, device: torch.device) -> None:
    """NaN of either sign is largest, -0 equals 0, subnormals count, and the lower index wins a tie."""
    tiny = torch.finfo(dtype).smallest_normal / 4
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, tiny, -tiny, 1.0, -1.0], dtype=dtype)
    rows = [
        values,
        values.flip(0),
        torch.full((9,), -torch.inf, dtype=dtype),
        -values,
        values[[3, 4] * 4 + [3]],
    ]
    rows += [values[torch.randint(0, 9, (9,), generator=generator(n))] for n in range(40)]
    score_TE = torch.stack(rows)
    with guarded_memory():
        expert_TK, _ = topk.choose_by_score(score_TE.to(device), top_k)
    assert torch.equal(expert_TK.cpu(), top_k_stable(score_TE, top_k))


@pytest.mark.filterwarnings("ignore:invalid value encountered in add")  # inf - inf, by intent
def test_not_finite_scores_in_groups(device: torch.device) -> None:
    """A NaN makes its group the best; inf - inf is NaN; of -inf alone the lowest index of all wins."""
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, -torch.inf, 0.0, 1.0, -1.0])
    score_TE = values[torch.randint(0, 7, (60, 12), generator=generator(0))]
    expected = top_k_stable(mask_other_groups(score_TE, 4, 2, best=2), 4)
    with guarded_memory():
        expert_TK, _ = topk.choose_by_score(score_TE.to(device), 4, groups=4, top_groups=2)
    assert torch.equal(expert_TK.cpu(), expected)


@pytest.mark.parametrize("seed", few_of([0, 1, -1, 2**31, 2**63, -(2**63) - 5], 1, 2, 5))
def test_any_seed(seed: int, device: torch.device) -> None:
    key_T = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 12345])
    gate = parse_gate(f"hash(seed={seed})")
    expected = gate.select(None, key_T, None, 11, 4)
    with guarded_memory():
        expert_TK, count_BE = topk.choose_by_key(key_T.to(device), 11, 4, seed=seed)
    assert torch.equal(expert_TK.cpu(), expected)
    assert torch.equal(count_BE.sum(0).cpu().long(), torch.bincount(expected.view(-1), minlength=11))


@pytest.mark.parametrize("spec", few_of(SPECS, 0, 1))
def test_parts_route_as_the_whole(spec: str, device: torch.device) -> None:
    """`used` handed on over parts that do not end where blocks end: the very slots of one call."""
    tokens, experts, capacity = 61, 7, 11
    top_k = 1 if spec == "switch" else 3
    given_T, bias_E = given_for(spec, "normal", tokens, experts)
    given_T, bias_E = given_T.to(device), None if bias_E is None else bias_E.to(device)
    start_E = torch.tensor([0, 3, 0, 40, 1, 0, 2], device=device)
    whole = route(spec, given_T, bias_E, start_E, top_k, capacity)
    assert (whole.slot_TK >= capacity).any(), "the example must drop something"
    used_E, parts = start_E, []
    for start, stop in pairwise([0, 1, 1, 2, 20, 36, 61]):
        parts.append(route(spec, given_T[start:stop], bias_E, used_E, top_k, capacity))
        used_E = parts[-1].used_E
    assert torch.equal(torch.cat([part.expert_TK for part in parts]), whole.expert_TK)
    assert torch.equal(torch.cat([part.slot_TK for part in parts]), whole.slot_TK)
    assert torch.equal(used_E, whole.used_E)
    assert torch.equal(sum(part.kept_E for part in parts), whole.kept_E)


@pytest.mark.parametrize("capacity", few_of([0, 1, 4, 1000], 2))
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(0, 4, 2), (300, 4, 2), (9, 70, 3), (5, 3, 130)])
def test_slots_of_given_choices(
    tokens: int, experts: int, top_k: int, capacity: int, device: torch.device
) -> None:
    """Choices of a token need not differ; empty experts; `used` beyond 32 bits; more experts than a tile."""
    expert_TK = torch.randint(0, max(1, experts - 1), (tokens, top_k), generator=generator(5))
    for experts_TK in (expert_TK, torch.full_like(expert_TK, experts - 1)):
        for most in (3, 2**40):
            used_E = torch.randint(0, most, (experts,), generator=generator(6))
            expected = slots_in_token_order(experts_TK, used_E)
            with guarded_memory():
                routed = routing.route_choices(experts_TK.to(device), used_E.to(device), capacity)
            assert_routed(Routed(*(x.cpu() for x in routed)), (experts_TK, *expected), capacity)


def test_more_blocks_than_the_prefix_takes_at_a_time(device: torch.device) -> None:
    tokens = 2 * slots_kernel.PREFIX_BLOCKS + 3
    score_TE = make_logits("normal", tokens, 10)
    expected = top_k_stable(score_TE, 2)
    used_E = torch.arange(10)
    with guarded_memory():
        _, count_BE = topk.choose_by_score(score_TE[:20].to(device), 2, config=RoutingConfig(1))
        assert count_BE.shape == (20, 10)
        assert torch.equal(count_BE.cpu().long(), torch.zeros(20, 10).long().scatter_(1, expected[:20], 1))
    count_BE = torch.zeros(tokens, 10, dtype=torch.int32).scatter_(1, expected, 1)
    before_BE = (count_BE.cumsum(0) - count_BE).int()
    total_E = used_E + count_BE.sum(0)
    count_BE = count_BE.to(device)
    with guarded_memory():
        used_out_E, kept_E = slots_kernel.prefix(count_BE, used_E.to(device), 50)
    assert torch.equal(count_BE.cpu(), before_BE)
    assert torch.equal(used_out_E.cpu(), total_E)
    assert torch.equal(kept_E.cpu(), total_E.clamp(max=50) - used_E)


@pytest.mark.parametrize(
    ("experts", "top_k"),
    [(12, 3), *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in ((8, 2), (40, 3)))],
)
def test_every_configuration_gives_the_same_bits(experts: int, top_k: int, device: torch.device) -> None:
    score_TE, used_E = make_logits("ties", 37, experts).to(device), torch.zeros(experts, dtype=torch.int64)
    tried = [RoutingConfig(block) for block in (1, 4, 16, 64)]
    assert all(config.is_valid(experts, top_k) for config in tried)
    results = [routing.route_scores(score_TE, used_E.to(device), top_k, 1000, config=c)[:3] for c in tried]
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_default_configurations_are_valid() -> None:
    for experts in (1, 8, 60, 64, 512, topk.MAX_EXPERTS):
        for top_k in {1, 2, min(8, experts), experts}:
            assert RoutingConfig.default(experts, top_k).is_valid(experts, top_k)
    assert not RoutingConfig(3).is_valid(8, 2)
    assert not RoutingConfig(1024).is_valid(512, 2)


def test_by_hand(device: torch.device) -> None:
    """C = 2; of expert 0 one slot was taken before: it keeps token 0, and drops tokens 2 and 3."""
    score_TE = torch.tensor([[5.0, 1, 0], [0, 5, 5], [5, 0, torch.nan], [5, 0, 1]], device=device)
    routed = routing.route_scores(score_TE, torch.tensor([1, 0, 0], device=device), 2, 2)
    assert routed.expert_TK.tolist() == [[0, 1], [1, 2], [2, 0], [0, 2]]
    assert routed.slot_TK.tolist() == [[1, 0], [1, 0], [1, 2], [3, 2]]
    assert routed.used_E.tolist() == [4, 2, 3]
    assert routed.kept_E.tolist() == [1, 2, 2]
    key_T = torch.tensor([7], device=device)
    expert_TK, count_BE = topk.choose_by_key(key_T, 4, 2)
    assert (expert_TK.tolist(), count_BE.tolist()) == ([[1, 3]], [[0, 1, 0, 1]])


def test_user_errors_name_what_is_wrong() -> None:
    score_TE, used_E = torch.zeros(4, 6), torch.zeros(6, dtype=torch.int64)
    expert_TK = torch.zeros(4, 2, dtype=torch.int64)
    wrong = [
        ("dtype of score_TE", lambda: routing.route_scores(score_TE.half(), used_E, 2, 3)),
        ("shape of score_TE", lambda: routing.route_scores(score_TE[0], used_E, 2, 3)),
        ("layout of score_TE", lambda: routing.route_scores(torch.zeros(4, 12)[:, ::2], used_E, 2, 3)),
        ("shape of used_E", lambda: routing.route_scores(score_TE, used_E[:5], 2, 3)),
        ("dtype of used_E", lambda: routing.route_scores(score_TE, used_E.int(), 2, 3)),
        ("top_k", lambda: routing.route_scores(score_TE, used_E, 7, 3)),
        ("capacity", lambda: routing.route_scores(score_TE, used_E, 2, -1)),
        ("groups", lambda: routing.route_scores(score_TE, used_E, 2, 3, groups=4)),
        ("top_groups", lambda: routing.route_scores(score_TE, used_E, 3, 3, groups=3, top_groups=1)),
        ("routing config", lambda: routing.route_scores(score_TE, used_E, 2, 3, config=RoutingConfig(5))),
        ("dtype of key_T", lambda: routing.route_keys(score_TE[0], used_E, 2, 3)),
        ("layout of expert_TK", lambda: routing.route_choices(expert_TK.T, used_E, 3)),
    ]
    for message, call in wrong:
        with pytest.raises(UserError, match=message):
            call()
