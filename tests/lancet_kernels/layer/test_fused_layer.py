"""`MoELayer(backend="fused")` against `backend="torch"`: forward, backward, several layers, several steps."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import fields
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lancet_kernels import CommunicationError, MoELayer, UserError, reset_exchanges
from lancet_kernels.kernels.protocol.exchange import Exchange
from lancet_kernels.kernels.symmetric import SharedMemory
from lancet_kernels.ops.moe import fused_experts, fused_passes
from lancet_kernels.ops.moe.fused_experts import LayerExchange, LayerMemory, SharedExchanges
from tests.grids import few_of
from tests.refusals import refusal

SWITCH = {"gate": "switch", "top_k": 1, "capacity_factor": 1.0}
TOPK = {"gate": "topk", "top_k": 2, "capacity_factor": None, "activation": "swiglu", "bias": True}
CASES = [
    TOPK,
    {"gate": "batch-prioritized", "top_k": 1, "capacity_factor": 0.5, "activation": "silu"},
    {"gate": "sigmoid", "top_k": 2, "capacity_factor": 1.25, "shared_expert_d_ff": 12},
]


def train(
    backend: str, options: dict, layers: int, tokens: Sequence[Sequence[int]], trained: int
) -> list[dict[str, Tensor]]:
    """Outputs and gradients of every step of a stack of layers with residuals, plain SGD between.

    Args: tokens: of each of two ranks, step by step. trained: so many steps; those behind have no gradients.
    """
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = nn.ModuleList(MoELayer(16, 24, 4, **options, backend=backend) for _ in range(layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    results = []
    for step, of_ranks in enumerate(tokens):
        generator = torch.Generator().manual_seed(100 * step + rank)
        y = x = torch.randn(1, of_ranks[rank % 2], 16, generator=generator, requires_grad=True)
        with torch.set_grad_enabled(step < trained):
            for layer in model:
                y = y + layer(y)
        result = {"y": y.detach().clone()}
        if step < trained:
            (y * torch.randn(y.shape, generator=generator)).sum().backward()
            result["x.grad"] = x.grad.clone()
            result |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
        results.append(result)
    return results


def both(
    options: dict, layers: int = 1, tokens: Sequence[Sequence[int]] = ((18, 18),), trained: int = 3
) -> tuple[float, list[str]]:
    """-> the largest difference of the two backends, over the largest value of each tensor; by name, what all
    ranks had to agree on for the fused one."""
    agreed: list[str] = []
    gather = SharedMemory._gather
    note = lambda *given: agreed.append(given[1]) or gather(*given)  # noqa: E731
    expected = train("torch", options, layers, tokens, trained)
    with mock.patch.object(SharedMemory, "_gather", note):
        got = train("fused", options, layers, tokens, trained)
    return largest_difference(expected, got), agreed


def largest_difference(expected: list[dict[str, Tensor]], got: list[dict[str, Tensor]]) -> float:
    """Over the largest value of each tensor."""
    worst = 0.0
    for one, other in zip(expected, got, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            if one[name].numel():
                scale = one[name].abs().max().clamp_min(1e-3)
                worst = max(worst, float((other[name] - one[name]).abs().max() / scale))
    return worst


@pytest.mark.parametrize("options", few_of(CASES), ids=lambda o: f"{o['gate']}-{o['capacity_factor']}")
def test_fused_equals_torch(pool, options) -> None:
    assert max(pool.run(both, options))[0] < 2e-5


@pytest.mark.long
def test_three_layers_for_three_steps(pool) -> None:
    """Banks and epochs are used again and again; layers share one backward exchange."""
    assert max(pool.run(both, SWITCH | {"bias": True}, 3, ((18, 18),) * 3))[0] < 1e-4


TOKENS = ((12, 7), (0, 5), (3, 12))  # none more than any of the first


@pytest.mark.long
@pytest.mark.parametrize("options", [TOPK, SWITCH], ids=lambda o: o["gate"])
def test_other_numbers_of_tokens_in_every_step(pool, options) -> None:
    """Nothing is made and nothing is agreed upon for them: regions are there once, for the most tokens."""
    for worst, agreed in pool.run(both, options, 1, TOKENS, 2, timeout_s=240):
        assert worst < 2e-5
        # Those of the forward, and of the backward, once.
        assert sum(".rows'" in request for request in agreed) == 2
        assert agreed.count("largest") == 2
        assert len(set(agreed)) == len(agreed) - 1


def too_small() -> str:
    """All tokens of both ranks go to one expert of rank 0, and there is room for 1.2 times the even share."""
    options = {"capacity_factor": None, "backend": "fused", "receive_factor": 1.2}
    layer = MoELayer(16, 24, 2, gate="switch", **options)
    layer.name = "blocks.7"
    with torch.no_grad():
        layer.router[0] = 1.0
        layer.router[1] = -1.0
    return refusal(lambda: layer(torch.ones(10, 16)))


def test_rows_that_do_not_fit_are_an_error_on_every_rank(pool) -> None:
    for rank, message in enumerate(pool.run(too_small)):
        assert message.startswith(
            "rows that PE 0 receives in exchange0.forward0 (in or before a pass of blocks.7), on PE "
            f"{rank}: got 20 (nothing was sent), expected at most 12; set a larger receive_factor"
        )


def fails_and_goes_on() -> tuple[str, float]:
    """Rank 1 leaves a pass out; both reset, and train on. -> rank 0's error, difference from `torch` then."""
    torch.manual_seed(0)
    fused = MoELayer(16, 24, 4, backend="fused", timeout=60.0)
    plain = MoELayer(16, 24, 4)
    plain.load_state_dict(fused.state_dict())
    x = torch.randn(9, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    message = ""
    fused(x).sum().backward()
    waiting = fused(x)
    if dist.get_rank() == 0:
        # Only for this pass: one that has its peer may take longer on a busy machine.
        for _, shared, _ in fused.exchange._shared.values():
            for forward in shared.forward:
                forward.timeout_s = 3.0
        message = refusal(lambda: fused(x), CommunicationError)
    dist.barrier()
    reset_exchanges()
    with pytest.raises(UserError):
        waiting.sum().backward()
    worst = 0.0
    for _ in range(2):
        fused.zero_grad()
        plain.zero_grad()
        fused(x).square().sum().backward()
        plain(x).square().sum().backward()
        pairs = zip(fused.parameters(), plain.parameters(), strict=True)
        worst = max(worst, *(float((a.grad - b.grad).abs().max()) for a, b in pairs))
    return message, worst


@pytest.mark.long
def test_a_layer_works_again_after_a_failed_wait(pool) -> None:
    results = pool.run(fails_and_goes_on, timeout_s=120)
    assert "PE 0 waited for PE 1" in results[0][0]
    assert "more than 3 s" in results[0][0]
    assert "(symmetric memory: shared)" in results[0][0]
    assert max(worst for _, worst in results) < 1e-5


def in_pairs() -> tuple[float, list[str]]:
    """Two expert groups of two ranks each, at once."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return both({"gate": "topk", "top_k": 2, "groups": pairs[dist.get_rank() // 2]})


@pytest.mark.long
def test_fused_expert_groups_of_two(pool) -> None:
    assert max(pool.run(in_pairs, ranks=4, timeout_s=120))[0] < 2e-5


def test_one_rank_without_torch_distributed() -> None:
    torch.manual_seed(1)
    fused = MoELayer(16, 24, 4, top_k=2, gate="topk", backend="fused")
    plain = MoELayer(16, 24, 4, top_k=2, gate="topk")
    plain.load_state_dict(fused.state_dict())
    x = torch.randn(11, 16)
    with mock.patch.object(
        fused_experts, "create", side_effect=AssertionError("symmetric memory for one rank")
    ):
        y = fused(x)
    torch.testing.assert_close(y, plain(x), rtol=1e-5, atol=1e-6)
    y.sum().backward()
    plain(x).sum().backward()
    for (name, mine), theirs in zip(fused.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


def no_token_first(options: dict) -> float:
    """All ranks begin with an empty batch. -> the largest difference in the passes behind it."""
    return both({"gate": "topk", "top_k": 2, **options}, 1, ((0, 0), (1, 0), (1, 1)))[0]


@pytest.mark.parametrize("capacity_factor", [1.25, None])
def test_a_first_pass_without_tokens(pool, capacity_factor: float | None) -> None:
    assert max(pool.run(no_token_first, {"capacity_factor": capacity_factor})) < 2e-5


def more_tokens() -> tuple[str, list[str]]:
    """-> the error for more than max_tokens; what is logged without it, in passes of 8, 2, 9, 4 and 12
    tokens."""
    declared = MoELayer(16, 24, 2, backend="fused", max_tokens=5)
    refused = refusal(lambda: declared(torch.ones(6, 16)))
    lines: list[str] = []
    layer = MoELayer(16, 24, 2, backend="fused")
    with mock.patch.object(
        logging.getLogger(fused_experts.__name__), "warning", lambda *a: lines.append(a[0] % a[1:])
    ):
        for tokens in (8, 2, 9, 4, 12):
            layer(torch.ones(tokens, 16)).sum().backward()
    return refused, lines


@pytest.mark.long
def test_more_tokens_than_before(pool) -> None:
    for message, lines in pool.run(more_tokens):
        assert message.startswith("tokens of a pass of an MoE layer: got 6, expected at most 5 (max_tokens)")
        assert len(lines) == 1
        assert "9 tokens, more than the 8 before" in lines[0], "then there is room for 12"


def forwards_before_a_backward() -> list[int]:
    """-> for how many passes there is room after some forwards whose results are dropped, and then kept."""
    layer, x, passes = MoELayer(16, 24, 2, backend="fused"), torch.ones(3, 16), []
    with torch.no_grad():
        outs = [layer(x) for _ in range(5)]
    assert all(torch.equal(outs[0], out) for out in outs)
    for _ in range(5):
        layer(x)  # nobody keeps the result, so its place is free again
    passes.append(layer.memory().passes)
    kept = [layer(x) for _ in range(5)]
    passes.append(layer.memory().passes)
    for y in reversed(kept):
        y.sum().backward()
    once = layer.w1.grad / 5
    layer.zero_grad()
    layer(x).sum().backward()
    torch.testing.assert_close(layer.w1.grad, once)
    return [*passes, layer.memory().passes]


@pytest.mark.long
def test_there_is_room_for_as_many_passes_as_wait_for_their_backward(pool) -> None:
    assert pool.run(forwards_before_a_backward) == [[2, 8, 8]] * 2


def copied() -> None:
    layer = MoELayer(16, 24, 2, backend="fused")
    twin = copy.deepcopy(layer)
    x = torch.ones(3, 16)
    ys = [layer(x), twin(x), layer(x), twin(x)]
    assert all(torch.equal(ys[0], y) for y in ys)
    sum(y.sum() for y in ys).backward()


@pytest.mark.long
def test_a_copy_is_a_layer_of_its_own(pool) -> None:
    pool.run(copied)


def memory_kept(options: dict) -> tuple[LayerMemory, dict[str, int]]:
    """What a layer says of its memory, and bytes that a pass keeps."""
    first, second = (
        MoELayer(16, 24, 4, backend="fused", max_tokens=200, top_k=2, gate="topk", **options)
        for _ in range(2)
    )
    with pytest.raises(UserError, match="memory of a fused layer: got no pass yet"):
        first.memory()
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    x = torch.ones(9, 16, requires_grad=True)
    parameters = {parameter.data_ptr() for parameter in first.parameters()} | {x.data_ptr()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = first(x)
    (waiting,) = fused_passes._passes.values()
    found = {
        "kept": sum(t.nbytes for t in vars(waiting.saved).values() if isinstance(t, Tensor)),
        "routing": sum(getattr(waiting.routing, each.name).nbytes for each in fields(waiting.routing)),
        "saved by autograd": sum(size for at, size in kept.items() if at not in parameters),
    }
    ((_, shared, _),) = first.exchange._shared.values()
    assert all(one.buffers is shared.buffers for one in (shared.backward, *shared.forward))
    y.sum().backward()
    memory = first.memory()
    second(x).sum().backward()
    assert first.memory() == memory, "a second layer takes nothing more while no pass waits"
    return memory, found


@pytest.mark.parametrize("options", few_of([{"activation": "swiglu", "receive_factor": 1.25}, {}]), ids=str)
def test_memory_is_as_documented(pool, options) -> None:
    """The formula of `LayerExchange`, for 2 ranks with 2 experts each, in float32."""
    tokens, choices, width, hidden = 200, 2, 16, 24
    sent = tokens * choices
    received = math.ceil(1.25 * sent) if "receive_factor" in options else 2 * tokens * choices
    room = math.ceil(2 * 1.25 * sent)
    wide = 2 * hidden if options.get("activation") == "swiglu" else hidden
    for memory, found in pool.run(memory_kept, options | {"capacity_factor": None}, timeout_s=120):
        # Two passes, a backward, and rows that come back.
        assert memory[2:] == (2, room, received)
        assert memory.while_running == 4 * received * (wide + hidden)
        rows = 4 * (room * (width + wide) + (received + sent) * width)
        assert rows <= memory.shared < rows + 12_000
        said = f"passes that wait for their backward with {room} rows together, {received} at most in one"
        assert f"for 2 {said}" in str(memory)
        assert found["kept"] == 4 * room * wide
        assert found["routing"] <= 28 * 9 * choices + 100
        # Of the gate and of the router; no rows.
        assert found["saved by autograd"] <= 9 * (4 * 4 + choices * 40) + 200


class Blocks(nn.Module):
    """Fused layers with residuals, each under activation checkpointing; None: without it."""

    def __init__(self, use_reentrant: bool | None, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.use_reentrant = use_reentrant
        options = {"gate": "topk", "top_k": 2, "capacity_factor": None, "activation": "swiglu"}
        self.layers = nn.ModuleList(
            MoELayer(16, 24, 4, backend="fused", max_tokens=12, **options) for _ in range(layers)
        )

    def forward(self, y: Tensor) -> Tensor:
        for layer in self.layers:
            if self.use_reentrant is None:
                y = y + layer(y)
            else:
                y = y + checkpoint(layer, y, use_reentrant=self.use_reentrant)
        return y

    def open_passes(self) -> int:
        """Passes that wait for a backward, in all layers."""
        return sum(use() is not None for each in self.exchanges() for use, _ in each._open.values())

    def exchanges(self) -> list[Exchange]:
        """The forward exchanges of all layers, each once."""
        shared = {id(one): one for x in self.layers for _, one, _ in x.exchange._shared.values()}
        return [exchange for one in shared.values() for exchange in one.forward]


def checkpointed(use_reentrant: bool | None) -> dict[str, object]:
    """Two forwards, then their backwards, through four layers (without checkpointing, one after the other).

    -> gradients, and what is kept between forward and backward: tensors of activations, and open passes.
    """
    kept: dict[int, int] = {}
    model = Blocks(use_reentrant, 4)
    parameters = {parameter.data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    generator = torch.Generator().manual_seed(dist.get_rank())
    xs = [torch.randn(12, 16, generator=generator, requires_grad=True) for _ in range(2)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ys = [model(x) for x in (xs if use_reentrant is not None else xs[:1])]
    found: dict[str, object] = {"open": model.open_passes(), "kept": sum(kept.values()) / len(ys)}
    for x in xs[len(ys) :]:
        ys[0].square().sum().backward()
        ys = [model(x)]
    for y in ys:
        y.square().sum().backward()
    found["grads"] = [x.grad for x in xs] + [parameter.grad for parameter in model.parameters()]
    found["open at the end"] = model.open_passes()
    found["passes"] = sum(exchange.passes for exchange in model.exchanges())
    return found


@pytest.mark.long
def test_activation_checkpointing_keeps_no_pass_open(pool) -> None:
    """Room for each layer that waits for its backward; with checkpointing the first exchange is all."""
    plain, *results = (pool.run(checkpointed, each, timeout_s=200) for each in (None, False, True))
    for expected, got in zip(plain * 2, [*results[0], *results[1]], strict=True):
        assert expected["open"] == 4
        assert (expected["passes"], got["passes"]) == (8, 2)
        assert got["open"] == got["open at the end"] == expected["open at the end"] == 0
        # The inputs of the layers, nothing inside them.
        assert got["kept"] <= 5 * 12 * 16 * 4 < expected["kept"]
        for mine, theirs in zip(got["grads"], expected["grads"], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match="max_tokens: got 2 with backend='torch', expected None"):
        MoELayer(16, 24, 2, max_tokens=2)
    wrong = {"max_tokens": (0, 1.5), "receive_factor": (-1.0,), "timeout": ("long",)}
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        with pytest.raises(UserError, match=f"{name}: got {value!r}, expected a positive"):
            MoELayer(16, 24, 2, backend="fused", **{name: value})
    with pytest.raises(UserError, match=r"memory\(\): got a layer with backend='torch'"):
        MoELayer(16, 24, 4).memory()
    with pytest.raises(UserError, match="use backend='torch' for float64"):
        MoELayer(16, 24, 2, backend="fused", dtype=torch.float64)(torch.ones(3, 16, dtype=torch.float64))
    with pytest.raises(UserError, match="one of torch, fused"):
        MoELayer(16, 24, 2, backend="fast")


def no_room_on_rank() -> str:
    layer = MoELayer(16, 24, 4, backend="fused", capacity_factor=None)
    with mock.patch.object(SharedMemory, "_allocate", side_effect=torch.OutOfMemoryError):
        return refusal(lambda: layer(torch.randn(10, 16)))


def test_memory_that_does_not_fit_names_what_to_set(pool):
    (message, *_) = pool.run(no_room_on_rank)
    assert "got room for 20 rows more, 0.00 GiB" in message
    assert "set receive_factor (1.25 allots 13 rows a pass) or max_tokens, or checkpoint" in message


def rooms(factor: float | None, world: int, passes: int) -> tuple[list[tuple[int, int]], int]:
    """Exchanges for so many passes of Qwen3-30B-A3B with 8,192 tokens, and the most rows in one pass."""
    layer = LayerExchange("", 128 // world, 2048, 768, "swiglu", receive_factor=factor)
    rows, each = layer._room(8 * 8192, layer._worst(world, 8192, 8, 8192))
    shared = mock.Mock(spec=SharedExchanges, sizes={"receive_rows": rows}, each_pass=each, forward=[])
    while sum(size[0] for size in shared.forward) < passes:
        shared.forward.append(SharedExchanges.next_size(shared))
    return shared.forward, rows


def test_what_users_with_80_gb_get_by_default() -> None:
    """Bytes of `LayerExchange`'s docstring; any routing of 8 ranks fits in a pass."""
    bytes_kept, even = 2 * (2048 + 1536), 65536
    (first,), longest = rooms(None, 8, 1)
    assert (first, longest) == ((6, 8 * even), 8 * even)
    assert round(first[1] * bytes_kept / 1e9, 1) == 3.8
    exchanges, _ = rooms(None, 8, 48)
    assert round(sum(room for _, room in exchanges) * bytes_kept / 1e9, 1) == 30.1
    exchanges, longest = rooms(1.25, 8, 48)
    assert longest == 1.25 * even
    assert round(sum(room for _, room in exchanges) * bytes_kept / 1e9, 1) == 29.4
    # More ranks take no more; one rank needs no more than its own rows.
    assert rooms(None, 64, 48) == rooms(None, 8, 48)
    assert rooms(None, 1, 2) == ([(2, 2 * even)], even)


@pytest.mark.parametrize(
    ("factor", "sent", "worst", "expected"),
    [
        (None, 300, 800, (800, 375)),
        (None, 10, 20, (20, 20)),
        (None, 10, 400, (256, 256)),
        (1.5, 10, 20, (15, 15)),
    ],
)
def test_few_rows_need_not_be_balanced(factor, sent: int, worst: int, expected: tuple[int, int]) -> None:
    """Most rows of a pass, and rows of a pass on average."""
    layer = LayerExchange("", 2, 16, 24, "gelu", receive_factor=factor)
    assert layer._room(sent, worst) == expected
