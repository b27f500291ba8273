"""PrimePar's primitives: collective-free, free of replicas, aligned; derived shifts as in the slides; wrong
formulas fail; and tiles that travel as derived give the product."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lancet_kernels.graph.rules.slices import (
    BACKWARD,
    FORWARD,
    GRADIENT,
    LINEAR,
    PHASES,
    Operand,
    Partition,
    Primitive,
    Product,
    all_reduces,
    begins_at_home,
    hand_over,
    home_square,
    moves,
    shifts,
    sources,
    split,
    square,
)
from tests.grids import few_of

I, W, O = Operand("I", ("m", "n")), Operand("W", ("n", "k")), Operand("O", ("m", "k"))  # noqa: E741
ALIGNMENTS = [
    (W, FORWARD, BACKWARD, False),
    (W, BACKWARD, FORWARD, True),
    (O, BACKWARD, GRADIENT, False),
    (I, FORWARD, GRADIENT, False),
    (W, GRADIENT, FORWARD, False),
]
"""Tensor (or gradient), end of which phase, begin of which; do tiles travel (slides: "W from right")?"""


def collective_free(partition: Partition) -> bool:
    """Every device's summed-over slices take all values over t, on the tile of the result that it holds."""
    return not any(all_reduces(partition, product) for product in LINEAR.values())


def replicas(partition: Partition, phase: str, tensor: Operand) -> int:
    """The number of devices that hold the same tile of a tensor at the first step."""
    tiles = partition.tiles(phase, tensor.dimensions, 0)
    return len(tiles) // len(set(tiles))


def free_of_replicas(partition: Partition) -> bool:
    tensors = [(phase, t) for phase, p in LINEAR.items() for t in (*p.operands, p.result)]
    return all(
        len(set(partition.tiles(phase, [d for d in tensor.dimensions if d != "b"], t))) == partition.devices
        for phase, tensor in tensors
        for t in range(partition.steps)
    )


def aligned(partition: Partition) -> bool:
    return all(
        moves(hand_over(partition, tensor, (before, -1), (after, 0))) == travels
        for tensor, before, after, travels in ALIGNMENTS
    )


def steps_of(partition: Partition) -> list[tuple[Operand, tuple[int, ...]]]:
    return [
        (tensor, step)
        for phase, p in LINEAR.items()
        for tensor in (*p.operands, p.result)
        for step in shifts(partition, phase, tensor)
    ]


def shifts_are_rings(partition: Partition) -> bool:
    """Between steps every tile goes to exactly one other device."""
    return all(sorted(step) == list(range(partition.devices)) for _, step in steps_of(partition))


def holds(partition: Partition) -> bool:
    """All of the above; a formula for which a tile is nowhere, or added twice, has none of it."""
    checks = (collective_free, free_of_replicas, aligned, shifts_are_rings)
    try:
        return all(check(partition) for check in checks)
    except AssertionError:
        return False


@pytest.mark.parametrize("k", [1, 2, 3])
def test_square_needs_no_collective_and_no_replica_and_hands_over(k: int) -> None:
    partition = Partition((square(k),))
    assert (partition.devices, partition.steps) == (4**k, 2**k)
    assert holds(partition)


FROM = {
    "nowhere": (0, 0),
    "right": (0, 1),
    "bottom": (1, 0),
    "right-top": (-1, 1),
    "bottom left": (1, -1),
    "bottom right": (1, 1),
}
"""Directions of the slides, as (rows down, columns to the right) of where a tile comes from."""
SLIDES = {
    (FORWARD, "I"): ["right"] * 3,
    (FORWARD, "W"): ["bottom"] * 3,
    (FORWARD, "O"): ["nowhere"] * 3,
    (BACKWARD, "dO"): ["right"] * 3,
    (BACKWARD, "W"): ["right-top"] * 3,
    (BACKWARD, "dI"): ["nowhere"] * 3,
    (GRADIENT, "I"): ["bottom left", "bottom left", "bottom"],
    (GRADIENT, "dO"): ["bottom", "bottom", "bottom right"],
    (GRADIENT, "dW"): ["nowhere", "nowhere", "right"],
}


def from_direction(direction: str, side: int) -> tuple[int, ...]:
    down, right = FROM[direction]
    return tuple((d // side + down) % side * side + (d % side + right) % side for d in range(side * side))


def test_derived_shifts_are_those_of_the_slides() -> None:
    partition = Partition((square(2),))
    for phase, product in LINEAR.items():
        for tensor in (*product.operands, product.result):
            derived = shifts(partition, phase, tensor)
            assert list(derived) == [from_direction(d, 4) for d in SLIDES[phase, tensor.name]]
    wrap = hand_over(partition, W, (BACKWARD, -1), (FORWARD, 0))
    assert wrap == from_direction("right", 4)


def mutant(primitive: Primitive, phase: str, dimension: str, change: dict[str, int]) -> Primitive:
    formulas = {p: dict(f) for p, f in primitive.formulas.items()}
    formulas[phase][dimension] = replace(formulas[phase][dimension], **change)
    return replace(primitive, formulas=formulas)


def hands_over_without_a_move(first: Partition, second: Partition) -> bool:
    """O of a layer lies where I of the next one begins, and dI of that where dO of the first one begins."""
    ways = (FORWARD, first, second), (BACKWARD, second, first)
    return all(
        one.tiles(phase, LINEAR[phase].result.dimensions, -1)
        == other.tiles(phase, LINEAR[phase].operands[0].dimensions, 0)
        for phase, one, other in ways
    )


def holds_at_home(partition: Partition, other: Partition) -> bool:
    """What a home square promises; `other` is the one that it alternates with."""
    try:
        return (
            collective_free(partition)
            and free_of_replicas(partition)
            and all(moves(step) == (tensor.name in ("I", "W", "dO")) for tensor, step in steps_of(partition))
            and shifts_are_rings(partition)
            and begins_at_home(partition)
            and not moves(hand_over(partition, W, (GRADIENT, -1), (FORWARD, 0)))
            and hands_over_without_a_move(partition, other)
            and hands_over_without_a_move(other, partition)
        )
    except AssertionError:
        return False


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_home_square_returns_nothing_and_hands_over_without_a_move(k: int) -> None:
    """Sums stay, operands move in rings, each phase begins with what a device keeps; the slides' square does
    not begin at home, and hands I over."""
    n, o = (Partition((home_square(k, skewed),)) for skewed in "nk")
    assert holds_at_home(n, o)
    assert holds_at_home(o, n)
    slides = Partition((square(k),))
    assert not begins_at_home(slides)
    assert not hands_over_without_a_move(slides, slides)


MUTANTS = {
    "forward N without the column": (FORWARD, "n", {"column": 0}),
    "forward N that stands still": (FORWARD, "n", {"step": 0}),
    "backward N without - 1": (BACKWARD, "n", {"constant": 0}),
    "backward K that runs backwards": (BACKWARD, "k", {"step": -1}),
    "gradient K without the last step's shift": (GRADIENT, "k", {"last_step": 0}),
    "gradient N without the last step's shift": (GRADIENT, "n", {"last_step": 0}),
    "gradient M that stands still": (GRADIENT, "m", {"step": 0}),
}
HOME_MUTANTS = {
    "forward N without the column": (FORWARD, "n", {"column": 0}),
    "forward N that stands still": (FORWARD, "n", {"step": 0}),
    "forward N that ends at home": (FORWARD, "n", {"constant": 1}),
    "backward K that runs backwards from elsewhere": (BACKWARD, "k", {"step": -1, "constant": -1}),
    "backward N of the slides": (BACKWARD, "n", {"constant": -1}),
    "gradient M that stands still": (GRADIENT, "m", {"step": 0}),
    "gradient K with the slides' last step": (GRADIENT, "k", {"constant": -1, "last_step": 1}),
}


def test_a_broken_formula_is_noticed() -> None:
    """With two slices - 1 and + 1 are the same: k = 2."""
    assert holds(Partition((square(2),)))
    for change in MUTANTS.values():
        assert not holds(Partition((mutant(square(2), *change),))), change
    other = Partition((home_square(2, "k"),))
    for change in HOME_MUTANTS.values():
        assert not holds_at_home(Partition((mutant(home_square(2, "n"), *change),)), other), change


Array = np.ndarray


def slice_of(whole: Array, tensor: Operand, partition: Partition, phase: str, device: int, t: int) -> tuple:
    """The index that takes a device's tile out of the whole tensor."""
    index = []
    for size, dimension in zip(whole.shape, tensor.dimensions, strict=True):
        width = size // partition.slices(dimension)
        begin = partition.slice(phase, dimension, device, t) * width
        index.append(slice(begin, begin + width))
    return tuple(index)


def tiles_of(whole: Array, tensor: Operand, partition: Partition, phase: str, t: int = 0) -> list[Array]:
    """Every device's tile of a tensor at one step."""
    devices = range(partition.devices)
    return [whole[slice_of(whole, tensor, partition, phase, d, t)] for d in devices]


def moved(tiles: list[Array], sources: tuple[int, ...]) -> list[Array]:
    return [tiles[source] for source in sources]


def run_phase(
    partition: Partition, product: Product, operands: list[list[Array]]
) -> tuple[list[Array], list[list[Array]]]:
    """Multiply tiles and shift them, step by step, and sum partial results.

    Args: operands: of each operand every device's tile at the first step.
    Returns: every device's tile of the result, and those of the operands, at the last step.
    """
    names = {d: chr(97 + n) for n, d in enumerate({d: 0 for o in product.operands for d in o.dimensions})}
    left, right = ("".join(names[d] for d in o.dimensions) for o in product.operands)
    equation = f"{left},{right}->{''.join(names[d] for d in product.result.dimensions)}"
    between = [shifts(partition, product.phase, tensor) for tensor in (*product.operands, product.result)]
    results: list[Array] = []
    for t in range(partition.steps):
        added = [np.einsum(equation, *pair) for pair in zip(*operands, strict=True)]
        results = [a + b for a, b in zip(results, added, strict=True)] if t else added
        if t + 1 < partition.steps:
            *operands, _ = [
                moved(tiles, sources[t]) for tiles, sources in zip([*operands, results], between, strict=True)
            ]
            results = moved(results, between[-1][t])
    summed = list(results)
    for group in all_reduces(partition, product):
        total = sum(results[device] for device in group)
        for device in group:
            summed[device] = total
    return summed, operands


def assembled(
    tiles: list[Array], like: Array, tensor: Operand, partition: Partition, phase: str, t: int
) -> Array:
    """The whole tensor; replicas must be alike."""
    whole = np.full_like(like, np.nan)
    for device, tile in enumerate(tiles):
        index = slice_of(like, tensor, partition, phase, device, t)
        assert np.isnan(whole[index]).all() or np.allclose(whole[index], tile, rtol=1e-12, atol=1e-12)
        whole[index] = tile
    assert not np.isnan(whole).any()
    return whole


SEQUENCES = [
    (square(1),),
    (split("n"), square(1)),
    (home_square(1, "k"), split("m")),
    (home_square(2, "n"),),
    (split("b"), split("n"), split("k")),
    (square(2),),
    (square(3),),
    (split("m"), split("n"), square(1)),
    (square(1), split("b"), split("k")),
    (square(1), square(1)),
    (split("m"), split("n"), split("k"), split("m")),
    (home_square(3, "k"),),
    (home_square(1, "n"), home_square(1, "k")),
    (square(1), home_square(1, "k")),
]


@pytest.mark.parametrize("partition", few_of(map(Partition, SEQUENCES), 0, 1, 2, 3, 4, 5), ids=str)
def test_emulated_devices_get_the_product(partition: Partition) -> None:
    """Forward, backward and gradient in fp64; every tile comes from where it was derived to come from."""
    rng = np.random.default_rng(0)
    sizes = {d: 2 * partition.slices(d) for d in "bmnk"}

    def whole(dimensions: str) -> np.ndarray:
        return rng.standard_normal([sizes[d] for d in dimensions])

    i, w, do = whole("bmn"), whole("nk"), whole("bmk")
    operand_i, operand_w = LINEAR[FORWARD].operands
    operand_do = LINEAR[BACKWARD].operands[0]
    i_tiles, w_tiles = tiles_of(i, operand_i, partition, FORWARD), tiles_of(w, operand_w, partition, FORWARD)
    kept = 0 if begins_at_home(partition) else -1
    home = i_tiles, w_tiles
    o_tiles, last = run_phase(partition, LINEAR[FORWARD], [i_tiles, w_tiles])
    i_tiles, w_tiles = last if kept else home
    w_tiles = moved(w_tiles, hand_over(partition, operand_w, (FORWARD, kept), (BACKWARD, 0)))
    do_tiles = tiles_of(do, operand_do, partition, BACKWARD)
    di_tiles, (last_do_tiles, w_tiles) = run_phase(partition, LINEAR[BACKWARD], [do_tiles, w_tiles])
    do_tiles = last_do_tiles if kept else do_tiles
    do_tiles = moved(do_tiles, hand_over(partition, operand_do, (BACKWARD, kept), (GRADIENT, 0)))
    i_tiles = moved(i_tiles, hand_over(partition, operand_i, (FORWARD, kept), (GRADIENT, 0)))
    dw_tiles, _ = run_phase(partition, LINEAR[GRADIENT], [i_tiles, do_tiles])
    w_tiles = moved(w_tiles, hand_over(partition, operand_w, (BACKWARD, -1), (FORWARD, 0)))

    results = (o_tiles, i @ w), (di_tiles, do @ w.T), (dw_tiles, np.einsum("bmn,bmk->nk", i, do))
    for phase, (tiles, expected) in zip(PHASES, results, strict=True):
        found = assembled(tiles, expected, LINEAR[phase].result, partition, phase, -1)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
    # The next forward finds the weight where it was.
    for tile, expected in zip(w_tiles, tiles_of(w, operand_w, partition, FORWARD), strict=True):
        np.testing.assert_array_equal(tile, expected)


def test_what_splits_have_to_sum_and_replicate() -> None:
    """Slides: a cut of N leaves partial O, a cut of K partial dI, of B and M partial dW; the operand without
    the dimension is on both devices."""
    expected = {"b": (GRADIENT, "W"), "m": (GRADIENT, "W"), "n": (FORWARD, "O"), "k": (BACKWARD, "I")}
    for dimension, (summing, copied) in expected.items():
        partition = Partition((split(dimension),))
        for phase, product in LINEAR.items():
            assert all_reduces(partition, product) == (((0, 1),) if phase == summing else ())
            for tensor in (*product.operands, product.result):
                is_copied = tensor.name.removeprefix("d") == copied
                assert replicas(partition, phase, tensor) == (2 if is_copied else 1)


def test_no_sources_of_what_no_device_holds() -> None:
    with pytest.raises(AssertionError, match=r"no device holds tile \(1,\), which device 1 needs"):
        sources([(0,), (0,)], [(0,), (1,)])
