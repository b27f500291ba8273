"""The real launches of a pass, compiled for sm_90, on a driver that checks what it is given."""

import ctypes
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.lancet_kernels.kernels import launch_on_stub
from tests.processes import printed

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Triton loads its driver on Linux only"),
    pytest.mark.skipif(not any(map(shutil.which, launch_on_stub.COMPILERS)), reason="no C compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a real driver is here"),
]
OVERLAP = "gluon_overlap combine_results"
OF_PASS = f"exchange_counts schedule {OVERLAP} {OVERLAP} release".split()


def names(lines: list[str], what: str) -> list[str]:
    """Kernels that were loaded, or launched, in this order."""
    words = [line.split() for line in lines]
    return [name.removesuffix("_kernel") for kind, name, *_ in words if kind == what]


@pytest.fixture(scope="module")
def launched() -> dict:
    return json.loads(printed("-m", "tests.lancet_kernels.kernels.launch_on_stub"))


def test_a_warm_up_loads_each_kernel_once_and_launches_none_that_waits(launched: dict) -> None:
    """All PEs share them. To the exchanges these are passes that were skipped."""
    assert sorted(names(launched["warmed_up"], "load")) == sorted(OF_PASS)
    assert names(launched["warmed_up"], "launch") == ["release"] * 3
    assert launched["epochs"] == [2, 1]
    assert names(launched["pass"], "launch") == OF_PASS
    assert names(launched["pass"], "load") == []


def test_overlap_kernels_are_launched_as_they_are_meant(launched: dict) -> None:
    """12 warps for each of the programs, within the shared memory of an SM."""
    lines = [line.split()[2:] for line in launched["pass"] if line.startswith("launch gluon_overlap_kernel")]
    for programs, threads, shared in (map(int, line) for line in lines):
        assert (programs, threads) == (66, 384)
        assert 200_000 < shared <= 227 * 1024


def test_descriptors_are_of_the_operands_as_matrices(launched: dict) -> None:
    """They are rows, first weights, hidden, second weights; backward: dy, second weights, dh, first weights.

    Columns, rows, and bytes from row to row. D = 128, F = 192, 2 experts here, 256 rows in a pass; there is
    room for two forwards. That boxes, strides and addresses keep to the rules the driver has checked.
    """
    assert not [line for key in ("pass", "more") for line in launched[key] if line.startswith("broken")]
    maps = [[*map(int, line.split()[1:4])] for line in launched["pass"] if line.startswith("map")]
    first, second = [384, 2 * 128, 768], [128, 2 * 192, 256]
    rows, both = [128, 512, 256], [192, 256, 384]
    assert maps == [rows, first, both, second, rows, second, [384, 256, 768], first]


def test_named_tuples_arrive_in_order_and_descriptors_have_scratch(launched: dict) -> None:
    """A backward makes those of weight gradients: 128 bytes each."""
    assert len(launched["pointers"]) > 20
    assert launched["parameters"][: len(launched["pointers"])] == launched["pointers"]
    assert launched["asked"] == [size for size in launched["scratch"] if size]
    assert max(launched["asked"]) >= 66 * 2 * 128


def test_later_passes_compile_nothing(launched: dict) -> None:
    """Two open at once, another PE, another layer."""
    assert names(launched["more"], "launch").count("gluon_overlap") == 8
    assert names(launched["more"], "load") == []
    assert launched["variants after more"] == launched["variants"]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("driver")
    os.environ |= {"STUB_LOG": launch_on_stub.build(folder)["STUB_LOG"]}
    return ctypes.CDLL(str(folder / "libcuda.so.1"))


GOOD = {"rank": 2, "address": 0, "sizes": [4096, 512], "stride": 8192, "box": [64, 128]}
GOOD |= {"steps": [1, 1], "swizzle": 3}


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({}, ""),
        ({"sizes": [4096, 2**32]}, ""),
        ({"stride": 8192 + 16, "box": [64, 256]}, ""),
        ({"box": [16, 8], "swizzle": 1}, ""),
        ({"box": [128, 8], "swizzle": 0}, ""),
        ({"rank": 6}, "rank"),
        ({"address": 8}, "address not a multiple of 16"),
        ({"sizes": [0, 512]}, "size of a dimension"),
        ({"sizes": [4096, 2**32 + 1]}, "size of a dimension"),
        ({"stride": 8192 + 8}, "stride not a multiple of 16"),
        ({"stride": 2**40}, "stride of 2^40 or more"),
        ({"stride": 4096}, "rows overlap"),
        ({"box": [64, 257]}, "box of more than 256 elements"),
        ({"box": [64, 0]}, "box of more than 256 elements"),
        ({"box": [4, 8]}, "inner box not a multiple of 16 bytes"),
        ({"box": [64, 64], "swizzle": 2}, "inner box wider than the swizzle"),
        ({"steps": [9, 1]}, "element stride"),
    ],
)  # fmt: skip
def test_the_driver_refuses_a_tensor_map_that_breaks_a_rule(
    driver: ctypes.CDLL, changes: dict, broken: str
) -> None:
    """The rules are those of the documentation of cuTensorMapEncodeTiled; here for bfloat16."""
    log = Path(os.environ["STUB_LOG"])
    before = len(log.read_text()) if log.exists() else 0
    given = GOOD | changes
    room = ctypes.create_string_buffer(256)
    place = ctypes.addressof(room) + -ctypes.addressof(room) % 64
    words, longs, pointer, bfloat16 = ctypes.c_uint32 * 2, ctypes.c_uint64, ctypes.c_void_p, 9
    status = driver.cuTensorMapEncodeTiled(
        pointer(place), bfloat16, given["rank"], pointer(2**20 + given["address"]),
        (longs * 2)(*given["sizes"]), ctypes.byref(longs(given["stride"])),
        words(*given["box"]), words(*given["steps"]), 0, given["swizzle"], 0, 0,
    )  # fmt: skip
    said = log.read_text()[before:]
    assert (status != 0) == bool(broken)
    assert said.startswith(f"broken map: {broken}\n" if broken else "map ")
