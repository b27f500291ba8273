"""Passes of the Hopper kernel on emulated PEs, all in one process and under one scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch

from lancet_kernels.errors import CommunicationError
from lancet_kernels.kernels import overlap_data
from lancet_kernels.kernels.config import GemmConfig
from lancet_kernels.kernels.hopper import kernel as hopper_kernel
from lancet_kernels.kernels.hopper.kernel import gluon_overlap_kernel
from lancet_kernels.kernels.symmetric import virtual_memories
from tests.lancet_kernels.kernels.hopper.gluon_emulator import EmulationError, Emulator
from tests.lancet_kernels.kernels.overlap_cases import Answer, Case
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


class _OnSomePes:
    """Stands for the kernel: PE `absent` launches nothing."""

    def __init__(self, kernel: Any, absent: int | None) -> None:
        self.kernel, self.absent, self.arg_names = kernel, absent, kernel.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda **given: None if given["rank"] == self.absent else self.kernel[grid](**given)


@contextmanager
def emulated(emulator: Emulator, absent: int | None = None) -> Iterator[None]:
    """Inside, launches with bodies="gluon" run in the emulator, with any tile and any widths."""
    kernel = _OnSomePes(emulator.kernel(gluon_overlap_kernel), absent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper_kernel, "gluon_overlap_kernel", kernel)
        patch.setattr(overlap_data, "check_gluon", lambda *_: None)
        yield


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
    backward: bool = True,
    dense: bool = False,
    edits: Sequence[tuple[Any, str, str]] = (),
    **changes: Any,
) -> list[Answer]:
    """Passes of all PEs at once, in the order of `seed`; without the backward only `out` is looked at.

    Each pass has other tokens. No PE waits for another between them. -> answers, those of a PE together.
    """
    emulator, layers = Emulator(seed, edits), make_layers(case, **changes)
    for layer in layers:
        layer.dense = make_dense(case.dtype, SIZES) if dense else []
    with emulated(emulator):
        answers = emulator.run(*(partial(_passes, layer, passes, backward) for layer in layers))
    for layer in layers:
        layer.check()
        check_dense(layer.dense, str(case))
    return [answer for of_pe in answers for answer in of_pe]


def _passes(layer: Layer, passes: int, backward: bool) -> list[Answer]:
    answers = []
    for number in range(passes):
        layer.load(replace(layer.case, seed=layer.case.seed + number))
        answers.append(layer.run() if backward else forward(layer))
    return answers


def forward(layer: Layer) -> Answer:
    return Answer(layer.run_forward()[0], *[None] * 6)


def differences(a: Sequence[Answer], b: Sequence[Answer]) -> list[str]:
    """What of which answer differs in a bit; dweight, which kernels sum in different orders, in more."""
    return [
        f"{field.name} of answer {number}"
        for field in fields(Answer)
        for number, (mine, other) in enumerate(zip(a, b, strict=True))
        if not _same(field.name, getattr(mine, field.name), getattr(other, field.name))
    ]


def _same(name: str, a: Any, b: Any) -> bool:
    if name == "dweight" and a is not None and b is not None:
        return torch.allclose(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()) if b.numel() else 0.0)
    return same_bits(a, b)


def verdict(expected: Sequence[Answer], case: Case, seed: int, **options: Any) -> str:
    """What is wrong with a pass: an error, or what differs from what is expected; "" if nothing."""
    try:
        answers = play(case, seed, **options)
    except (EmulationError, CommunicationError) as error:
        return f"{type(error).__name__}: {error}"
    return ", ".join(differences(answers, expected))
