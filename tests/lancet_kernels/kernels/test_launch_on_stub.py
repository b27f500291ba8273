"""The real launches of a pass, compiled for sm_90, on a driver that notes what it is given."""

import json
import shutil
import sys

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
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict:
    variables = launch_on_stub.build(tmp_path_factory.mktemp("driver"))
    return json.loads(printed("-m", launch_on_stub.__name__, **variables))


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
    room for two forwards.
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
