"""Compiles variants of the Hopper kernel: a program, run by test_gluon_compile.py with one Triton or another.

Prints for each what the test looks at, as JSON.
"""

import json
import re

import triton

from lancet_kernels.compiling.compile import _compile, _tool, compile_specimen, problems
from lancet_kernels.compiling.specimens import all_specimens

COUNTED = {"products": r"HGMMA", "barriers": r"\bBAR\b", "stores": r"\bSTL\b", "loads": r"\bLDL\b"}


def loops_of_products(sass: str) -> list[dict[str, int]]:
    """How many instructions each loop around matrix products has, and how many of COUNTED.

    Stores and loads are those of spilled registers.
    """
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.M)
    code = [(int(address, 16), instruction) for address, instruction in found]
    loops = [
        (int(target[1], 16), address)
        for address, instruction in code
        if (target := re.search(r"\bBRA\b.*(0x[0-9a-f]+)", instruction)) and int(target[1], 16) <= address
    ]
    products = [address for address, instruction in code if "HGMMA" in instruction]
    # Waits stand behind the whole program and jump back: the smallest loop around a product is its own.
    own = {
        min((loop for loop in loops if loop[0] <= at <= loop[1]), key=lambda loop: loop[1] - loop[0])
        for at in products
    }
    counts = []
    for low, high in sorted(own):
        inside = [instruction for address, instruction in code if low <= address <= high]
        of_kind = {name: sum(bool(re.search(what, i)) for i in inside) for name, what in COUNTED.items()}
        counts.append({"instructions": len(inside)} | of_kind)
    return counts


def main() -> None:
    every = [s for s in all_specimens(90) if s.name == "gluon_overlap"]
    rows = []
    for specimen in every:
        compiled = compile_specimen(specimen, 90)
        kernel, _ = _compile(specimen, 90)
        rows.append(
            {
                "config": specimen.config,
                "triton": triton.__version__,
                "problems": problems(specimen, compiled),
                "products": sorted(set(re.findall(r"m64n\d+k\d+", kernel.asm["ptx"]))),
                "loops": loops_of_products(_tool("-sass", kernel.asm["cubin"])),
                "wide stores": len(re.findall(r"st\.global\S*\.v4", kernel.asm["ptx"])),
                "element stores": len(re.findall(r"st\.global\S*\.b16", kernel.asm["ptx"])),
            }
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
