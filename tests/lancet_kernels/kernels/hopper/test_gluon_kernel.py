"""The Hopper kernel, executed in the emulator: bit for bit the portable kernel, in any order of events.

Tiles are smaller than on a GPU, which changes no line of the kernel. What the emulator cannot show is said
in its docstring.
"""

from dataclasses import fields
from functools import partial

import pytest
import torch
import triton.language as tl
from triton.experimental.gluon import language as gl

from lancet_kernels.kernels.runtime import INTERPRETED

if not INTERPRETED:
    pytest.skip("the emulator is for machines without a GPU", allow_module_level=True)

from lancet_kernels.errors import CommunicationError
from lancet_kernels.kernels.config import OverlapConfig
from lancet_kernels.kernels.hopper import consumer, copies, pipeline, producer, signals
from lancet_kernels.kernels.protocol import device, steps, tasks
from tests.grids import few_of
from tests.lancet_kernels.kernels.hopper.gluon_emulator import Deadlock, Emulator
from tests.lancet_kernels.kernels.hopper.gluon_emulator.shared_memory import offsets
from tests.lancet_kernels.kernels.hopper.gluon_passes import (
    PAIR_TILE,
    differences,
    emulated,
    forward,
    make_layers,
    play,
    verdict,
)
from tests.lancet_kernels.kernels.overlap_cases import Case, check_accuracy

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """An expert here has not 8 tiles, but several groups of 2."""
    monkeypatch.setattr(tasks, "GROUP", tl.constexpr(2))


TINY = Case(local=1, tokens=5, choices=1, capacity=5, width=16, hidden=16, dtype=BF16)
ODD = Case(width=24, hidden=40, dtype=BF16)


def test_forward_gives_the_bits_of_the_plain_kernel():
    case = Case(tokens=5, choices=1, capacity=5, width=24, hidden=16, dtype=BF16)
    plain = play(case, 0, bodies="triton", backward=False)
    assert not differences(play(case, 0, backward=False), plain)


def test_a_pass_gives_the_bits_of_the_plain_kernel():
    plain = play(TINY, 0, bodies="triton")
    check_accuracy(plain, TINY)
    assert not differences(play(TINY, 1), plain)


def test_waits_for_a_pe_that_does_not_come_end():
    layers = make_layers(TINY, timeout_s=0.2)
    emulator = Emulator(0, patience=None)
    with emulated(emulator, absent=1):
        answers = emulator.run(*(partial(forward, layer) for layer in layers))
    assert answers[0].out.isnan().all()
    # For rows of PE 1, or for the result of its own that needs them: both waits run out of time.
    with pytest.raises(CommunicationError, match="PE 0 waited for PE"):
        layers[0].check()


def test_weight_gradients_of_rows_that_do_not_come_are_nan():
    layers = make_layers(TINY, timeout_s=0.2)
    emulator = Emulator(0, patience=None)
    with emulated(emulator, absent=1):
        answers = emulator.run(*(layer.run for layer in layers))
    ours = answers[0]
    assert all(gradient.isnan().all() for gradient in (ours.dw1, ours.db1, ours.dw2, ours.db2))


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "options"),
    [
        (Case(world=1, width=24, hidden=24, dtype=BF16), {}),
        (ODD, {}),
        (Case(tokens=21, width=40, hidden=24, dtype=FP16, activation="silu", bias=False), {"programs": 2}),
        (Case(local=1, width=24, hidden=40, dtype=BF16, activation="swiglu"), {"gemm": PAIR_TILE}),
        (Case(local=1, tokens=40, capacity=40, width=24, hidden=24, dtype=BF16, choose="one"),
         {"programs": 3}),
        (Case(world=3, local=1, tokens=9, width=24, hidden=24, dtype=BF16, uneven=True), {}),
        (Case(local=1, tokens=9, width=16, hidden=24, dtype=BF16, choose="few"), {"dense": True}),
        (Case(local=3, tokens=21, choices=4, capacity=21, width=24, hidden=16, dtype=BF16),
         {"programs": 2}),
    ],
    ids=lambda value: str(value) if isinstance(value, Case) else "-".join(value) or "one",
)  # fmt: skip
def test_any_pass_gives_the_bits_of_the_plain_kernel(case, options):
    plain = play(case, 0, **options | {"bodies": "triton"})
    check_accuracy(plain, case)
    for seed in range(5):
        assert not differences(play(case, seed, **options), plain), f"seed {seed}"


@pytest.mark.long
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_the_tile_of_a_gpu_gives_the_bits_of_the_plain_kernel(activation):
    case = Case(
        local=1, tokens=150, choices=1, capacity=150, width=128, hidden=192, activation=activation, dtype=BF16
    )
    config = OverlapConfig.for_gpu(case.width, case.hidden, case.dtype, 90, 1)
    options = {field.name: getattr(config, field.name) for field in fields(config)}
    plain = play(case, 0, **options | {"bodies": "triton"})
    check_accuracy(plain, case)
    for seed in range(2):
        assert not differences(play(case, seed, **options), plain), f"seed {seed}"


@pytest.mark.long
def test_many_orders_give_the_same_bits():
    plain = play(TINY, 0, bodies="triton")
    for seed in range(60):
        assert not differences(play(TINY, seed, programs=1 + seed % 2), plain), f"seed {seed}"


@pytest.mark.long
def test_passes_that_reuse_banks_give_the_same_bits():
    plain = play(TINY, 0, bodies="triton", passes=4)
    for seed in range(5):
        assert not differences(play(TINY, seed, passes=4), plain), f"seed {seed}"


LAST_ARRIVE = (
    "mbarrier.arrive(rings.empty.index((it + const.STAGES - 1) % const.STAGES), count=1, pred=steps > 0)\n"
)
# (function, old text, new text): what is wrong, and must not pass unseen.
MUTANTS = {
    "rows are counted as sent before the barrier": [
        (device.quiet, "    tl.debug_barrier()\n    if", "    if"),
    ],
    "a chunk is signalled before all its parts": [
        (steps.finish_put, "== parts - 1", "== 0"),
    ],
    "parts are counted without release": [
        (steps.finish_put, 'sem="acq_rel"', 'sem="relaxed"'),
        (device.put_signal, 'sem="release"', 'sem="relaxed"'),
    ],
    "a tile is signalled before it is stored": [
        (signals.signal, "        mbarrier.wait(rings.stored.index(place), (j // TASKS) & 1)\n", ""),
    ],
    "a tile counts as stored before it is": [
        (consumer.consume, "        mbarrier.arrive(rings.stored.index(j % TASKS), count=1)\n", ""),
        (consumer.consume, "        if kind == TILE_IN:\n",
         "        mbarrier.arrive(rings.stored.index(j % TASKS), count=1)\n        if kind == TILE_IN:\n"),
    ],
    "a tile is signalled when the next task is there": [
        (signals.signal, "        if kind == tasks.TILE_IN:\n",
         "        await_task(j + 1, rings, 1)\n        if kind == tasks.TILE_IN:\n"),
    ],
    "results are stored before it is known where": [
        (consumer._finish_rest,
         "    mbarrier.wait(rings.targets_full.index(j % TASKS), (j // TASKS) & 1)\n", ""),
    ],
    "a column is counted as ready without release": [
        (steps.finish_ready, 'tile, 1, sem="release"', 'tile, 1, sem="relaxed"'),
    ],
    "results are counted without release": [
        (steps.return_tile, 'sem="acq_rel"', 'sem="relaxed"'),
        (device.put_signal, 'sem="release"', 'sem="relaxed"'),
    ],
    "a tile does not wait for its rows": [
        (steps.wait_rows, "    return here\n", "    return here | True\n"),
        (steps.wait_rows, "schedule.in_tile(count, before, m, const.BM), word", "i_w < 0, word"),
    ],
    "the second product does not wait for the first": [
        (producer._load_out, "wait_ready(task.index, gl.cdiv(sizes.F, const.BN_IN), ptrs, sizes, const)",
         "True"),
    ],
    "a weight gradient does not wait for the first product": [
        (steps.wait_expert, "i < tl.cdiv(rows, const.BM), columns", "i < 0, columns"),
    ],
    "rows that arrived are loaded without a fence": [
        (steps.wait_rows, "    device.fence_tma(const.TMA)\n", ""),
    ],
    "a descriptor is built over one that is in use": [
        (producer._load_across, "        wait_for_loads(it, rings, const)\n", ""),
    ],
    "a stage is released before its product has been waited for": [
        (pipeline.multiply_steps, "empty.index((it + const.STAGES - 1) % const.STAGES), count=1, pred=k > 0",
         "empty.index(place), count=1, pred=k < steps - 1"),
    ],
    "a stage is never released": [
        (pipeline.multiply_steps, "    " + LAST_ARRIVE, ""),
    ],
    "a stage is released twice": [
        (pipeline.multiply_steps, "    " + LAST_ARRIVE, 2 * ("    " + LAST_ARRIVE)),
    ],
    "nobody waits for the loads": [
        (pipeline.multiply_steps, "mbarrier.wait(rings.full.index(place), (it // const.STAGES) & 1)", "pass"),
    ],
    "the wrong phase of full": [
        (pipeline.multiply_steps, "(it // const.STAGES) & 1)", "((it // const.STAGES) & 1) ^ 1)"),
    ],
    "nobody waits for an empty stage": [
        (pipeline.load_steps, "mbarrier.wait(rings.empty.index(place), ((it // const.STAGES) & 1) ^ 1)",
         "pass"),
    ],
    "the wrong phase of empty": [
        (pipeline.load_steps, "((it // const.STAGES) & 1) ^ 1", "(it // const.STAGES) & 1"),
    ],
    "more bytes are expected than come": [
        (pipeline.load_steps, "* const.BK * element_bytes", "* const.BK * 2 * element_bytes"),
    ],
    "fewer bytes are expected than come": [
        (pipeline.load_steps, "(const.BM + const.BN) * const.BK", "const.BM * const.BK"),
    ],
    "a task is handed over into a place that is taken": [
        (pipeline.hand_over, "mbarrier.wait(rings.task_empty.index(place), ((j // TASKS) & 1) ^ 1)", "pass"),
    ],
    "a place is given back before the task is read": [
        (signals.signal, "        mbarrier.arrive(rings.task_empty.index(place), count=1)\n", ""),
        (signals.signal, "        place = j % TASKS\n",
         "        place = j % TASKS\n        mbarrier.arrive(rings.task_empty.index(place), count=1)\n"),
    ],
    "a step of a put is stored before it has come": [
        (copies._put_rows, "async_copy.wait_group(const.PUT_SLOTS - 1)", "pass"),
    ],
    "the consumers do not see the end": [
        (producer.produce, "    hand_over(j, rings, Task(NO_TASK",
         "    if i < 0:\n        hand_over(j, rings, Task(NO_TASK"),
    ],
}  # fmt: skip


# four steps
DEEP = Case(local=1, tokens=5, choices=1, capacity=5, width=64, hidden=16, dtype=BF16)
# What only another case, or more programs, can show.
CASES = {
    "rows are counted as sent before the barrier": (TINY, {"programs": 2}),
    "a stage is released before its product has been waited for": (DEEP, {}),
    "nobody waits for an empty stage": (DEEP, {}),
    "a weight gradient does not wait for the first product": (TINY, {"programs": 2}),
}


def test_mutants_are_of_the_sources_as_they_are():
    for edits in MUTANTS.values():
        emulator = Emulator(edits=edits)
        for function, _, _ in edits:
            emulator.sources.function(function)


@pytest.mark.parametrize("name", few_of(MUTANTS))
def test_a_mutant_is_caught(name):
    case, options = CASES.get(name, (TINY, {}))
    plain = play(case, 0, **options | {"bodies": "triton"})
    found = (verdict(plain, case, seed, edits=MUTANTS[name], **options) for seed in range(20))
    assert next(filter(None, found), ""), f"unseen: {name}"


def test_a_deadlock_says_who_waits_for_what_and_an_order_is_reproducible():
    told = set()
    for _ in range(2):
        with pytest.raises(Deadlock) as caught:
            play(TINY, 0, edits=MUTANTS["the wrong phase of empty"])
        told.add(str(caught.value))
    (told,) = told
    assert "produce waits for parity 0 of empty[0] (phase 0: 1 of 1 arrivals missing" in told
    assert "consume waits for parity 0 of full[0]" in told
    assert "pipeline.py:" in told
    assert "mbarrier.wait(rings.full.index(place)" in told


@pytest.mark.parametrize("width", [16, 32, 64])
def test_halves_of_a_tile_are_the_tile_where_each_has_whole_chunks(width):
    """As on a GPU: 64 columns of 2 bytes are a chunk; narrower halves have a swizzle of their own."""
    whole, half = [16, 2 * width], [2, 16, width]
    layouts = [gl.NVMMASharedLayout.get_default_for(shape[-2:], gl.float16) for shape in (whole, half)]
    tile, halves = (offsets(shape, layout) for shape, layout in zip((whole, half), layouts, strict=True))
    assert sorted(tile.ravel()) == sorted(halves.ravel()) == list(range(32 * width))
    same = torch.equal(torch.tensor(tile), torch.cat([torch.tensor(h) for h in halves], dim=1))
    assert same == (width == 64)
