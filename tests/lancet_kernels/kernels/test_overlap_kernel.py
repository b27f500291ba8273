"""The overlap kernel between processes, forward and backward: what travels bitwise, GEMMs against float64.

Every buffer starts as NaN between guard bands. Accuracy: at most twice the error of torch in the same dtype.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice, product

import pytest
import torch

from lancet_kernels.kernels.config import GemmConfig
from tests.lancet_kernels.kernels.overlap_cases import Answer, Case, check_accuracy
from tests.lancet_kernels.kernels.overlap_ranks import (
    GuardedMemory,
    answer_of,
    check_dense,
    check_rows,
    make_dense,
    make_layer,
    same_bits,
)
from tests.poisoned_buffers import poisoned_buffers

FP16, BF16 = torch.float16, torch.bfloat16
Work = list[tuple[Case, dict]]


def passes_on_rank(work: Work) -> list[Answer]:
    """One pass of each case."""
    made = []
    with closing(GuardedMemory(timeout_s=30)) as memory:
        for number, (case, options) in enumerate(work):
            changes = dict(options)
            dense = changes.pop("dense", False)
            with poisoned_buffers():
                layer = make_layer(memory, f"{number}", case, **changes)
                given = [t.clone() for t in layer.tensors()]
                layer.dense = make_dense(case.dtype) if dense else []
                out, saved = layer.run_forward()
                check_dense(layer.dense, f"{case} forward")
                for problem in layer.dense:
                    problem.c.fill_(float("nan"))
                made.append(answer_of(out, layer.run_backward(saved)))
                layer.check()
                check_dense(layer.dense, f"{case} backward")
            check_rows(layer)
            assert all(map(same_bits, given, layer.tensors())), f"{case}: an input was written"
            memory.check_guards()
        memory.barrier()
    return made


def prove(pool, ranks: int, work: Work, timeout_s: float = 120.0) -> None:
    answers = zip(*pool.run(passes_on_rank, work, ranks=ranks, timeout_s=timeout_s), strict=True)
    for (case, options), of_ranks in zip(work, answers, strict=True):
        check_accuracy(list(of_ranks), case, str(options))


DENSE = {"dense": True, "programs": 3}
THREE = {"programs": 3}
SMALL = {
    1: [
        (Case(world=1, local=3, activation="silu"), DENSE),
    ],
    2: [
        (Case(local=3, choose="few", uneven=True, activation="swiglu", dtype=FP16), DENSE),
        (Case(local=3, choices=4, tokens=17, capacity=17), {"programs": 2}),
    ],
    "1, more": [
        (Case(world=1, local=1, tokens=9, choices=1, dtype=FP16, activation="swiglu"), {}),
    ],
    "2, more": [
        (Case(tokens=0), {}),
        (Case(tokens=9, width=40, hidden=72, activation="swiglu"), {"gemm": GemmConfig(16, 64, 32, 1, 1)}),
        (Case(), DENSE),
        (Case(local=1, choices=1, tokens=17, capacity=17, width=37, hidden=29, dtype=FP16,
              activation="swiglu", bias=False), DENSE),
        (Case(local=8, choices=4, tokens=11, capacity=5, width=18, hidden=15, dtype=BF16), {}),
        (Case(tokens=1, choices=1, capacity=1), {}),
        (Case(local=1, tokens=35, choices=1, capacity=35, choose="one", dtype=BF16), DENSE),
        (Case(local=4, choices=5, capacity=9, choose="few", uneven=True, dtype=BF16), DENSE),
        (Case(local=4, choices=4, tokens=40, capacity=40, choose="one", activation="swiglu", dtype=FP16),
         THREE),
        (Case(local=2, choices=3, tokens=9, width=37, hidden=29), THREE | {"put_rows": 1, "put_block": 64}),
    ],
    4: [
        (Case(world=4, local=1, tokens=9, choices=3, dtype=BF16, activation="swiglu"), DENSE),
        (Case(world=4, tokens=7, capacity=2, choose="few", uneven=True, dtype=FP16), {}),
        (Case(world=4, local=3, tokens=17, choices=6, capacity=17), THREE),
    ],
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("cases", SMALL)
def test_passes(pool, cases):
    prove(pool, SMALL[cases][0][0].world, SMALL[cases])


def many() -> Iterator[tuple[Case, dict]]:
    """The long grid: what SMALL has not."""
    base = Case()
    every = product(("gelu", "silu", "swiglu"), (torch.float32, FP16, BF16))
    for number, (activation, dtype) in enumerate(every):
        yield replace(base, activation=activation, dtype=dtype, bias=number % 2 == 1), DENSE
    for local in (5, 6, 7):
        yield replace(base, local=local, choices=4, capacity=7, dtype=BF16), {}
    for tokens in (2, 15, 16, 33):
        sizes = {"tokens": tokens, "capacity": max(1, tokens)}
        yield replace(base, **sizes, width=17, hidden=33), {}
        yield replace(base, **sizes, width=48, hidden=16, dtype=FP16, activation="swiglu"), {}
    for choose in ("one", "few"):
        for capacity in (1, 16):
            yield replace(base, choose=choose, capacity=capacity, tokens=40, activation="swiglu"), DENSE


RANKS = (1, 2, 4)


@pytest.mark.long
@pytest.mark.parametrize("ranks", RANKS)
def test_the_whole_grid(pool, ranks):
    """Each case on one number of ranks, in turn."""
    work = [
        (replace(case, world=ranks, choices=min(case.choices, ranks * case.local)), options)
        for case, options in islice(many(), RANKS.index(ranks), None, 3)
    ]
    for start in range(0, len(work), 8):
        prove(pool, ranks, work[start : start + 8], timeout_s=600.0)
