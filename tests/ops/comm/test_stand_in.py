"""One process that stands for several ranks: what its collectives, a layer and a plan give."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lancet_kernels import MoELayer, optimize
from lancet_kernels.errors import UserError
from lancet_kernels.layer.data_parallel import fsdp
from lancet_kernels.ops.comm.groups import Groups, group_of, group_size
from lancet_kernels.ops.comm.link import emulate_link, link
from lancet_kernels.ops.comm.stand_in import standing_for
from tests.grids import few_of

RANKS, WIDTH, EXPERTS = 4, 16, 8


@pytest.fixture(autouse=True)
def no_job() -> Iterator[None]:
    yield
    emulate_link(None)
    link.read()
    if dist.is_initialized():
        dist.destroy_process_group()


def all_reduced(x: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, operation)
    return x


def into(size: int, call: Callable[[Tensor], object]) -> Tensor:
    result = torch.empty(size)
    call(result)
    return result


def test_collectives_hand_a_rank_its_own_values() -> None:
    standing_for(2)
    x = torch.tensor([1.0, 2.0])
    assert all_reduced(x, dist.ReduceOp.SUM).tolist() == [2.0, 4.0]
    for operation in (dist.ReduceOp.AVG, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        assert all_reduced(x, operation).tolist() == [1.0, 2.0]
    assert into(4, lambda r: dist.all_gather_into_tensor(r, x)).tolist() == [1.0, 2.0, 1.0, 2.0]
    assert into(1, lambda r: dist.reduce_scatter_tensor(r, x)).tolist() == [2.0]
    assert into(2, lambda r: dist.all_to_all_single(r, x)).tolist() == [1.0, 2.0]
    rows = torch.tensor([1.0, 2.0, 3.0])
    assert into(3, lambda r: dist.all_to_all_single(r, rows, [1, 2], [1, 2])).tolist() == [1.0, 2.0, 3.0]
    objects: list[object] = [None, None]
    dist.all_gather_object(objects, {"rank": 0})
    assert objects == [{"rank": 0}] * 2
    shards = [torch.empty(2), torch.empty(2)]
    dist.all_gather(shards, x)
    assert [shard.tolist() for shard in shards] == [[1.0, 2.0]] * 2
    dist.broadcast(x, 0)
    dist.barrier()
    assert x.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: dist.send(x, 1), "a message to one rank"),
        (lambda x: dist.all_reduce(x, dist.ReduceOp.PRODUCT), "collective of a stand-in rank"),
        (
            lambda x: dist.all_to_all_single(x, x, [2, 0], [1, 1]),
            r"rows \[1, 1\] to send, \[2, 0\] to receive",
        ),
        (lambda x: standing_for(3), "lancet_stand_in, 2 ranks"),
        (lambda x: standing_for(8, expert_ranks=3), "8, of which 3 share experts"),
        (lambda x: standing_for(1), "1, of which 1 share experts, expected two or more"),
    ],
)
def test_what_alike_ranks_cannot_do_is_refused(call: Callable[[Tensor], object], message: str) -> None:
    standing_for(2)
    with pytest.raises(UserError, match=message):
        call(torch.ones(2))


def test_expert_groups_of_fewer_ranks() -> None:
    groups = standing_for(8, expert_ranks=4)
    sizes = {name: group_size(getattr(groups, name)) for name in ("expert", "replica", "data", "world")}
    assert sizes == {"expert": 4, "replica": 2, "data": 8, "world": 8}
    assert dist.get_process_group_ranks(group_of(groups.replica)) == [0, 4]


class Step(nn.Module):
    """Two MoE layers between projections, and the loss."""

    def __init__(self, groups: Groups, gate: str, capacity_factor: float | None, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)

        def layer() -> MoELayer:
            return MoELayer(
                WIDTH,
                2 * WIDTH,
                EXPERTS,
                top_k=2,
                gate=gate,
                capacity_factor=capacity_factor,
                groups=groups,
            )

        dense = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        self.layers = nn.Sequential(dense[0], layer(), dense[1], layer()).to(dtype)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (x + self.layers(x) - target).square().mean()


class Case:
    """A step of a rank that stands for RANKS, and the same model on one rank without a wire: each of its
    experts as often as ranks are stood for. In float64."""

    def __init__(self, gate: str = "topk", capacity_factor: float | None = None) -> None:
        groups = standing_for(RANKS, link_gbps=0.01)
        self.step, self.whole = (
            Step(groups, gate, capacity_factor, torch.float64) for groups in (groups, Groups())
        )
        with torch.no_grad():
            for name, parameter in self.whole.named_parameters():
                own = self.step.get_parameter(name)
                parameter.copy_(own.repeat(parameter.shape[0] // own.shape[0], *[1] * (own.dim() - 1)))
        self.inputs = tuple(torch.randn(4, 32, WIDTH, dtype=torch.float64) for _ in range(2))

    def is_of_experts(self, name: str) -> bool:
        return self.step.get_parameter(name).shape[0] == EXPERTS // RANKS

    def check(self, module: nn.Module, summed_over: int) -> None:
        """Compare a step of `module`, which has the parameters of `step`. Args: summed_over: the ranks by
        whose number the gradients of experts are divided."""
        loss, right = module(*self.inputs), self.whole(*self.inputs)
        loss.backward()
        right.backward()
        torch.testing.assert_close(loss, right)
        for name, parameter in self.whole.named_parameters():
            assert parameter.grad is not None
            gradient = parameter.grad
            if self.is_of_experts(name):
                gradient = gradient.unflatten(0, (RANKS, -1)).sum(0) / summed_over
            torch.testing.assert_close(self.step.get_parameter(name).grad, gradient, msg=name)


@pytest.mark.parametrize(("gate", "capacity_factor"), [("topk", None), ("topk", 0.75), ("gshard", 1.25)])
def test_a_layer_computes_what_it_does_on_one_rank(gate: str, capacity_factor: float | None) -> None:
    case = Case(gate, capacity_factor)
    case.check(case.step, summed_over=1)


@pytest.mark.parametrize("strategy", few_of(["lancet", "none", "duplex"]))
def test_a_plan_computes_what_the_model_does_on_one_rank(strategy: str, tmp_path) -> None:
    case = Case()
    planned = optimize(case.step, case.inputs, strategy=strategy, times=tmp_path / "times.json", trials=0)
    assert planned.plan.report.setting["ranks"] == RANKS
    case.check(planned, summed_over=RANKS)


def test_sharded_parameters_are_gathered_from_this_rank() -> None:
    """FSDP2 without a plan: this rank's slice of a weight, W times; the gradient of its slice."""
    link.read()
    standing_for(RANKS, link_gbps=1.0)
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8, bias=False), torch.randn(3, 8)
    own = model.weight.detach()[:2].clone()
    fully_shard(model)
    y = model(x)
    torch.testing.assert_close(y, x @ own.repeat(RANKS, 1).T)
    y.square().sum().backward()
    assert isinstance(model.weight.grad, torch.distributed.tensor.DTensor)
    torch.testing.assert_close(model.weight.grad.to_local(), 2 * (x @ own.T).T @ x)
    # Both take the link: 3 of 4 slices of 64 bytes, once.
    assert link.read().bytes_on_wire == 2 * 3 * 64


def test_a_plan_of_a_sharded_model_gives_the_gradients_of_the_module(tmp_path) -> None:
    """FSDP's messages in the plan, and two microbatches whose gradients are averaged, and summed once."""
    case = Case()
    step = fsdp(case.step)
    for _ in range(2):
        step(*case.inputs).backward()
    right = {name: parameter.grad for name, parameter in step.named_parameters()}
    step.zero_grad()
    times = tmp_path / "times.json"
    planned = optimize(step, case.inputs, strategy="lancet", times=times, trials=0, accumulate=2)
    planned.microbatches([case.inputs] * 2)
    assert planned.plan.report.predicted.exposed_ms > 0
    for name, parameter in step.named_parameters():
        torch.testing.assert_close(parameter.grad, right[name] / 2, msg=name)


def test_fused_launches_need_ranks_of_their_own() -> None:
    layer = MoELayer(WIDTH, WIDTH, EXPERTS, groups=standing_for(RANKS), backend="fused")
    with pytest.raises(
        UserError, match=f"one rank that stands for {RANKS}, expected a process for each rank"
    ):
        layer(torch.randn(8, WIDTH))


def test_messages_take_the_time_of_the_wire() -> None:
    """A rank sends 3 of 4 parts of 1,600 bytes to others: 9,600 bits, 9.6 ms at 1 Mbit/s."""
    groups = standing_for(4, link_gbps=1e-3)
    rows = torch.zeros(4 * 4, 25)
    counts = torch.full((4, 1), 4)
    link.read()
    torch.ops.lancet.all_to_all(rows, counts, counts, groups.expert, True)
    traffic = link.read()
    assert traffic.bytes_on_wire == 3 * 4 * 25 * 4
    assert traffic.all_to_all_ms >= 9.6
