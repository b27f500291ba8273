"""SquareLinear on real ranks: what nn.Linear computes, with 1 / 4^k of its weight on each rank, and no
collective but for the gradient of the bias."""

import copy
import io
import re
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import gelu

from lancet_kernels import CommunicationError, SquareLinear, UserError
from lancet_kernels.ops.comm.link import emulate_link, link
from lancet_kernels.predict.own_step import fake_ranks
from tests.grids import few_of
from tests.lancet_kernels.parallelization.test_parallelize import distance
from tests.ranks import RankPool
from tests.refusals import refusal
from tests.square_shifts import shifts_of

STEPS = 3
Call, Shape = Callable[[Tensor], Tensor], tuple[int, ...]


class Block(nn.Module):
    """Two linear layers with an element-wise function in between that is not zero at zero."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(gelu(self.first(x)) + 0.5)


def make_block(n: int, hidden: int, k: int, bias: bool, dtype: torch.dtype) -> Block:
    torch.manual_seed(0)
    return Block(nn.Linear(n, hidden, bias, dtype=dtype), nn.Linear(hidden, k, bias, dtype=dtype))


def called_by(block: Block, tile: Tensor) -> Counter[str]:
    """What the process group is asked for in a forward and backward, by whatever asks."""
    tile.requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        block(tile).square().sum().backward()
    assert tile.grad is not None
    return Counter(e.name for e in profile.events() if e.name.startswith("c10d::"))


def trained_side_by_side(
    models: tuple[nn.Module, nn.Module], calls: tuple[Call, Call], shapes: tuple[Shape, Shape], steps: int
) -> tuple[dict[str, float], torch.optim.Optimizer]:
    """Some steps of Adam in float64. -> largest errors of output and input gradient; the second optimizer.

    Args: shapes: of input and output. Gradients of biases of keys are zero but for rounding, which Adam's
        epsilon must not let through.
    """
    optimizers = [torch.optim.Adam(model.parameters(), 1e-2, eps=1e-3) for model in models]
    errors = {"output": 0.0, "input gradient": 0.0}
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x, dy = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
        inputs = [x.clone().requires_grad_() for _ in calls]
        outputs = [call(one) for call, one in zip(calls, inputs, strict=True)]
        for y, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            y.backward(dy)
            optimizer.step()
        errors["output"] = max(errors["output"], distance(*outputs))
        errors["input gradient"] = max(errors["input gradient"], distance(inputs[0].grad, inputs[1].grad))
    return errors, optimizers[1]


def train_on_rank(
    rows: tuple[int, ...], sizes: tuple[int, int, int], bias: bool, alternating: bool = False
) -> dict:
    """Train a block whole and in tiles, side by side; what differs, what is held, what was called."""
    n, _, k = sizes
    whole = make_block(*sizes, bias, torch.float64)
    first, second = ({"takes": "skewed"}, {"gives": "skewed"}) if alternating else ({}, {})
    tiled = Block(
        SquareLinear.from_linear(whole.first, **first), SquareLinear.from_linear(whole.second, **second)
    )

    def run(x: Tensor) -> Tensor:
        return tiled.second.gather(tiled(tiled.first.scatter(x)), rows)

    shapes = (*rows, n), (*rows, k)
    errors, optimizer = trained_side_by_side((whole, tiled), (whole, run), shapes, STEPS)
    errors["parameter"] = max(
        distance(own, other)
        for layer, reference in zip(tiled.children(), whole.children(), strict=True)
        for own, other in zip(layer.to_linear().parameters(), reference.parameters(), strict=True)
    )
    held = [*tiled.parameters(), *(p.grad for p in tiled.parameters())]
    held += [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    # Of a weight a tile, of a bias the slice of its features; with gradients and two moments.
    least = 4 * sum(p.nbytes / (ranks if p.dim() > 1 else ranks**0.5) for p in whole.parameters())
    return {
        "errors": errors,
        "called": called_by(tiled, tiled.first.scatter(torch.randn(*rows, n, dtype=torch.float64))),
        "held": sum(t.nbytes for t in held) / least,
    }


def check_training(results: list[dict], ranks: int, bias: bool) -> None:
    allowed = {"c10d::send", "c10d::recv_"} | ({"c10d::allreduce_"} if bias else set())
    for result in results:
        assert max(result["errors"].values()) < 1e-10, result["errors"]
        assert result["called"].keys() <= allowed
        assert result["held"] == 1
    if ranks > 1:
        assert all(result["called"]["c10d::send"] > 0 for result in results)


@pytest.mark.parametrize(
    ("rows", "sizes", "bias", "alternating"),
    few_of(
        [
            ((2, 4), (8, 16, 8), True, False),
            ((3, 3), (6, 10, 4), True, True),
            ((8,), (8, 16, 4), False, True),
            ((1,), (2, 4, 2), True, False),
        ],
        0,
        1,
    ),
)
def test_four_ranks_train_what_one_trains(
    pool: RankPool, rows: tuple[int, ...], sizes: tuple[int, int, int], bias: bool, alternating: bool
) -> None:
    results = pool.run(train_on_rank, rows, sizes, bias, alternating, ranks=4)
    check_training(results, 4, bias)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rows", "sizes", "alternating"),
    [((16,), (32, 48, 32), True), ((3, 5), (12, 20, 12), False)],
)
def test_sixteen_ranks_train_what_one_trains(
    pool_of_16: RankPool, rows: tuple[int, ...], sizes: tuple[int, int, int], alternating: bool
) -> None:
    results = pool_of_16.run(train_on_rank, rows, sizes, True, alternating, ranks=16, timeout_s=300)
    check_training(results, 16, True)


def test_one_rank_needs_no_group() -> None:
    result = train_on_rank((2, 3), (5, 6, 5), True)
    check_training([result], 1, True)


def one_gradient_on_rank(sizes: tuple[int, int], needs_dx: bool) -> float:
    """Only the gradient of the input, or only those of the parameters. -> the largest difference."""
    torch.manual_seed(0)
    whole = nn.Linear(*sizes, dtype=torch.float64).requires_grad_(not needs_dx)
    layer = SquareLinear.from_linear(whole)
    layer.requires_grad_(not needs_dx)
    x = torch.randn(6, sizes[0], dtype=torch.float64)
    inputs = [x.clone().requires_grad_(needs_dx) for _ in range(2)]
    whole(inputs[0]).square().sum().backward()
    layer.gather(layer(layer.scatter(inputs[1])), (6,)).square().sum().backward()
    if needs_dx:
        assert layer.weight.grad is None
        return distance(inputs[0].grad, inputs[1].grad)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(parameter.grad)
    gradients = layer.to_linear()
    pairs = (gradients.weight, whole.weight.grad), (gradients.bias, whole.bias.grad)
    return max(distance(a, b) for a, b in pairs)


@pytest.mark.parametrize("needs_dx", [True, False])
@pytest.mark.parametrize("sizes", [(6, 4), (4, 6)], ids=str)
def test_one_of_both_gradients(pool: RankPool, sizes: tuple[int, int], needs_dx: bool) -> None:
    assert max(pool.run(one_gradient_on_rank, sizes, needs_dx, ranks=4)) < 1e-12


def copied_empty_and_autocast_on_rank() -> tuple[float, Shape, float]:
    """A copy beside its original; the shape for a batch without rows; under autocast, errors beside
    nn.Linear."""
    torch.manual_seed(0)
    whole = nn.Linear(6, 10)
    layer = SquareLinear.from_linear(whole)
    tile = layer.scatter(torch.randn(4, 6))
    of_copy = distance(copy.deepcopy(layer)(tile), layer(tile))
    nothing = layer.gather(layer(layer.scatter(torch.randn(2, 0, 6))), (2, 0))
    x = torch.randn(4, 6)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = layer.gather(layer(layer.scatter(x)), (4,)), whole(x)
    y.float().square().sum().backward()
    expected.float().square().sum().backward()
    with torch.no_grad():
        layer.weight.copy_(layer.weight.grad)
    assert y.dtype == expected.dtype
    pairs = (y, expected), (layer.to_linear().weight, whole.weight.grad)
    return of_copy, tuple(nothing.shape), max(distance(a, b) / b.abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_copy_a_batch_without_rows_and_autocast(pool: RankPool, ranks: int) -> None:
    for of_copy, shape, of_autocast in pool.run(copied_empty_and_autocast_on_rank, ranks=ranks):
        assert of_copy == 0
        assert shape == (2, 0, 10)
        assert of_autocast < 0.02


def traffic_on_rank(gbps: float) -> tuple[int, int, int]:
    """Transfers and bytes of a forward and backward over the emulated link, and what they should be."""
    layer = SquareLinear(16, 32, bias=False, dtype=torch.float64)
    tile = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    layer(tile)
    link.read()
    emulate_link(gbps)
    layer(tile).sum().backward()
    traffic, rank = link.read(), dist.get_rank()
    m, n, k = 8, 8, 16
    tiles = {"x": m * n, "dx": m * n, "y": m * k, "dy": m * k, "weight": k * n}
    expected = count = 0
    for _, tensor, sources in shifts_of(layer):
        count += sources[rank] != rank
        expected += 8 * tiles[tensor] * (sources[rank] != rank)
    return traffic.count, count, traffic.bytes_sent - expected


def test_what_travels_is_what_was_derived_and_is_paced(pool: RankPool) -> None:
    """The first call compares shapes; it is not counted."""
    for count, expected, more in pool.run(traffic_on_rank, 0.5, ranks=4):
        assert count == expected
        assert more == 0


def lonely_rank() -> str:
    """All ranks compare shapes; in the second call rank 3 does not come."""
    layer, tile = SquareLinear(8, 8), torch.randn(4, 4)
    layer(tile)
    if dist.get_rank() == 3:
        dist.distributed_c10d._get_default_store().wait(["others are done"])
        return ""
    try:
        for _ in range(2):
            layer(tile)
    except CommunicationError as error:
        return str(error)
    finally:
        store = dist.distributed_c10d._get_default_store()
        if store.add("done", 1) == 3:
            store.set("others are done", "")
    return "no error"


def test_a_rank_that_stays_away_is_named(pool: RankPool) -> None:
    """Rank 1 gets W from rank 3 and sends its own there, so it names it once."""
    messages = pool.run(lonely_rank, ranks=4, collective_timeout_s=1.5, leave_together=False)
    assert any(re.search(r"waited \d+\.\d s in shift of [IW].* for rank\(s\) 3$", m) for m in messages), (
        messages
    )
    assert not any("no error" in m for m in messages[:3])


def differing_ranks() -> list[str]:
    rank = dist.get_rank()
    layer, takes = SquareLinear(8, 8), "skewed" if rank == 1 else "straight"
    return [
        refusal(lambda: layer(torch.randn(5 if rank == 2 else 4, 4))),
        refusal(lambda: SquareLinear(8, 8, takes=takes)(torch.randn(4, 4))),
    ]


def test_ranks_with_different_rows_or_layers_all_raise(pool: RankPool) -> None:
    for rows, layers in pool.run(differing_ranks, ranks=4):
        assert re.match(r"SquareLinear across ranks: got \d rows .* on rank 2", rows), rows
        assert re.match(r'SquareLinear across ranks: got .*takes="skewed" on rank', layers), layers


def test_bad_input_gets_one_line() -> None:
    for ranks in (2, 3):
        message = f"ranks of SquareLinear: got {ranks}, expected 1, 4, 16"
        with fake_ranks(ranks), pytest.raises(UserError, match=message):
            SquareLinear(4, 4)
    with (
        fake_ranks(4),
        pytest.raises(UserError, match="got 4 features in and 5 out, expected multiples of"),
    ):
        SquareLinear(4, 5)
    with fake_ranks(4):
        layer = SquareLinear(4, 6)
        state = layer.state_dict()
        with pytest.raises(
            UserError, match="weight to pickle: got a state dict of which each rank has a part"
        ):
            torch.save(state, io.BytesIO())
        state["weight"] = torch.zeros(4, 6)
        with pytest.raises(UserError, match=r"got \[4, 6\], expected the whole tensor, \[6, 4\]"):
            layer.load_state_dict(state)
    layer = SquareLinear(4, 6)
    with pytest.raises(UserError, match=r"input tile of SquareLinear: got \(2, 3\) of float32"):
        layer(torch.randn(2, 3))
    with pytest.raises(UserError, match="float64"):
        layer(torch.randn(2, 4, dtype=torch.float64))
    with pytest.raises(UserError, match=r"SquareLinear.scatter: got \(2, 6\)"):
        layer.scatter(torch.randn(2, 6))
    with pytest.raises(
        UserError, match="takes of SquareLinear: got 'diagonal', expected one of straight, skewed"
    ):
        SquareLinear(4, 6, takes="diagonal")
    with pytest.raises(UserError, match="leading dimensions"):
        layer.gather(torch.randn(2, 6), (3,))


@pytest.mark.parametrize(
    ("sizes", "takes", "gives", "travelling"),
    [
        ((8, 8), "skewed", "straight", []),
        ((8, 8), "straight", "skewed", []),
        ((4, 8), "straight", "straight", ["x", "dx"]),
        ((8, 4), "straight", "straight", ["y", "dy"]),
    ],
)
def test_between_layers_the_narrower_side_travels_or_nothing(
    sizes: tuple[int, int], takes: str, gives: str, travelling: list[str]
) -> None:
    with fake_ranks(16):
        layer = SquareLinear(*sizes, takes=takes, gives=gives)
        ends = [tensor for where, tensor, _ in shifts_of(layer) if where in ("enter", "leave")]
    assert ends == travelling
