"""Gradients across ranks: buckets against plain all-reduces, clipping against one process.

Parameters that several ranks hold, compared now and then.
"""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lancet_kernels import Groups, MoELayer, UserError, fsdp
from lancet_kernels.layer import gradients
from lancet_kernels.layer.gradients import (
    Replicas,
    as_backward_finishes,
    broadcast_replicated,
    clip_gradients,
    digest,
    gradient_groups,
    set_gradient_group,
)
from lancet_kernels.layer.summed_gradients import SummedModule
from lancet_kernels.ops.comm.collectives import cut_into_buckets
from tests.grids import few_of
from tests.ops.op_cases import QUICK
from tests.optimized import optimized


class Odd(nn.Module):
    """A tied weight, a parameter that nobody uses, one used on some ranks only, a frozen one, experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.moe = MoELayer(4, 6, 4, capacity_factor=None)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.sometimes = nn.Parameter(torch.ones(4))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.low = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    def forward(self, token_BS: Tensor, sometimes: bool) -> Tensor:
        x = self.moe(self.embedding(token_BS)) * self.frozen * self.low.float()
        return self.head(x * self.sometimes if sometimes else x)


def backward_on(model: nn.Module, step: int, rank: int) -> None:
    token_BS = torch.randint(0, 7, (3, 5), generator=torch.Generator().manual_seed(10 * step + rank))
    y = model(token_BS, sometimes=rank % 2 == 0)
    (nn.functional.cross_entropy(y.flatten(0, 1), token_BS.flatten()) / dist.get_world_size()).backward()


def buckets_on_rank(bucket_bytes: int) -> list[str]:
    """What differs, over three steps, from one all-reduce per gradient."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    bucketed = Odd()
    torch.manual_seed(0)
    plain = Odd()
    summed = SummedModule(bucketed, Groups.around(), divide_by=1, bucket_bytes=bucket_bytes)
    wrong = []
    for step in range(3):
        backward_on(summed, step, rank)
        backward_on(plain, step, rank)
        experts = {id(p) for p in (plain.moe.w1, plain.moe.w2)}
        for (name, p), q in zip(plain.named_parameters(), bucketed.parameters(), strict=True):
            if p.requires_grad and id(p) not in experts and name != "unused":
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
            # Of other shapes they are not equal.
            if not (p.grad is q.grad is None or torch.equal(p.grad, q.grad)):
                wrong.append(f"{name} in step {step}")
        bucketed.zero_grad(set_to_none=step == 0)
        plain.zero_grad(set_to_none=step == 0)
    return wrong


@pytest.mark.parametrize("bucket_bytes", few_of([1, 100, 1 << 20], 1))
def test_buckets_equal_one_all_reduce_per_gradient(pool, bucket_bytes):
    """Bitwise: two numbers have one sum."""
    assert pool.run(buckets_on_rank, bucket_bytes, ranks=2) == [[], []]


class WithInput(nn.Linear):
    """Returns its input, too, as it is."""

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(input), input


def hooks_left_on_rank() -> int:
    summed, x = SummedModule(WithInput(8, 8), Groups.around(), divide_by=1), torch.ones(2, 8)
    x.requires_grad_()
    for _ in range(2):
        summed(x)[0].sum().backward()
    return len(x._backward_hooks or ())


class ReadsItsParameter(nn.Linear):
    def forward(self, x):
        return super().forward(x) * self.weight.factor


def reads_its_parameter() -> float:
    model = ReadsItsParameter(2, 1)
    model.weight.factor = 3.0
    summed, x = SummedModule(model, Groups.around(), divide_by=1), torch.ones(1, 2)
    return float(summed(x) / nn.Linear.forward(model, x))


def test_a_forward_reads_attributes_of_its_parameters(pool) -> None:
    assert pool.run(reads_its_parameter) == pytest.approx([3.0, 3.0])


def test_no_hook_stays_on_an_input_that_is_returned(pool) -> None:
    assert pool.run(hooks_left_on_rank) == [0, 0]


def overlap_on_rank() -> list[bool]:
    """Did the first sum start before the first layer's backward ran? Are all sums of the backward?"""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    summed = SummedModule(model, Groups.around(), divide_by=1, bucket_bytes=1)
    started, at_first = [], []
    real = dist.all_reduce
    dist.all_reduce = lambda *a, **k: started.append(1) or real(*a, **k)
    model[0].register_full_backward_pre_hook(lambda *_: at_first.append(len(started)))
    try:
        summed(torch.ones(2, 8, requires_grad=True)).sum().backward()
    finally:
        dist.all_reduce = real
    return [at_first[0] > 0, len(started) == 8]


def test_buckets_start_during_backward(pool):
    assert pool.run(overlap_on_rank) == [[True, True]] * 2


def cut(over: dict[nn.Parameter, str], bucket_bytes: int) -> list[tuple[str, list[int]]]:
    """Group and sizes of the parameters of each bucket."""
    buckets = cut_into_buckets(as_backward_finishes(over), bucket_bytes)
    return [(group, [p.numel() for p in bucket]) for group, bucket in buckets]


def test_cut_into_buckets():
    dtypes = {8: torch.bfloat16}
    parameters = [nn.Parameter(torch.zeros(n, dtype=dtypes.get(n))) for n in (4, 2, 8, 1, 5)]
    over = dict.fromkeys(parameters, "all")
    # One dtype per bucket; what is of another kind does not close it.
    assert cut(over, 24) == [("all", [5, 1]), ("all", [8]), ("all", [2, 4])]
    assert cut(over, 32) == [("all", [5, 1, 2]), ("all", [8]), ("all", [4])]
    assert cut(over, 1) == [("all", [n]) for n in (5, 1, 8, 2, 4)]
    over[parameters[1]], over[parameters[3]] = "others", ""
    assert cut(over, 24) == [("all", [5, 4]), ("all", [8]), ("others", [2])]
    assert cut({}, 24) == []


def test_gradient_groups():
    """Every parameter has a group, marked ones their own, also in a copy of the model."""
    model = Odd()
    groups = Groups(expert="e", replica="r", data="d", world="w")
    over = gradient_groups(model, groups)
    assert len(over) == len(list(model.parameters()))
    names = {name: over[p] for name, p in model.named_parameters()}
    assert {name for name, group in names.items() if group == "r"} == {"moe.w1", "moe.w2"}
    assert set(names.values()) == {"r", "d"}
    with pytest.raises(
        UserError, match="parameter of Embedding: got 'wight', expected one of weight; name a"
    ):
        set_gradient_group(model.embedding, None, ["wight"])
    set_gradient_group(model.embedding, None, ["weight"])
    for one in (model, copy.deepcopy(model)):
        assert gradient_groups(one, groups)[one.embedding.weight] == ""


# ---- clipping


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """A gradient for every name; experts' as of all of them together."""
    shapes = {n: p.shape for n, p in model.named_parameters() if p.requires_grad}
    for name in ("moe.w1", "moe.w2"):
        shapes[name] = (4, *shapes[name][1:])
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def clip_on_rank(largest: float | None) -> tuple[float, dict[str, Tensor]]:
    model = Odd()
    for name, grad in whole_gradients(model).items():
        parameter = model.get_parameter(name)
        ids = model.moe.expert_ids()
        mine = grad[ids.start : ids.stop] if name.startswith("moe.w") else grad
        parameter.grad = mine.to(parameter.dtype, copy=True)
    norm = clip_gradients(model, largest, Groups.around())
    return norm.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("ranks", few_of([2, 4]))
@pytest.mark.parametrize("largest", few_of([None, 1.0, 1e6], 1))
def test_clipping_across_expert_shards_equals_one_process(pool, ranks, largest):
    whole = {name: nn.Parameter(torch.zeros_like(grad)) for name, grad in whole_gradients(Odd()).items()}
    for name, grad in whole_gradients(Odd()).items():
        whole[name].grad = grad.to(torch.bfloat16).float() if name == "low" else grad
    before = whole["moe.w1"].grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(whole.values(), float("inf") if largest is None else largest)
    results = pool.run(clip_on_rank, largest, ranks=ranks)
    assert (largest == 1.0) == (not torch.equal(whole["moe.w1"].grad, before))
    for rank, (got, of_rank) in enumerate(results):
        torch.testing.assert_close(got, norm.item(), rtol=1e-6, atol=0)
        for name, grad in of_rank.items():
            wanted = whole[name].grad
            wanted = wanted.chunk(ranks)[rank] if name.startswith("moe.w") else wanted
            tolerance = 1e-2 if name == "low" else 1e-5
            torch.testing.assert_close(grad.float(), wanted, rtol=tolerance, atol=0)
    assert all(one[0] == two[0] for one, two in pairwise(results)), "ranks scale differently"


def test_clipping_without_gradients_or_group():
    assert clip_gradients(Odd(), 1.0, Groups()).item() == 0
    model = nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.tensor([[-3.0]])
    assert clip_gradients(model, 1.5, Groups()).item() == 3
    assert abs(model.weight.grad.item() + 1.5) < 1e-5
    model = nn.Linear(1, 1, bias=False, dtype=torch.float16)
    model.weight.grad = torch.full((1, 1), 6e4, dtype=torch.float16)
    clip_gradients(model, 1e-3, Groups())  # by a number that float16 does not have
    assert abs(model.weight.grad.item() - 1e-3) < 1e-6
    with pytest.raises(UserError, match="give the model, not its parameters"):
        clip_gradients(model.parameters(), 1.5)


def broadcast_on_rank() -> dict[str, Tensor]:
    torch.manual_seed(dist.get_rank())
    model = Odd()
    model.register_buffer("count", torch.tensor([dist.get_rank() + 5]))
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    broadcast_replicated(model, Groups.around())
    return {"own": own, "now": {n: t.detach().clone() for n, t in model.state_dict().items()}}


def test_broadcast_makes_replicated_ones_equal(pool):
    first, second = pool.run(broadcast_on_rank)
    assert torch.equal(second["now"]["count"], torch.tensor([5]))
    for name in ("embedding.weight", "moe.router", "sometimes"):
        assert not torch.equal(first["own"][name], second["own"][name]) or name == "sometimes"
        assert torch.equal(second["now"][name], first["own"][name])
    assert torch.equal(second["now"]["moe.experts.2.w1"], second["own"]["moe.w1"][0]), (
        "experts were overwritten"
    )


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


@given(st.data())
@QUICK
def test_a_digest_changes_with_every_element(data) -> None:
    dtype, size = data.draw(st.sampled_from(DTYPES)), data.draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    tensor = torch.randn(size, generator=generator).to(dtype)
    other = tensor.clone()
    bits = other.view(torch.uint8)
    bits[data.draw(st.integers(0, len(bits) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(tensor) != digest(other)
    assert digest(tensor) == digest(tensor.clone())


def test_a_digest_sees_what_cancels_in_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """One element that grew by the last bit, one that shrank by it; and of any layout, in pieces or not."""
    tensor = torch.linspace(1.0, 2.0, 12)
    other = tensor.clone()
    other.view(torch.int32)[:2] += torch.tensor([1, -1], dtype=torch.int32)
    assert digest(tensor) != digest(other)
    turned = tensor.view(3, 4).T.contiguous().T
    monkeypatch.setitem(gradients._PIECE, "cpu", 5)
    assert digest(turned) == digest(tensor)
    assert digest(torch.empty(0)) == 0


class Step(nn.Module):
    def __init__(self, groups: Groups | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.input = nn.Linear(4, 4)
        self.layer = MoELayer(4, 6, 4, top_k=2, gate="topk", capacity_factor=None, groups=groups)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        with torch.no_grad():
            self.layer.w1 *= 50
            self.layer.w2 *= 50

    def forward(self, x):
        return self.layer(self.input(x) * self.frozen.sum()).square().sum() / dist.get_world_size()


def drift_on_rank(name: str, every: int) -> list[str]:
    """What four ranks, of which two share experts, say of a parameter that one of them changes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "expert"))
    model = Step(Groups.from_mesh(mesh, expert="expert", replica="replica"))
    if name == "input.weight":
        fsdp(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    step = optimized(model, (torch.randn(2, 4),), "none", compare_every=every)
    said = []
    for number in range(7):
        try:
            step(torch.randn(2, 4)).backward()
        except UserError as error:
            return [*said, str(error)]
        said.append("")
        if number == 1 and dist.get_rank() == 3:
            parameter = model.get_parameter(name).data
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            own.view(-1)[-1] *= 1.0001
    return said


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "every"),
    few_of([("layer.w1", 2), ("input.bias", 1), ("frozen", 3), ("layer.w1", 0), ("input.weight", 1)]),
)
def test_a_parameter_that_differs_is_named_on_all_ranks(pool, name: str, every: int) -> None:
    """In the call behind the comparison, which is the one behind the change or a later one. `input.weight` is
    sharded over two ranks, and two have the same shard."""
    by_rank = pool.run(drift_on_rank, name, every, ranks=4)
    assert all(said == by_rank[0] for said in by_rank)
    calls = {0: None, 1: 3, 2: 4, 3: 3}[every]
    assert by_rank[0][:calls] == [""] * (calls or 7)
    if every:
        (message,) = by_rank[0][calls:]
        assert message.startswith(f"parameter {name} after {calls} calls of the optimized module: ")
        assert "another value on rank(s) 3, expected" in message
        assert "\n" not in message


@pytest.mark.parametrize("every", [-1, 1.5, True])
def test_a_number_of_calls_that_is_none(every: object) -> None:
    with pytest.raises(UserError, match=r"compare_every: got .*, expected a number of calls, 0 or more"):
        optimized(nn.Linear(2, 2), (torch.zeros(1, 2),), "none", compare_every=every)


def test_one_rank_has_nothing_to_compare() -> None:
    watch = Replicas(Step(), Groups(), 1)
    for _ in range(3):
        watch.call()
