"""The devices of a partition, emulated in numpy: tiles travel as `graph.rules.slices` derives it, not
otherwise."""

from __future__ import annotations

import numpy as np

from lancet_kernels.graph.rules.slices import (
    Operand,
    Partition,
    Product,
    all_reduces,
    hand_over,
    shifts,
)

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


def handed_over(
    tiles: list[Array], tensor: Operand, partition: Partition, before: tuple[str, int], after: tuple[str, int]
) -> list[Array]:
    """The tiles of one phase's step as another one wants them."""
    return moved(tiles, hand_over(partition, tensor, before, after))


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
