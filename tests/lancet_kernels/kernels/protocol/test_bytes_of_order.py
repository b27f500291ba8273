"""How many bytes come from memory in the order of `tasks.py`? A model of L2: the least recently used goes.

132 programs take tasks in their order and multiply in step, 64 of the contraction at a time. 32 MB of an
H100's 50 MB of L2 hold operands and results; its ceilings are taken as 650 TFLOP/s and 2.9 TB/s. So what is
proven is about the order, not about a GPU.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.lancet_kernels.kernels.protocol import test_tasks as task_lists
from tests.lancet_kernels.kernels.protocol.test_tasks import (
    PUT,
    TILE_IN,
    WGRAD,
    LaunchShape,
    Routed,
    Task,
    in_groups,
    task_list,
)

PROGRAMS, L2_BYTES = 132, 32 * 2**20
FLOPS_A_SECOND, BYTES_A_SECOND = 650e12, 2.9e12
BM, BN, BK = 128, 256, 64
A_BYTES, B_BYTES = 2 * BM * BK, 2 * BK * BN  # of a step, in bfloat16


@dataclass(frozen=True)
class Layer:
    """rows: of each expert. D, F: widths of model and expert, with swiglu."""

    D: int
    F: int
    experts: int
    rows: int

    def tasks(self, backward: bool) -> list[Task]:
        routed = Routed(((self.rows,) * self.experts,), self.experts, BM)
        columns_in = self.F // (BN if backward else BN // 2)
        # The Hopper kernel claims ahead: its lag is that of twice as many programs.
        shape = LaunchShape(columns_in, self.D // BN, backward, programs=2 * PROGRAMS)
        wgrads = [
            (WGRAD, which, expert, m, n)
            for which, (A, B) in enumerate(((self.F, self.D), (self.D, 2 * self.F)))
            for expert in range(self.experts)
            for m, n in in_groups(A // BM, B // BN)
        ]
        listed = task_list(routed, 0, shape, wgrads=wgrads if backward else [])
        return [task for task in listed if task[0] != PUT]

    def operands(self, task: Task, backward: bool) -> tuple[tuple, tuple, int, int]:
        """-> what its loads are of, how many steps it has, and how many bytes it writes."""
        kind, n = task[0], task[-1]
        if kind == WGRAD:
            _, which, expert, m, n = task
            return (kind, which, expert, m), (kind, "dy", which, expert, n), self.rows // BK, 2 * BM * BN
        expert = task[1] // -(-self.rows // BM)
        steps = self.D if kind == TILE_IN else 2 * self.F if backward else self.F
        # hidden and what is before the activation: of each 128 columns, 128 and 256.
        written = BM * BN * (3 if kind == TILE_IN else 2)
        return (kind, task[1]), (kind, "w", expert, n), steps // BK, written

    def seconds(self, backward: bool) -> tuple[float, float]:
        """-> of the products, and of the bytes."""
        cached: OrderedDict[tuple, int] = OrderedDict()
        used = moved = steps_done = 0

        def touch(key: tuple, size: int) -> None:
            nonlocal used, moved
            if key in cached:
                cached.move_to_end(key)
                return
            moved += size
            used += size
            cached[key] = size
            while used > L2_BYTES:
                used -= cached.popitem(last=False)[1]

        waiting = iter(self.tasks(backward))

        def program() -> Iterator[int]:
            """1 for each step."""
            for task in waiting:
                a, b, steps, written = self.operands(task, backward)
                for step in range(steps):
                    touch((*a, step), A_BYTES)
                    touch((*b, step), B_BYTES)
                    if step == steps - 1:
                        touch(("result", *task), written)
                    yield 1

        programs = [program() for _ in range(PROGRAMS)]
        while steps := sum(next(each, 0) for each in programs):
            steps_done += steps
        return 2 * BM * BN * BK * steps_done / FLOPS_A_SECOND, moved / BYTES_A_SECOND


MIXTRAL, QWEN3_30B = Layer(4096, 14336, 1, 2048), Layer(2048, 768, 3, 2048)


@pytest.mark.parametrize("layer", [MIXTRAL, QWEN3_30B], ids=["Mixtral", "Qwen3-30B"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_products_take_longer_than_bytes(layer: Layer, backward: bool) -> None:
    products, moved = layer.seconds(backward)
    print(f"{1e3 * products:.2f} ms of products, {1e3 * moved:.2f} ms of bytes")
    assert moved < 0.75 * products


def test_row_by_row_bytes_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What groups are for: without them Mixtral's forward waits for memory."""
    monkeypatch.setattr(task_lists, "GROUP", 1)
    products, moved = MIXTRAL.seconds(backward=False)
    print(f"{1e3 * products:.2f} ms of products, {1e3 * moved:.2f} ms of bytes")
    assert moved > products
