"""A captured SquareLinear as a Program: shifts are instructions of their own kind, priced point to point,
hidden by the GEMMs they stand beside; and its plan runs."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from lancet_kernels import SquareLinear, optimize
from lancet_kernels.graph.capture.capture import capture
from lancet_kernels.graph.costs.clusters import load_cluster, point_to_point_ms
from lancet_kernels.graph.costs.costs import CostModel
from lancet_kernels.graph.from_fx import program_from_fx
from lancet_kernels.graph.program import Kind, Phase, Program
from lancet_kernels.predict.own_step import fake_ranks
from lancet_kernels.schedules.time.simulate import simulate
from tests.ranks import RankPool
from tests.square_shifts import shifts_of

M, N, K = 4096, 2048, 4096


class Mlp(nn.Module):
    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.first, self.second = SquareLinear(n, k), SquareLinear(k, n)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(gelu(self.first(x)))


def program_of_square(ranks: int, bias: bool = False) -> tuple[Program, SquareLinear]:
    with fake_ranks(ranks):
        side, layer = round(ranks**0.5), SquareLinear(N, K, bias=bias)
        captured = capture(layer, (torch.randn(M // side, N // side, requires_grad=True),))
        return program_from_fx(captured.joint), layer


@pytest.mark.parametrize("ranks", [4, 16])
def test_every_derived_shift_is_an_instruction_of_its_own_kind(ranks: int) -> None:
    program, layer = program_of_square(ranks)
    shifts = [program.instructions[i] for i in program.positions(Kind.POINT_TO_POINT)]
    expected = Counter(sources for _, _, sources in shifts_of(layer))
    assert Counter(tuple(i.attributes["source_of"]) for i in shifts) == expected
    assert {i.op for i in shifts} == {"lancet.shift"}
    for shift in shifts:
        backward = "backward" in shift.attributes["what"] or "gradient" in shift.attributes["what"]
        assert shift.phase is (Phase.BACKWARD if backward else Phase.FORWARD)
    others = {i.kind for i in program.instructions} - {Kind.POINT_TO_POINT}
    assert others == {Kind.COMPUTE}, "a collective"


def test_the_gradient_of_a_bias_is_the_only_sum() -> None:
    program, _ = program_of_square(4, bias=True)
    (position,) = program.positions(Kind.ALL_REDUCE)
    assert program.instructions[position].phase is Phase.BACKWARD
    assert program.tensors[program.instructions[position].outputs[0]].shape == (K // 2,)


def test_shifts_are_priced_point_to_point_and_stand_beside_gemms() -> None:
    """Two operands' tiles travel while one GEMM runs: at most the first and last hand-over are exposed."""
    cluster = load_cluster("p3dn")
    cost = CostModel.for_cluster(cluster, 4)
    program, _ = program_of_square(4)
    timeline = simulate(program, cost)
    shifts = [program.instructions[i] for i in program.positions(Kind.POINT_TO_POINT)]
    times = {i.name: cost(i, program.tensors) for i in shifts}
    for shift in shifts:
        sent = sum(program.tensors[t].content_bytes for t in shift.outputs)
        assert shift.bytes == sent
        assert times[shift.name] == pytest.approx(point_to_point_ms(cluster, sent, leaving=0), rel=1e-6)
    hand_over = sum(times[i.name] for i in shifts if "step" not in i.attributes["what"])
    assert timeline.exposed_ms <= hand_over + 1e-9
    assert sum(times.values()) > 2 * hand_over


def test_neighbours_on_other_nodes_share_the_network_card() -> None:
    """p3dn, 16 ranks: all 8 of a node send over 10 GB/s; within a node a link has 104 GB/s."""
    cluster = load_cluster("p3dn")
    size = float(16 << 20)
    inside, across = (CostModel.for_cluster(cluster, gpus).communication for gpus in (4, 16))
    assert inside.milliseconds("point_to_point", size) == pytest.approx(0.020 + size / 104e9 * 1e3)
    assert across.milliseconds("point_to_point", size) == pytest.approx(0.045 + 8 * size / 10e9 * 1e3)


def planned_on_rank() -> tuple[float, tuple[str, ...]]:
    """An optimized block beside the same one as it is. -> largest difference, order of the plan."""
    model = Mlp(16, 32)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    x_plain, x_planned = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = model(x_plain)
    y.square().sum().backward()
    expected = [y, x_plain.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    # Each rank has a tile of the result, and so a share of the loss.
    planned = optimize(
        model,
        (x_planned.detach().requires_grad_(),),
        strategy="lancet-dw",
        cluster="local",
        reduce_gradients="sum",
    )
    y = planned(x_planned)
    y.square().sum().backward()
    actual = [y, x_planned.grad, *(p.grad for p in model.parameters())]
    difference = max((a - b).abs().max().item() for a, b in zip(actual, expected, strict=True))
    return difference, planned.plan.order


@pytest.mark.long
def test_an_optimized_block_computes_the_same(pool: RankPool) -> None:
    results = pool.run(planned_on_rank, ranks=4)
    for difference, order in results:
        assert difference < 1e-5
        assert order == results[0][1]
        assert any(name.startswith("shift") for name in order)
