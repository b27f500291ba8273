"""SquareLinear on real ranks: what nn.Linear computes, with 1 / 4^k of it on each rank and no collective."""

import os
import re
import signal
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import gelu

from lancet_kernels import CommunicationError, SquareLinear, UserError
from lancet_kernels.graph.slices import moves
from lancet_kernels.ops.link import emulate_link, link
from lancet_kernels.square_layer import derived_movements, skewed_dimension
from tests.grids import few_of
from tests.processes import processes
from tests.ranks import RankPool

STEPS = 3


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
    whole_adam, tiled_adam = (torch.optim.Adam(b.parameters(), 1e-2) for b in (whole, tiled))
    errors = {"output": 0.0, "input gradient": 0.0, "parameter": 0.0}
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x, dy = (torch.randn(*rows, f, dtype=torch.float64, generator=generator) for f in (n, k))
        x_whole, x_tiled = x.clone().requires_grad_(), x.clone().requires_grad_()
        y_whole = whole(x_whole)
        y_whole.backward(dy)
        y_tiled = tiled.second.gather(tiled(tiled.first.scatter(x_tiled)), rows)
        y_tiled.backward(dy)
        whole_adam.step()
        tiled_adam.step()
        held = [*tiled.parameters(), *(p.grad for p in tiled.parameters())]
        whole_adam.zero_grad()
        tiled_adam.zero_grad()
        errors["output"] = max(errors["output"], difference(y_whole, y_tiled))
        errors["input gradient"] = max(errors["input gradient"], difference(x_whole.grad, x_tiled.grad))
    for layer, reference in zip(tiled.children(), whole.children(), strict=True):
        for own, other in zip(layer.to_linear().parameters(), reference.parameters(), strict=True):
            errors["parameter"] = max(errors["parameter"], difference(own, other))
    states = [t for state in tiled_adam.state.values() for t in state.values() if t.dim()]
    held += states
    reference_bytes = 4 * sum(p.nbytes for p in whole.parameters())
    return {
        "errors": errors,
        "called": called_by(tiled, tiled.first.scatter(x)),
        "share": sum(t.nbytes for t in held) / reference_bytes,
    }


def difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def check_training(results: list[dict], ranks: int, share: float | None = None) -> None:
    for result in results:
        assert max(result["errors"].values()) < 1e-10, result["errors"]
        assert result["called"].keys() <= {"c10d::send", "c10d::recv_"}
        assert share is None or result["share"] == share
    if ranks > 1:
        assert all(result["called"]["c10d::send"] > 0 for result in results)


@pytest.mark.parametrize(
    ("rows", "sizes", "bias", "alternating"),
    few_of(
        [
            ((2, 4), (8, 16, 8), True, False),
            ((3, 3), (5, 7, 5), True, True),
            ((3, 3), (5, 7, 5), True, False),
            ((8,), (8, 16, 4), False, True),
            ((1,), (1, 3, 2), True, False),
        ],
        0,
        1,
    ),
)
def test_four_ranks_train_what_one_trains(
    pool: RankPool, rows: tuple[int, ...], sizes: tuple[int, int, int], bias: bool, alternating: bool
) -> None:
    results = pool.run(train_on_rank, rows, sizes, bias, alternating, ranks=4)
    is_even = all(size % 4 == 0 for size in sizes)
    check_training(results, 4, share=1 / 4 if is_even else None)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rows", "sizes", "alternating"),
    [((16,), (32, 48, 32), True), ((3, 5), (13, 21, 13), False), ((2,), (64, 16, 64), True)],
)
def test_sixteen_ranks_train_what_one_trains(
    pool_of_16: RankPool, rows: tuple[int, ...], sizes: tuple[int, int, int], alternating: bool
) -> None:
    results = pool_of_16.run(train_on_rank, rows, sizes, True, alternating, ranks=16, timeout_s=300)
    is_even = all(size % 16 == 0 for size in sizes)
    check_training(results, 16, share=1 / 16 if is_even else None)


def test_one_rank_needs_no_group() -> None:
    result = train_on_rank((2, 3), (5, 6, 5), True)
    check_training([result], 1, share=1.0)


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
        return difference(inputs[0].grad, inputs[1].grad)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(parameter.grad)
    gradients = layer.to_linear()
    pairs = (gradients.weight, whole.weight.grad), (gradients.bias, whole.bias.grad)
    return max(difference(a, b) for a, b in pairs)


@pytest.mark.parametrize("needs_dx", [True, False])
@pytest.mark.parametrize("sizes", [(6, 4), (4, 6)], ids=str)
def test_one_of_both_gradients(pool: RankPool, sizes: tuple[int, int], needs_dx: bool) -> None:
    assert max(pool.run(one_gradient_on_rank, sizes, needs_dx, ranks=4)) < 1e-12


def traffic_on_rank(gbps: float) -> tuple[int, int, int]:
    """Transfers and bytes of a forward and backward over the emulated link, and what they should be."""
    layer = SquareLinear(16, 32, dtype=torch.float64)
    tile = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    layer(tile)
    link.read()
    emulate_link(gbps)
    layer(tile).sum().backward()
    traffic, rank = link.read(), dist.get_rank()
    m, n, k, p = 8, 8, 16, 8
    tiles = {"x": m * n, "dx": m * n, "dy": m * k, "weight": k * n + p, "dweight": k * n + p}
    expected = count = 0
    for name, tensor, sources in derived_movements(1).every():
        size = k * n if name == "backward_weight" else tiles[tensor]
        count += sources[rank] != rank
        expected += 8 * size * (sources[rank] != rank)
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
    messages = pool.run(lonely_rank, ranks=4, collective_timeout_s=3.0, leave_together=False)
    assert any(re.search(r"waited \d+\.\d s in shift of [IW].* for rank\(s\) 3$", m) for m in messages), (
        messages
    )
    assert not any("no error" in m for m in messages[:3])


def killed_rank(rank: int, store: str, results) -> None:
    """A process of its own: rank 3 dies between forward and backward."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=4, timeout=timedelta(seconds=5)
    )
    layer, tile = SquareLinear(8, 8), torch.randn(4, 4, requires_grad=True)
    y = layer(tile).sum()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        y.backward()
        message = "no error"
    except CommunicationError as error:
        message = str(error)
    results.put((rank, message))
    results.close()
    results.join_thread()
    os._exit(0)


@pytest.mark.long
def test_a_rank_that_dies_in_the_ring_is_reported_by_all(tmp_path: Path) -> None:
    """Within the group's timeout. In the backward every rank exchanges tiles with rank 3 in some step, but it
    may have to wait earlier for one that has already stopped."""
    context = processes()
    results = context.Queue()
    ranks = [
        context.Process(target=killed_rank, args=(rank, f"{tmp_path}/store", results)) for rank in range(4)
    ]
    for process in ranks:
        process.start()
    try:
        messages = dict(results.get(timeout=60) for _ in range(3))
    finally:
        for process in ranks:
            process.kill()
    asked = r"(lost its connection to one of|waited \d+\.\d s in shift of .* for) rank\(s\) "
    for rank in range(3):
        assert re.match(rf"rank {rank} {asked}", messages[rank]), messages
    assert any("rank(s) 3" in m for m in messages.values()), messages


def mismatched_rank() -> str:
    layer = SquareLinear(8, 8)
    try:
        layer(torch.randn(5 if dist.get_rank() == 2 else 4, 4))
    except UserError as error:
        return str(error)
    return ""


def test_ranks_with_different_rows_all_raise(pool: RankPool) -> None:
    messages = pool.run(mismatched_rank, ranks=4)
    assert all("SquareLinear across ranks" in m and "on rank 2" in m for m in messages), messages


def no_square_of_ranks() -> str:
    try:
        SquareLinear(4, 4)
    except UserError as error:
        return str(error)
    return ""


def differently_skewed() -> str:
    try:
        SquareLinear(8, 8, takes="skewed" if dist.get_rank() == 1 else "straight")(torch.randn(4, 4))
    except UserError as error:
        return str(error)
    return ""


def test_ranks_that_take_different_tiles_all_raise(pool: RankPool) -> None:
    for message in pool.run(differently_skewed, ranks=4):
        assert re.match(r"SquareLinear across ranks .*takes, gives\): got .*skewed.* on rank", message), (
            message
        )


def test_bad_input_gets_one_line(pool: RankPool) -> None:
    for ranks in (2, 3):
        messages = pool.run(no_square_of_ranks, ranks=ranks)
        assert all(f"ranks of SquareLinear: got {ranks}, expected 1, 4, 16" in m for m in messages), messages
    layer = SquareLinear(4, 6)
    with pytest.raises(UserError, match=r"input tile of SquareLinear: got \(2, 3\) of float32"):
        layer(torch.randn(2, 3))
    with pytest.raises(UserError, match="float64"):
        layer(torch.randn(2, 4, dtype=torch.float64))
    with pytest.raises(UserError, match=r"SquareLinear.scatter: got \(2, 6\)"):
        layer.scatter(torch.randn(2, 6))
    with pytest.raises(UserError, match="backend of SquareLinear: got 'triton', expected torch or fused"):
        SquareLinear(4, 6, backend="triton")
    with pytest.raises(UserError, match="takes of SquareLinear: got 'diagonal', expected straight or skewed"):
        SquareLinear(4, 6, takes="diagonal")
    with pytest.raises(UserError, match="leading dimensions"):
        layer.gather(torch.randn(2, 6), (3,))


@pytest.mark.parametrize("side", [2, 4])
def test_between_layers_that_alternate_nothing_travels(side: int) -> None:
    """The slides' W, I, dO and dW alignments cost nothing either, and no sum moves on."""
    exponent = side.bit_length() - 1
    for skewed, takes, gives in (("n", "skewed", "straight"), ("k", "straight", "skewed")):
        assert skewed_dimension(8, 8, takes, gives) == skewed
        movements = derived_movements(exponent, skewed, takes, gives)
        assert movements.begins_at_home
        assert {name for name, _, _ in movements.every()} == {
            "forward_x", "forward_weight", "backward_dy", "backward_weight", "gradient_x", "gradient_dy",
        }  # fmt: skip


@pytest.mark.parametrize(("sizes", "travelling"), [((4, 8), "x"), ((8, 4), "y")])
def test_the_narrower_of_two_straight_ones_travels(sizes: tuple[int, int], travelling: str) -> None:
    movements = derived_movements(1, skewed_dimension(*sizes, "straight", "straight"))
    ends = {"x": ("x_to_forward", "dx_from_backward"), "y": ("y_from_forward", "dy_to_backward")}
    for tensor, names in ends.items():
        assert [moves(getattr(movements, name)) for name in names] == [tensor == travelling] * 2


def train_fused_on_rank(rows: int, sizes: tuple[int, int, int], dtype: torch.dtype) -> dict[str, float]:
    """Two steps of the same block with backend "torch" and "fused", beside a float64 one on one rank."""
    whole = make_block(*sizes, True, torch.float64)
    blocks = {}
    for backend in ("torch", "fused"):
        source = make_block(*sizes, True, torch.float64).to(dtype)
        layers = (SquareLinear.from_linear(linear, None, backend) for linear in source.children())
        blocks[backend] = Block(*layers)
    n, _, k = sizes
    errors = {}
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x, dy = (torch.randn(rows, f, dtype=torch.float64, generator=generator) for f in (n, k))
        whole.zero_grad()
        x_whole = x.clone().requires_grad_()
        y_whole = whole(x_whole)
        y_whole.backward(dy)
        for backend, block in blocks.items():
            block.zero_grad()
            x_own = x.to(dtype).requires_grad_()
            y = block.second.gather(block(block.first.scatter(x_own)), (rows,))
            y.backward(dy.to(dtype))
            compared = {"y": (y, y_whole), "dx": (x_own.grad, x_whole.grad)}
            for name, layer in block.named_children():
                with torch.no_grad():
                    for parameter in layer.parameters():
                        parameter.copy_(parameter.grad)
                gradients = layer.to_linear()
                reference = getattr(whole, name)
                compared[f"d{name}"] = gradients.weight, reference.weight.grad
                compared[f"d{name} bias"] = gradients.bias, reference.bias.grad
            for what, (own, right) in compared.items():
                error = difference(own.double(), right) / right.abs().max().item()
                key = f"{backend} {what}"
                errors[key] = max(errors.get(key, 0.0), error)
            source = make_block(*sizes, True, torch.float64).to(dtype)
            for layer, linear in zip(block.children(), source.children(), strict=True):
                layer.load_state_dict(SquareLinear.from_linear(linear).state_dict())
    return errors


@pytest.mark.parametrize(
    ("rows", "sizes", "dtype"),
    few_of([(6, (10, 12, 7), torch.float32), (40, (64, 80, 64), torch.bfloat16)]),
)
def test_fused_launches_compute_the_same(
    pool: RankPool, rows: int, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """As near to float64 as the other backend is, in the interpreter; bits differ in the order of sums."""
    for errors in pool.run(train_fused_on_rank, rows, sizes, dtype, ranks=4, timeout_s=180):
        least = 8 * torch.finfo(dtype).eps
        for what in [key for key in errors if key.startswith("fused")]:
            assert errors[what] < max(2 * errors[what.replace("fused", "torch")], least), errors
