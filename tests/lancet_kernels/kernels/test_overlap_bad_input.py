"""What the launchers of the overlap kernel refuse, before a peer could wait for it; and a count that lies."""

from dataclasses import replace

import pytest
import torch

from lancet_kernels.errors import UserError
from lancet_kernels.kernels.overlap import DenseGemm, aligned
from lancet_kernels.kernels.protocol.schedule import BASE
from lancet_kernels.kernels.symmetric import virtual_memories
from tests.lancet_kernels.kernels.overlap_cases import Case
from tests.lancet_kernels.kernels.overlap_ranks import (
    Layer,
    answer_of,
    check_same,
    make_exchange,
    make_layer,
)
from tests.poisoned_buffers import poisoned_buffers

CASE = Case(world=1, local=3, tokens=6, choices=2, capacity=5, width=16, hidden=16)


@pytest.fixture
def layer() -> Layer:
    (memory,) = virtual_memories(1)
    return make_layer(memory, "layer", CASE)


def transposed(t: torch.Tensor) -> torch.Tensor:
    """The same values, not contiguous."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


NAMES = "x expert row weight choice count w1 w2 b1 b2".split()
OTHERS = {
    "x too narrow": ("x", lambda x: x[:, :-1].contiguous(), r"x of .*: got \[6, 15\], expected \[6, 16\]"),
    "x of no device here": ("x", lambda x: x.to("meta"), "input of the fused experts: got a tensor on meta"),
    "fewer tokens": ("x", lambda x: x[:-1], r"expert of .*expected \[5, 2\]"),
    "choice of fewer rows": ("choice", lambda t: t[:-1], r"choice of .*expected \[13\]"),
    "one choice": ("row", lambda t: t[:, :1], "row of the fused experts"),
    "b2 missing": ("b2", lambda _: None, "biases: got one of b1 and b2"),
    "swiglu weights": ("activation", lambda _: "swiglu", r"w1 of .*expected \[3, 16, 32\]"),
    "no such activation": ("activation", lambda _: "relu", "activation: got 'relu', expected one of gelu"),
}
BAD_TENSORS = OTHERS | {
    f"{what} of {name}": (name, change, f"{name} of the fused experts")
    for name in NAMES
    for what, change in (("dtype", lambda t: t.to(torch.float64)), ("shape", lambda t: torch.cat([t, t])))
    if (what, name) != ("shape", "x")
}
BAD_TENSORS |= {f"layout of {n}": (n, transposed, f"layout of {n} of the fused experts") for n in ("x", "w1")}
BAD_ROUTING = {
    "more rows than choices": ("count", lambda t: t.add_(9)),
    "count negative": ("count", lambda t: t.fill_(-1)),
    "expert that is none": ("expert", lambda t: t.fill_(3)),
    "a row beyond the counts": ("row", lambda t: t.fill_(12)),
    "rows of other experts": ("row", lambda t: t.flip(0).contiguous()),
    "choices of other rows": ("choice", lambda t: t.roll(1)),
}


@pytest.mark.parametrize("what", BAD_TENSORS)
def test_bad_tensors_are_refused_before_anything_is_sent(layer, what):
    name, change, message = BAD_TENSORS[what]
    if name == "x":
        layer.x = change(layer.x)
    else:
        where = "routing" if hasattr(layer.routing, name) else "experts"
        given = getattr(layer, where)
        setattr(layer, where, replace(given, **{name: change(getattr(given, name))}))
    refused(layer, message)


@pytest.mark.parametrize("what", BAD_ROUTING)
def test_bad_routing_is_refused_on_a_cpu(layer, what):
    name, change = BAD_ROUTING[what]
    layer.routing = replace(layer.routing, **{name: change(getattr(layer.routing, name).clone())})
    refused(layer, r"routing: got \d+ choices with a row and counts of -?\d+ rows, not the same ones")


def refused(layer: Layer, message: str) -> None:
    with pytest.raises(UserError, match=message):
        layer.run_forward()
    assert layer.forward._epoch.item() == 0
    assert not layer.forward._open
    assert layer.forward.rows.local.isnan().all()


@pytest.mark.parametrize("passes", [0, -1])
def test_no_pass_is_too_few(passes):
    with pytest.raises(UserError, match="passes"):
        make_exchange(virtual_memories(1)[0], "layer", CASE, passes=passes)


def test_rows_that_do_not_fit_are_an_error_and_nothing_is_put(layer):
    """12 rows come, 11 fit: told with layer, rank, needed and had; no number looks like an answer."""
    memory = layer.forward.memory
    layer.forward = make_exchange(memory, "layer 5", CASE, receive_rows=layer.routing.count.sum().item() - 1)
    layer.backward = make_exchange(memory, "way back", CASE, receive_rows=layer.forward.receive_rows)
    needed = layer.forward.receive_rows + 1
    with poisoned_buffers():
        out, saved = layer.run_forward()
        assert out.isnan().all()
        message = (
            rf"rows that PE 0 receives in layer 5, on PE 0: got {needed} \(nothing was sent\), "
            rf"expected at most {needed - 1}; set a larger receive_factor"
        )
        with pytest.raises(UserError, match=message):
            layer.forward.check()
        made = layer.run_backward(saved)
    for name in ("dx", "dw1", "dw2", "db1", "db2"):
        assert getattr(made, name).isnan().all(), name
    for exchange in (layer.forward, layer.backward):
        assert exchange.rows.local.isnan().all()
        assert exchange.results.local.isnan().all()
        assert not exchange.arrived.local.any()
        assert not exchange.buffers.poisoned.any()


@pytest.mark.long
def test_open_passes_share_the_room_and_the_one_that_lacks_it_is_an_error():
    """Three passes with room for two of them: the third fits when one has gone, wherever that lay."""
    (memory,) = virtual_memories(1)
    expected = make_layer(memory, "alone", CASE).run()
    rows = int(make_layer(memory, "counts", CASE).routing.count.sum())
    for number, gone in enumerate((0, 1)):
        layer = make_layer(memory, f"layer {number}", CASE)
        layer.forward = make_exchange(memory, f"three {number}", CASE, passes=3, room=2 * rows + rows // 2)
        with poisoned_buffers():
            passes = [layer.run_forward() for _ in range(2)]
            check_same(answer_of(passes[gone][0], layer.run_backward(passes[gone][1])), expected, "first")
            passes.append(layer.run_forward())
            # Room for one, where the other one went: here a hole before the others, there behind them.
            assert passes[2][1].opened.state.table[BASE.value] == (0, rows)[gone]
            layer.forward.check()
            for out, saved in (passes[1 - gone], passes[2]):
                check_same(answer_of(out, layer.run_backward(saved)), expected, "others")
            kept = [layer.run_forward() for _ in range(3)]
            assert kept[2][0].isnan().all()
            with pytest.raises(
                UserError, match=rf"got {rows} \(nothing was sent\), expected at most {rows // 2};"
            ):
                layer.forward.check()


@pytest.mark.long
def test_exchanges_share_what_only_a_launch_needs():
    """Passes of two layers, one open while the other runs; and once a wait has failed in one, all are NaN."""
    (memory,) = virtual_memories(1)
    alone = make_layer(memory, "alone", CASE).run()
    buffers = make_exchange(memory, "first", CASE).buffers
    layers = [make_layer(memory, name, CASE) for name in ("a", "b")]
    for layer in layers:
        layer.forward, layer.backward = (
            make_exchange(memory, f"{layer.forward.name} {way}", CASE, passes=1, buffers=buffers)
            for way in ("there", "back")
        )
    with poisoned_buffers():
        passes = [layer.run_forward() for layer in layers]
        for layer, (out, saved) in zip(layers, passes, strict=True):
            check_same(answer_of(out, layer.run_backward(saved)), alone, "while the other is open")
        buffers.poisoned.fill_(1)
        answer = layers[1].run()
    assert all(value.isnan().all() for value in (answer.out, answer.dx, answer.dweight))


def test_nothing_beyond_the_counts_reaches_an_answer(layer):
    """Saved values of no row, rows and results of no token: what they hold is never looked at."""
    with poisoned_buffers():
        expected = layer.run()
    for exchange in (layer.forward, layer.backward):
        exchange.rows.local.fill_(float("inf"))
        exchange.results.local.fill_(-7e30)
    out, saved = layer.run_forward()
    saved.pre[layer.routing.count.sum() :] = 3e33
    check_same(answer_of(out, layer.run_backward(saved)), expected, "beyond the counts")


def test_operands_that_are_not_aligned_for_descriptors(layer):
    buffer = torch.zeros(64)
    assert aligned(layer.forward, layer.experts, [], [buffer, None, buffer[4:]])
    assert not aligned(layer.forward, layer.experts, [], [buffer, buffer[1:]])
    odd = DenseGemm(torch.zeros(3, 2), torch.zeros(3, 4), torch.zeros(2, 4))
    assert not aligned(layer.forward, layer.experts, [odd], [])
