"""The emulator of Gluon: right kernels give right numbers in any order of events, wrong ones are caught."""

import pytest
import torch

from lancet_kernels.kernels.runtime import INTERPRETED

if not INTERPRETED:
    pytest.skip("the emulator is for machines without a GPU", allow_module_level=True)

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.grids import few_of
from tests.lancet_kernels.kernels.hopper import gluon_gemm
from tests.lancet_kernels.kernels.hopper.gluon_emulator import (
    Deadlock,
    EmulationError,
    Emulator,
    Misuse,
    Race,
)
from tests.lancet_kernels.kernels.hopper.gluon_emulator.shared_memory import offsets

M, N, K = 40, 48, 56
SEEDS = range(20)
FEW = range(6)


def descriptor(tensor: torch.Tensor, box: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.float16)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), box, layout)


def gemm_error(seed: int, edits: tuple = ()) -> float:
    """The greatest error of a product on two programs; the numbers are small integers, so it should be 0."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (
        torch.randint(-4, 5, shape, generator=generator).to(torch.float16)
        for shape in ((M, K), (K, N))
    )  # fmt: skip
    c = torch.full((M, N), float("nan"))
    emulator = Emulator(seed, edits)
    kernel = emulator.kernel(gluon_gemm.gemm_kernel)
    a_desc, b_desc = descriptor(a, [16, 16]), descriptor(b, [16, 16])
    emulator.run(lambda: kernel[(2,)](a_desc, b_desc, c, M, N, K, BM=16, BN=16, BK=16, STAGES=3))
    error = (c - a.float() @ b.float()).abs()
    return float(torch.where(error.isnan(), torch.inf, error).max())


@pytest.mark.parametrize("seed", few_of(SEEDS, *FEW))
def test_a_pipelined_product_is_right_in_any_order(seed):
    assert gemm_error(seed) == 0


def relayed(seed: int, edits: tuple = ()) -> bool:
    """Does what one program has stored and signalled reach the other?"""
    x = torch.arange(16 * 32, dtype=torch.float16).view(16, 32)
    middle, out = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    flag = torch.zeros(1, dtype=torch.int32)
    emulator = Emulator(seed, edits)
    kernel = emulator.kernel(gluon_gemm.relay_kernel)
    middle_desc = descriptor(middle, [16, 32])
    emulator.run(lambda: kernel[(2,)](x, middle, middle_desc, out, flag, N=32))
    return torch.equal(out, x)


def test_what_a_release_publishes_is_there_in_any_order():
    assert all(relayed(seed) for seed in FEW)


LOAD, MULTIPLY, RELAY = gluon_gemm.load_operands, gluon_gemm.multiply, gluon_gemm.relay_kernel
LAST_ARRIVE = "        mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)\n"
GEMM_MUTANTS = {
    "a stage is never released": (MULTIPLY, LAST_ARRIVE, "", Deadlock),
    "nobody waits for the loads": (
        MULTIPLY, "mbarrier.wait(full.index(place), (it // STAGES) & 1)", "pass", Race,
    ),
    "nobody waits for an empty stage": (
        LOAD, "mbarrier.wait(empty.index(place), ((it // STAGES) & 1) ^ 1)", "pass", (Race, Misuse),
    ),
    "the wrong phase of full": (
        MULTIPLY, "full.index(place), (it // STAGES) & 1", "full.index(place), ((it // STAGES) & 1) ^ 1",
        (Race, Deadlock),
    ),
    "the wrong phase of empty": (LOAD, "((it // STAGES) & 1) ^ 1", "(it // STAGES) & 1", Deadlock),
    "a stage is released before its product is waited for": (
        MULTIPLY, "empty.index((it + STAGES - 1) % STAGES), count=1, pred=k > 0",
        "empty.index(place), count=1, pred=k < K - BK", Race,
    ),
    "more bytes are expected than come": (LOAD, "(BM + BN) * BK * 2", "(BM + BN) * BK * 4", Deadlock),
    "fewer bytes are expected than come": (
        LOAD, "(BM + BN) * BK * 2", "BM * BK * 2", (Race, Deadlock, Misuse),
    ),
    "a partition stores what a product reads, without a fence": (
        MULTIPLY, "            acc = warpgroup_mma(a_bufs",
        "            b_bufs.index(place).store(b_bufs.index(place).load(MMA))\n"
        "            acc = warpgroup_mma(a_bufs",
        Misuse,
    ),
    "two arrivals where one is expected": (
        MULTIPLY, LAST_ARRIVE, LAST_ARRIVE + LAST_ARRIVE, (Race, Misuse, Deadlock),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GEMM_MUTANTS)
def test_a_mutant_of_the_product_is_caught(name):
    function, old, new, error = GEMM_MUTANTS[name]
    with pytest.raises(error):
        [gemm_error(seed, [(function, old, new)]) for seed in SEEDS]


def test_a_deadlock_says_who_waits_for_what():
    with pytest.raises(Deadlock) as caught:
        gemm_error(0, [(LOAD, "((it // STAGES) & 1) ^ 1", "(it // STAGES) & 1")])
    told = str(caught.value)
    assert "program 0, load_operands waits for parity 0 of empty[0] (phase 0: 1 of 1 arrivals missing" in told
    assert "program 1, multiply waits for parity 0 of full[0]" in told
    assert "gluon_gemm.py:" in told
    assert "mbarrier.wait(full.index(place)" in told


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("        device.fence_tma(True)\n", "", Misuse),
        ("        mbarrier.wait(arrived.index(0), 0)\n", "", Race),
        ('gl.atomic_xchg(flag_ptr, 1, sem="release", scope="gpu")', "pass", Deadlock),
    ],
)
def test_a_mutant_of_the_relay_is_caught(old, new, error):
    with pytest.raises(error):
        [relayed(seed, [(RELAY, old, new)]) for seed in SEEDS]


@pytest.mark.parametrize(("old", "new"), [("        barrier()\n", ""), ('sem="release"', 'sem="relaxed"')])
def test_what_is_not_published_is_missed(old, new):
    assert not all(relayed(seed, [(RELAY, old, new)]) for seed in SEEDS)


def test_an_order_is_reproducible():
    told = set()
    for _ in range(2):
        with pytest.raises(EmulationError) as caught:
            gemm_error(3, [(MULTIPLY, "mbarrier.wait(full.index(place), (it // STAGES) & 1)", "pass")])
        told.add(str(caught.value))
    assert len(told) == 1


@pytest.mark.parametrize("width", [16, 32, 64])
def test_halves_of_a_tile_are_the_tile_where_each_has_whole_chunks(width):
    """As on a GPU: 64 columns of 2 bytes are a chunk; narrower halves have a swizzle of their own."""
    whole, half = [16, 2 * width], [2, 16, width]
    layouts = [gl.NVMMASharedLayout.get_default_for(shape[-2:], gl.float16) for shape in (whole, half)]
    tile, halves = (offsets(shape, layout) for shape, layout in zip((whole, half), layouts, strict=True))
    assert sorted(tile.ravel()) == sorted(halves.ravel()) == list(range(32 * width))
    same = torch.equal(torch.tensor(tile), torch.cat([torch.tensor(h) for h in halves], dim=1))
    assert same == (width == 64)
