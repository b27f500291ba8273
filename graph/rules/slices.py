"""Spatial-temporal partitions: the slice of each dimension that a device computes at each step, and the
communication that follows from it. (PrimePar, ASPLOS '24, slides "Tensor Partition Notations" to "Gradient
step t = 3")

A *dimension slice index* is a formula of the device (row r, column c), the step t and the phase; a
*primitive* is the set of these formulas for a few bits of the device's number; a `Partition` is a sequence of
primitives. Communication follows from comparing slices: the shifts of tiles between steps, the sums of
partial results, and the transfers of tensors between phases.

    B batch    M rows    N features in, summed over in the forward    K features out
    O[B, M, K] = I[B, M, N] W[N, K]

Example, `square(1)` (2 x 2 devices, 2 steps): in the forward I_N = r + c + t, so device (0, 0) multiplies
slices 0 and 1 of N one after the other, and gets its second tiles of I and W from (0, 1) and (1, 0), which
used them first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise

FORWARD, BACKWARD, GRADIENT = "forward", "backward", "gradient"
PHASES = (FORWARD, BACKWARD, GRADIENT)

Tile = tuple[int, ...]
"""The slice index of each dimension of a tensor."""
Sources = tuple[int, ...]
"""For each device, the device that its next tile comes from; itself if it already holds the tile."""


@dataclass(frozen=True)
class SliceIndex:
    """row * r + column * c + step * t + constant + last_step * delta(t, last), modulo the slices."""

    row: int = 0
    column: int = 0
    step: int = 0
    constant: int = 0
    last_step: int = 0

    def at(self, r: int, c: int, t: int, slices: int, steps: int) -> int:
        """The slice of device (r, c) at step t of `steps`."""
        value = self.row * r + self.column * c + self.step * t + self.constant
        return (value + self.last_step * (t == steps - 1)) % slices


Formulas = Mapping[str, Mapping[str, SliceIndex]]
"""The formulas by phase, then by dimension."""


@dataclass(frozen=True)
class Primitive:
    """The division of an operator by some bits of the device index; dimensions without formula are whole."""

    name: str
    row_bits: int
    column_bits: int
    steps: int
    formulas: Formulas = field(hash=False)

    @property
    def bits(self) -> int:
        return self.row_bits + self.column_bits

    @property
    def slices(self) -> int:
        """The number of slices of each dimension that it cuts."""
        return 1 << self.row_bits

    @cached_property
    def dimensions(self) -> frozenset[str]:
        """The dimensions that are cut."""
        return frozenset(d for formulas in self.formulas.values() for d in formulas)

    def slice(self, phase: str, dimension: str, device: int, t: int) -> int:
        """The slice of a device at step t. Args: device: its bits for this primitive only, row before
        column."""
        r, c = device >> self.column_bits, device & ((1 << self.column_bits) - 1)
        return self.formulas[phase][dimension].at(r, c, t, self.slices, self.steps)

    def __str__(self) -> str:
        return self.name


def split(dimension: str) -> Primitive:
    """The spatial primitive: one bit of the device's number cuts one dimension into two, in every phase."""
    formulas = {phase: {dimension: SliceIndex(row=1)} for phase in PHASES}
    return Primitive(dimension.upper(), 1, 0, 1, formulas)


def replicate() -> Primitive:
    """The primitive of one bit that cuts nothing: both devices compute the same, as in Megatron between its
    split layers."""
    return Primitive("1", 1, 0, 1, {phase: {} for phase in PHASES})


def square(k: int) -> Primitive:
    """P(2^k x 2^k): a square of 4^k devices, 2^k steps, no collectives and no replicas (slide "Novel
    Spatial-temporal Tensor Partition Primitive")."""
    own_row, own_column = SliceIndex(row=1), SliceIndex(column=1)
    formulas = {
        FORWARD: {"m": own_row, "n": SliceIndex(row=1, column=1, step=1), "k": own_column},
        BACKWARD: {
            "m": own_row,
            "n": SliceIndex(row=1, column=1, constant=-1),
            "k": SliceIndex(column=1, step=1),
        },
        GRADIENT: {
            "m": SliceIndex(row=1, step=1),
            "n": SliceIndex(row=1, column=1, constant=-1, last_step=1),
            "k": SliceIndex(column=1, constant=-1, last_step=1),
        },
    }
    return Primitive(f"P{1 << k}x{1 << k}", k, k, 1 << k, formulas)


def home_square(k: int, skewed: str) -> Primitive:
    """P(2^k x 2^k) in which every phase begins with the tiles that a device keeps between the phases: its
    *home*. Not in the slides.

    As in `square` there are no collectives and no replicas. In the slides a phase begins with the tiles that
    the one before ended with, so that weights travel on and dW has to follow them; here a phase ends with
    tiles that are thrown away, so nothing has to be aligned and backward and gradient may take turns. For it,
    a device keeps its first tile of dO through the backward.

    Args: skewed: "n" or "k", the dimension of which device (r, c) begins with slice r + c; of the other one
        with slice c. The result of a layer skewed in k lies where one skewed in n begins, and the other way
        round: nothing travels between layers that alternate.
    """
    r, c, skew = SliceIndex(row=1), SliceIndex(column=1), SliceIndex(row=1, column=1)
    n, o = (skew, c) if skewed == "n" else (c, skew)
    formulas = {
        FORWARD: {"m": r, "n": replace(n, step=1), "k": o},
        BACKWARD: {"m": r, "n": n, "k": replace(o, step=1)},
        GRADIENT: {"m": replace(r, step=1), "n": n, "k": o},
    }
    return Primitive(f"P{1 << k}x{1 << k} skewed {skewed}", k, k, 1 << k, formulas)


@dataclass(frozen=True)
class Partition:
    """A sequence of primitives, each for the next bits of the device's number, starting with the slowest
    (node).

    Steps are nested: those of the first primitive are the outermost loop. A dimension that several primitives
    cut is cut recursively, by the first one into the largest slices.
    """

    primitives: tuple[Primitive, ...] = ()

    @cached_property
    def bits(self) -> int:
        return sum(p.bits for p in self.primitives)

    @property
    def devices(self) -> int:
        return 1 << self.bits

    @cached_property
    def steps(self) -> int:
        """The number of steps of each phase."""
        return math.prod(p.steps for p in self.primitives)

    def slices(self, dimension: str) -> int:
        """The number of slices of a dimension."""
        return math.prod(p.slices for p in self.primitives if dimension in p.dimensions)

    def slice(self, phase: str, dimension: str, device: int, t: int) -> int:
        """The slice that a device computes at step t of a phase; negative steps count from the end."""
        index, bits, steps, t = 0, self.bits, self.steps, t % self.steps
        for primitive in self.primitives:
            bits, steps = bits - primitive.bits, steps // primitive.steps
            if dimension in primitive.dimensions:
                own, now = (device >> bits) % (1 << primitive.bits), (t // steps) % primitive.steps
                index = index * primitive.slices + primitive.slice(phase, dimension, own, now)
        return index

    def tiles(self, phase: str, dimensions: Sequence[str], t: int) -> tuple[Tile, ...]:
        """The tiles of all devices."""
        if not dimensions:
            return ((),) * self.devices
        return tuple(zip(*(_slices_at(self, phase, d, t % self.steps) for d in dimensions), strict=True))

    def __str__(self) -> str:
        """As in the slides. Example: `{N, P2x2}`."""
        return "{" + ", ".join(map(str, self.primitives)) + "}"


@lru_cache(maxsize=100_000)
def _slices_at(partition: Partition, phase: str, dimension: str, t: int) -> tuple[int, ...]:
    """The slices of all devices."""
    return tuple(partition.slice(phase, dimension, device, t) for device in range(partition.devices))


@dataclass(frozen=True)
class Operand:
    """A tensor of an operator, with the names of its dimensions."""

    name: str
    dimensions: tuple[str, ...]


@dataclass(frozen=True)
class Product:
    """The computation of a phase: the product of the operands, summed over the dimensions that the result
    does not have."""

    phase: str
    result: Operand
    operands: tuple[Operand, ...]

    @cached_property
    def summed(self) -> tuple[str, ...]:
        """The dimensions summed over."""
        every = dict.fromkeys(d for operand in self.operands for d in operand.dimensions)
        return tuple(d for d in every if d not in self.result.dimensions)


_I, _W, _O = ("b", "m", "n"), ("n", "k"), ("b", "m", "k")
LINEAR = {
    FORWARD: Product(FORWARD, Operand("O", _O), (Operand("I", _I), Operand("W", _W))),
    BACKWARD: Product(BACKWARD, Operand("dI", _I), (Operand("dO", _O), Operand("W", _W))),
    GRADIENT: Product(GRADIENT, Operand("dW", _W), (Operand("I", _I), Operand("dO", _O))),
}
"""The product of each phase of a linear layer: O = I W, dI = dO W, dW = I dO."""


def sources(held: Sequence[Tile], needed: Sequence[Tile]) -> Sources:
    """For each device, the nearest device that holds the tile it needs, which there must be."""
    holders: dict[Tile, list[int]] = defaultdict(list)
    for device, tile in enumerate(held):
        holders[tile].append(device)
    for device, tile in enumerate(needed):
        assert tile in holders, f"no device holds tile {tile}, which device {device} needs"
    return tuple(nearest(holders[tile], device) for device, tile in enumerate(needed))


def nearest(holders: Iterable[int], device: int) -> int:
    """The one of several devices whose number shares the most leading bits with that of `device`: itself, if
    it is one of them."""
    # The exclusive or is smallest where the leading bits agree.
    return min(holder ^ device for holder in holders) ^ device


def moves(source_of: Sequence[int]) -> bool:
    """Does any tile move to another device?"""
    return any(source != device for device, source in enumerate(source_of))


@lru_cache(maxsize=100_000)
def shifts(partition: Partition, phase: str, tensor: Operand) -> tuple[Sources, ...]:
    """The sources of a tensor's tiles between each step of a phase and the next."""
    tiles = [partition.tiles(phase, tensor.dimensions, t) for t in range(partition.steps)]
    return tuple(sources(now, then) for now, then in pairwise(tiles))


def hand_over(
    partition: Partition, tensor: Operand, before: tuple[str, int], after: tuple[str, int]
) -> Sources:
    """The sources of a tensor's tiles between one (phase, step) and another: an *alignment*.

    Example: W of `square(k)`, from (forward, -1) to (backward, 0): every device already holds its tile.
    """
    (phase, t), (next_phase, next_t) = before, after
    return sources(
        partition.tiles(phase, tensor.dimensions, t), partition.tiles(next_phase, tensor.dimensions, next_t)
    )


@lru_cache(maxsize=100_000)
def begins_at_home(partition: Partition) -> bool:
    """Does every phase of a linear layer begin with tiles that the forward, and for dO the backward, began
    with? Else each begins with those that the phase before ended with."""
    (i, weight), do = LINEAR[FORWARD].operands, LINEAR[BACKWARD].operands[0]
    alignments = (weight, FORWARD, BACKWARD), (i, FORWARD, GRADIENT), (do, BACKWARD, GRADIENT)
    return all(
        partition.tiles(before, tensor.dimensions, 0) == partition.tiles(after, tensor.dimensions, 0)
        for tensor, before, after in alignments
    )


def summands(partition: Partition, product: Product) -> list[frozenset[Tile]]:
    """For each device, the slices of the contracted dimensions that its result contains after the last step.

    Partial sums move with their tile of the result; no slices are added twice.
    """
    arriving: list[frozenset[Tile]] = [frozenset()] * partition.devices
    between = shifts(partition, product.phase, product.result)
    for t in range(partition.steps):
        if t:
            arriving = [arriving[source] for source in between[t - 1]]
        now = partition.tiles(product.phase, product.summed, t)
        for device, (before, tile) in enumerate(zip(arriving, now, strict=True)):
            assert tile not in before, f"device {device} adds slices {tile} of {product.result.name} twice"
            arriving[device] = before | {tile}
    return arriving


@lru_cache(maxsize=100_000)
def all_reduces(partition: Partition, product: Product) -> tuple[tuple[int, ...], ...]:
    """Groups of devices that must all-reduce their results after the last step; none if all are complete.

    Results that contain some common slices, but not the same ones, have no correct sum: an AssertionError.
    """
    every = math.prod(partition.slices(d) for d in product.summed)
    held = summands(partition, product)
    by_result: dict[Tile, dict[frozenset[Tile], list[int]]] = defaultdict(lambda: defaultdict(list))
    for device, tile in enumerate(partition.tiles(product.phase, product.result.dimensions, -1)):
        by_result[tile][held[device]].append(device)
    groups = []
    for tile, devices_of in by_result.items():
        alike = len({len(devices) for devices in devices_of.values()}) == 1
        once = alike and sum(map(len, devices_of)) == len(frozenset().union(*devices_of)) == every
        assert once, f"{product.result.name}, tile {tile}: slices {list(devices_of)}"
        if len(devices_of) > 1:
            groups += [tuple(sorted(group)) for group in zip(*devices_of.values(), strict=True)]
    return tuple(sorted(groups))
