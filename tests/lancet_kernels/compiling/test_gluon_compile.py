"""The Hopper kernel compiles for sm_90: wgmma as wide as a tile, stores of 16 bytes, loops without spills."""

from __future__ import annotations

import json

import pytest

from lancet_kernels.compiling.specimens import all_specimens
from tests.lancet_kernels.compiling.test_compile import TRITONS, printed_with

FORWARD = "forward gelu bf16 128x256x64 w8 s4"


def variants(arch: int) -> list[str]:
    return [specimen.config for specimen in all_specimens(arch) if specimen.name == "gluon_overlap"]


def check(row: dict) -> None:
    assert row["problems"] == [], row
    assert row["products"] == ["m64n256k16"], row
    assert row["loops"], row
    for loop in row["loops"]:
        # A step of 64: four products, and 50 to 60 instructions of addresses. A barrier before its place is
        # empty; with Triton 3.6 also one before the wait for the operands.
        barriers = 2 if row["triton"].startswith("3.6") else 1
        assert (loop["products"], loop["barriers"]) == (4, barriers), row
        assert (loop["stores"], loop["loads"]) == (0, 0), row
        assert loop["instructions"] <= 70, row


@pytest.mark.long
@pytest.mark.parametrize("triton", TRITONS)
def test_every_variant_compiles(triton):
    said = printed_with(triton, "-m", "tests.lancet_kernels.compiling.compile_gluon")
    rows = json.loads(said.splitlines()[-1])
    assert [row["config"] for row in rows] == variants(90)
    for row in rows:
        check(row)
        if row["config"] == FORWARD:
            assert row["wide stores"] > 0
            assert row["element stores"] == 0


def test_there_are_none_for_other_architectures():
    assert len(variants(90)) > 10
    assert variants(80) == variants(100) == []
