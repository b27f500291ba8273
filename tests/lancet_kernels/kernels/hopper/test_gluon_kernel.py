"""The Hopper kernel, executed in the emulator: bit for bit the portable kernel, in any order of events.

Tiles are smaller than on a GPU, which changes no line of the kernel. What this alone finds: races, wrong
phases and missing fences inside a program, and between those of a PE. What it cannot: `emulator.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from lancet_kernels.kernels.runtime import INTERPRETED, recorded

if not INTERPRETED:
    pytest.skip("the emulator is for machines without a GPU", allow_module_level=True)

from lancet_kernels.errors import CommunicationError
from lancet_kernels.kernels.config import GemmConfig, OverlapConfig
from lancet_kernels.kernels.hopper import consumer, pipeline, signals
from lancet_kernels.kernels.hopper import kernel as hopper_kernel
from lancet_kernels.kernels.hopper.kernel import gluon_overlap_kernel
from lancet_kernels.kernels.protocol import device, steps, tasks
from lancet_kernels.kernels.symmetric import virtual_memories
from tests.grids import few_of
from tests.lancet_kernels.kernels.hopper.gluon_emulator.async_copies import product
from tests.lancet_kernels.kernels.hopper.gluon_emulator.emulator import Emulator
from tests.lancet_kernels.kernels.hopper.gluon_emulator.scheduler import Deadlock, EmulationError
from tests.lancet_kernels.kernels.overlap_cases import Answer, Case, check_accuracy
from tests.lancet_kernels.kernels.overlap_ranks import (
    CONFIG,
    Layer,
    check_dense,
    make_dense,
    same_bits,
    virtual_layers,
)

SMALL_TILE = GemmConfig(16, 32, 16, 4, 3)
# Both halves of a tile of swiglu must be a chunk of the widest swizzle or more: 64 columns.
PAIR_TILE = GemmConfig(16, 128, 64, 4, 2)
# Aligned for descriptors.
SIZES = ((24, 40, 56), (8, 72, 16), (40, 32, 8))  # M, N, K


@contextmanager
def emulated(emulator: Emulator) -> Iterator[None]:
    """Inside, launches with bodies="gluon" run in the emulator, with any tile and any widths. Products of
    both kernels have the same bits.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_kernel, "gluon_overlap_kernel", emulator.kernel(gluon_overlap_kernel))
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot)
        yield


def _dot(builder: Any, a: Any, b: Any, accumulator: Any, *precision: Any) -> Any:
    """tl.dot of the portable kernel, as the emulator multiplies."""
    result = product(a.data, b.data) + accumulator.data
    return interpreter.TensorHandle(result, accumulator.dtype.scalar)


def make_layers(case: Case, timeout_s: float = 600.0, **changes: Any) -> list[Layer]:
    """One for each PE, with a small tile, descriptors, and the bodies of the Hopper kernel.

    timeout_s: waits look at the clock, and a busy machine is slow. One that cannot end is a Deadlock before.
    """
    config = replace(CONFIG, **{"gemm": SMALL_TILE, "tma": True, "bodies": "gluon"} | changes)
    return virtual_layers(virtual_memories(case.world), case, config, timeout_s)


def play(
    case: Case,
    seed: int,
    *,
    passes: int = 1,
    dense: bool = False,
    edits: Sequence[tuple[Any, str, str]] = (),
    **changes: Any,
) -> list[Answer]:
    """Passes of all PEs at once, in the order of `seed`.

    Each pass has other tokens. No PE waits for another between them. -> answers, those of a PE together.
    """
    emulator, layers = Emulator(seed, edits), make_layers(case, **changes)
    for layer in layers:
        layer.dense = make_dense(case.dtype, SIZES) if dense else []
    with emulated(emulator):
        answers = emulator.run(*(partial(_passes, layer, passes) for layer in layers))
    for layer in layers:
        layer.check()
        check_dense(layer.dense, str(case))
    return [answer for of_pe in answers for answer in of_pe]


@functools.cache
def plain(case: Case) -> list[Answer]:
    """What the portable kernel gives, however it is launched."""
    return play(case, 0, bodies="triton")


def _passes(layer: Layer, passes: int) -> list[Answer]:
    answers = []
    for number in range(passes):
        layer.load(replace(layer.case, seed=layer.case.seed + number))
        answers.append(layer.run())
    return answers


def differences(a: Sequence[Answer], b: Sequence[Answer]) -> list[str]:
    """What of which answer differs in a bit; dweight, which kernels sum in different orders, in more."""

    def same(name: str, mine: Any, other: Any) -> bool:
        if name == "dweight" and mine.numel():
            return torch.allclose(mine, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))
        return same_bits(mine, other)

    return [
        f"{name} of answer {number}"
        for number, (mine, other) in enumerate(zip(a, b, strict=True))
        for name, value in vars(mine).items()
        if not same(name, value, getattr(other, name))
    ]


def verdict(expected: Sequence[Answer], case: Case, seed: int, **options: Any) -> str:
    """What is wrong with a pass: an error, or what differs from what is expected; "" if nothing."""
    try:
        answers = play(case, seed, **options)
    except (EmulationError, CommunicationError) as error:
        return f"{type(error).__name__}: {error}"
    return ", ".join(differences(answers, expected))


BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """An expert here has not 8 tiles, but several groups of 2."""
    monkeypatch.setattr(tasks, "GROUP", tl.constexpr(2))


TINY = Case(local=1, tokens=5, choices=1, capacity=5, width=16, hidden=16, dtype=BF16)
# So many orders of events show each of the mutants below, and nothing in the kernel as it is.
SEEDS = 20


def test_a_pass_gives_the_bits_of_the_plain_kernel():
    check_accuracy(plain(TINY), TINY)
    assert not differences(play(TINY, 1), plain(TINY))


def test_waits_for_a_pe_that_does_not_come_end_and_no_gradient_looks_like_a_number():
    layers = make_layers(TINY, timeout_s=0.2)
    emulator = Emulator(0, patience=None)

    def absent() -> None:
        """It exchanges counts, and no more."""
        with recorded(hopper_kernel.gluon_overlap_kernel):
            layers[1].run()

    with emulated(emulator):
        ours, _ = emulator.run(layers[0].run, absent)
    assert all(value.isnan().all() for value in (ours.out, ours.dw1, ours.db1, ours.dw2, ours.db2))
    # For rows of PE 1, or for the result of its own that needs them: both waits run out of time.
    with pytest.raises(CommunicationError, match="PE 0 waited for PE"):
        layers[0].check()


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "options"),
    [
        (Case(world=1, tokens=9, width=24, hidden=24, dtype=BF16, choose="few"), {"dense": True}),
        (Case(tokens=21, width=40, hidden=24, dtype=FP16, activation="silu", bias=False), {"programs": 2}),
        (Case(local=1, width=24, hidden=40, dtype=BF16, activation="swiglu"), {"gemm": PAIR_TILE}),
        (Case(local=1, tokens=40, capacity=40, width=24, hidden=24, dtype=BF16, choose="one"),
         {"programs": 3}),
        (Case(world=3, local=3, tokens=9, choices=4, width=24, hidden=16, dtype=BF16, uneven=True),
         {"programs": 2}),
    ],
    ids=lambda value: str(value) if isinstance(value, Case) else "-".join(value) or "one",
)  # fmt: skip
def test_any_pass_gives_the_bits_of_the_plain_kernel(case, options):
    expected = play(case, 0, **options | {"bodies": "triton"})
    check_accuracy(expected, case)
    for seed in range(3):
        assert not differences(play(case, seed, **options), expected), f"seed {seed}"


@pytest.mark.long
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_the_tile_of_a_gpu_gives_the_bits_of_the_plain_kernel(activation):
    case = Case(
        local=1, tokens=150, choices=1, capacity=150, width=128, hidden=192, activation=activation, dtype=BF16
    )
    config = OverlapConfig.for_gpu(case.width, case.hidden, case.dtype, 90, 1)
    options = {field.name: getattr(config, field.name) for field in fields(config)}
    expected = play(case, 0, **options | {"bodies": "triton"})
    check_accuracy(expected, case)
    assert not differences(play(case, 0, **options), expected)


@pytest.mark.long
def test_many_orders_give_the_same_bits():
    for seed in range(SEEDS):
        assert not differences(play(TINY, seed, programs=1 + seed % 2), plain(TINY)), f"seed {seed}"


@pytest.mark.long
def test_passes_that_reuse_banks_give_the_same_bits():
    expected = play(TINY, 0, bodies="triton", passes=4)
    for seed in range(2):
        assert not differences(play(TINY, seed, passes=4), expected), f"seed {seed}"


# (function, old text, new text): what is wrong, and must not pass unseen.
MUTANTS = {
    "a step of a put is stored before it has come": [
        (signals._put_rows, "async_copy.wait_group(const.PUT_SLOTS - 1)", "pass"),
    ],
    "rows are counted as sent before the barrier": [
        (device.quiet, "    tl.debug_barrier()\n    if", "    if"),
    ],
    "a chunk is signalled before all its parts": [(steps.finish_put, "== parts - 1", "== 0")],
    "parts are counted without release": [
        (steps.finish_put, 'sem="acq_rel"', 'sem="relaxed"'),
        (device.put_signal, 'sem="release"', 'sem="relaxed"'),
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
        (pipeline._load_out, "wait_ready(task.index, gl.cdiv(sizes.F, const.BN_IN), ptrs, sizes, const)",
         "True"),
    ],
    "a weight gradient does not wait for the first product": [
        (steps.wait_expert, "i < tl.cdiv(rows, const.BM), columns", "i < 0, columns"),
    ],
    "rows that arrived are loaded without a fence": [
        (steps.wait_rows, "    device.fence_tma(const.TMA)\n", ""),
    ],
    "a descriptor is built over one that is in use": [
        (pipeline._load_across, "        wait_for_loads(it, rings, const)\n", ""),
    ],
    "a stage is released before its product has been waited for": [
        (pipeline.multiply_steps, "empty.index((it + const.STAGES - 1) % const.STAGES), count=1, pred=k > 0",
         "empty.index(place), count=1, pred=k < steps - 1"),
    ],
    "a stage is never released": [(pipeline.multiply_steps, "pred=steps > 0", "pred=steps < 0")],
    "a stage is released twice": [
        (pipeline.multiply_steps, "count=1, pred=steps > 0", "count=2, pred=steps > 0"),
    ],
    "nobody waits for the loads": [
        (pipeline.multiply_steps, "mbarrier.wait(rings.full.index(place), (it // const.STAGES) & 1)", "pass"),
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
    "the consumers do not see the end": [
        (pipeline.produce, "    hand_over(j, rings, Task(NO_TASK",
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
    told = (verdict(plain(case), case, seed, edits=MUTANTS[name], **options) for seed in range(SEEDS))
    assert next(filter(None, told), ""), f"unseen: {name}"


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
