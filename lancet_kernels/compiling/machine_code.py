"""What do the loops of matrix products look like in the machine code of a kernel for Hopper?

A product (HGMMA) runs by itself, and a loop should start one while the one before still runs. It does where
its wait, `WARPGROUP.DEPBAR.LE gsb0, 0x1`, lets one be in flight. ptxas may decide otherwise: if it sees that
others touch the accumulators it waits after each product (`gsb0, 0x0`), and only tells its log (C7510 to
C7519, "Potential Performance Loss: wgmma.mma_async instructions are serialized").
"""

from __future__ import annotations

import re
from dataclasses import dataclass

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", re.M)
BACKWARD_BRANCH = re.compile(r"\bBRA\b.*(0x[0-9a-f]+)")
PRODUCT = re.compile(r"\bHGMMA\.(\w+)")
WAIT = re.compile(r"\bWARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
COUNTED = {
    "products": PRODUCT,
    "barriers": re.compile(r"\bBAR\b"),
    "spill_stores": re.compile(r"\bSTL\b"),
    "spill_loads": re.compile(r"\bLDL\b"),
}
SERIALIZED = re.compile(r"\((C75\d\d)\)")


@dataclass(frozen=True)
class ProductLoop:
    """A loop around matrix products.

    Attributes:
        instructions, products, barriers, spill_stores, spill_loads: how many of these stand in it.
        in_flight: products that its strictest wait leaves running; 0: each waits for the one before.
        shape: of a product of one warpgroup, e.g. "64x256x16".
    """

    instructions: int
    products: int
    barriers: int
    spill_stores: int
    spill_loads: int
    in_flight: int
    shape: str


def product_loops(sass: str) -> tuple[ProductLoop, ...]:
    """The innermost loops around the products of `sass`, what `cuobjdump -sass` prints, in their order."""
    code = [(int(address, 16), instruction) for address, instruction in INSTRUCTION.findall(sass)]
    loops = [
        (int(target[1], 16), address)
        for address, instruction in code
        if (target := BACKWARD_BRANCH.search(instruction)) and int(target[1], 16) <= address
    ]
    # Waits for barriers stand behind the whole program and jump back: the smallest loop is a product's own.
    innermost = {
        min(around, key=lambda loop: loop[1] - loop[0])
        for at, instruction in code
        if PRODUCT.search(instruction) and (around := [loop for loop in loops if loop[0] <= at <= loop[1]])
    }
    return tuple(
        _loop([instruction for address, instruction in code if first <= address <= last])
        for first, last in sorted(innermost)
    )


def _loop(inside: list[str]) -> ProductLoop:
    counts = {name: sum(bool(what.search(i)) for i in inside) for name, what in COUNTED.items()}
    text = "\n".join(inside)
    waits = [int(depth, 16) for depth in WAIT.findall(text)]
    shapes = " ".join(sorted(set(PRODUCT.findall(text))))
    return ProductLoop(len(inside), **counts, in_flight=min(waits, default=counts["products"]), shape=shapes)


def serialized(log: str) -> tuple[str, ...]:
    """The codes with which ptxas says in its log that it serializes products: ("C7515",)."""
    return tuple(sorted(set(SERIALIZED.findall(log))))
