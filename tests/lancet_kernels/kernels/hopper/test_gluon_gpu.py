"""The Hopper kernel on virtual PEs of one GPU: the numbers of the plain kernel, its rows bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lancet_kernels.errors import CommunicationError
from lancet_kernels.kernels.rehearsal import rehearsal
from tests.lancet_kernels.kernels.overlap_cases import Case
from tests.lancet_kernels.kernels.overlap_ranks import same_bits
from tests.lancet_kernels.kernels.virtual_pass import VirtualPass, assert_dense_right, assert_right

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="the kernel is for compute capability 9.0",
    ),
]
HALF, BRAIN = torch.float16, torch.bfloat16
GELU = Case(tokens=700, capacity=300, width=256, hidden=192, dtype=BRAIN)
# Tiles that end before a tile's columns do, several tiles of an expert, tiles of several sources.
CASES = {
    "gelu": (GELU, {}),
    "gelu, 1 PE": (replace(GELU, world=1), {}),
    "gelu, 4 PEs": (replace(GELU, world=4), {}),
    "swiglu": (Case(tokens=513, capacity=400, width=320, hidden=192, activation="swiglu", dtype=BRAIN), {}),
    "silu, no bias": (
        Case(tokens=300, capacity=300, width=512, hidden=576, activation="silu", bias=False, dtype=HALF),
        {},
    ),
    "many experts": (
        Case(local=16, tokens=300, choices=4, capacity=40, width=128, hidden=64, dtype=HALF),
        {},
    ),
    "one expert": (
        Case(tokens=600, choices=1, capacity=450, width=128, hidden=256, choose="one", dtype=BRAIN),
        {},
    ),
    "independent GEMMs": (GELU, {"dense": True}),
}
# Compiling takes most of the time that `make gpu` has.
FIRST = ("gelu", "swiglu", "independent GEMMs")


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> None:
    """All kernels of the chosen tests, compiled side by side."""
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    with rehearsal():
        for name in (params["name"] for params in chosen if params.get("name") in CASES):
            case, options = CASES[name]
            for bodies in ("triton", "gluon"):
                run = VirtualPass(case, torch.device("cuda"), bodies=bodies, **options)
                run.pes.each(run.play)
        torch.cuda.synchronize()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FIRST else pytest.mark.long) for name in CASES]
)
def test_as_the_plain_kernel(compiled: None, name: str) -> None:
    case, options = CASES[name]
    rows = {}
    for bodies in ("triton", "gluon"):
        run = VirtualPass(case, torch.device("cuda"), bodies=bodies, **options)
        for exchange in (*run.forwards, *run.backwards):
            # Behind the last row of an expert, and of all, lies what must not count.
            exchange.rows.local.fill_(float("nan"))
        run.pes.rehearse(run.play)
        for _ in range(3):
            answers = run.pes.each(run.play)
            run.check()
            assert_right(answers, case)
            assert_dense_right(run)
        rows[bodies] = [exchange.rows.local.clone() for exchange in (*run.forwards, *run.backwards)]
    for plain, hopper in zip(rows["triton"], rows["gluon"], strict=True):
        assert same_bits(plain, hopper), "rows, their places, or what lies beside them"


def test_the_same_every_time(compiled: None) -> None:
    """Twenty passes without a pause, bit for bit: PEs run ahead of one another, a pass for each bank."""
    run = VirtualPass(GELU, torch.device("cuda"), bodies="gluon")
    run.pes.rehearse(run.play)
    (first, *_) = run.pes.each(run.play)

    def often(rank: int) -> list:
        return [run.play(rank) for _ in range(20)]

    run.pes.rehearse(often)
    for again in run.pes.each(often)[0]:
        for name in ("out", "dx", "dw1", "dw2", "dweight"):
            assert torch.equal(getattr(again, name), getattr(first, name)), name
    run.check()


def test_a_pe_that_never_comes(compiled: None) -> None:
    run = VirtualPass(GELU, torch.device("cuda"), bodies="gluon", timeout_s=0.5)
    run.pes.rehearse(run.play)
    with run.pes.on(0):
        out, _saved = run.forward(0)
    torch.cuda.synchronize()
    with pytest.raises(CommunicationError, match="forward: PE 0 waited for PE 1"):
        run.forwards[0].check()
    assert out.isnan().any(), "results without their rows"
