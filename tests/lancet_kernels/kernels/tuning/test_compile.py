"""Every kernel compiles for GPUs that are not here, within their limits; and the checks notice what is wrong.

The newest Triton is the installed one. The oldest that is supported lies in a folder of its own, which
`make test` brings; a child process that finds it first imports it instead.
"""

import json
import os
import re
from dataclasses import replace

import pytest

from lancet_kernels.cli.main import main
from lancet_kernels.errors import UserError
from lancet_kernels.kernels import specimens
from lancet_kernels.kernels.compile import (
    FEW_SPILLED_BYTES,
    CompiledKernel,
    compile_all,
    compile_specimen,
    problems,
)
from lancet_kernels.kernels.specimens import all_specimens
from lancet_kernels.kernels.symmetric import nvshmem
from tests.lancet_kernels.kernels.protocol import ping
from tests.lancet_kernels.kernels.tuning import bad_kernels
from tests.processes import ROOT, printed

OLDEST = ROOT / ".triton-oldest"

need_oldest = pytest.mark.skipif(
    not (OLDEST / "triton").is_dir(), reason="no oldest Triton; bring it by: make .triton-oldest/.installed"
)
need_bitcode = pytest.mark.skipif(
    nvshmem.find_bitcode(90) is None,
    reason=f"no NVSHMEM bitcode; bring it by: pip install --no-deps {nvshmem.PACKAGE}",
)
TRITONS = ["newest", pytest.param("oldest", marks=need_oldest)]


def printed_with(triton, *arguments):
    """What Python prints with this Triton, which does not interpret."""
    variables = {"TRITON_INTERPRET": "0"}
    if triton == "oldest":
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(OLDEST), os.environ.get("PYTHONPATH")]))
    return printed(*arguments, timeout_s=3600, **variables)


def kernels_command(triton, *arguments):
    return json.loads(printed_with(triton, "-m", "lancet_kernels", "kernels", "--json", *arguments))


def check_rows(found, triton, arch):
    """What must be so for every kernel."""
    oldest = re.search(r"^triton==(.*)$", (ROOT / "constraints-kernels.txt").read_text(), re.M)[1]
    assert (found["versions"]["triton"] == oldest) == (triton == "oldest")
    assert found["failed"] == 0
    declared = {(s.name, s.config): s for s in all_specimens(int(arch.removeprefix("sm_")))}
    for row in found["kernels"]:
        specimen = declared[row["name"], row["config"]]
        assert row["spills"] <= FEW_SPILLED_BYTES, row
        assert row["registers"] <= 255, row
        assert row["shared_bytes"] <= (163 if arch == "sm_80" else 227) * 1024, row
        if arch == "sm_90":
            assert row["wgmma"] >= specimen.wgmma, row
            assert row["tma"] >= specimen.tma, row
    return [(row["name"], row["config"]) for row in found["kernels"]]


@pytest.mark.long
@pytest.mark.parametrize("triton", TRITONS)
def test_one_configuration_of_every_kernel(triton):
    found = kernels_command(triton, "--arch", "sm_90", "--quick")
    names = check_rows(found, triton, "sm_90")
    assert {name for name, _ in names} == {s.name for s in all_specimens(90)}
    if nvshmem.find_bitcode(90) is not None:
        assert sum(row["nvshmem"] for row in found["kernels"]) == 1


GRID = [("newest", "sm_80"), ("newest", "sm_90"), ("newest", "sm_100")]
GRID += [pytest.param("oldest", arch, marks=need_oldest) for arch in ("sm_80", "sm_90")]


@pytest.mark.long
@need_bitcode
@pytest.mark.parametrize(("triton", "arch"), GRID)
def test_every_configuration_of_every_kernel(triton, arch):
    names = check_rows(kernels_command(triton, "--arch", arch), triton, arch)
    assert names == [(s.name, s.config) for s in all_specimens(int(arch.removeprefix("sm_")))]


@pytest.mark.long
def test_what_is_wrong_is_noticed(monkeypatch, capsys):
    """One specimen for each thing; the processes that compile are the command's own: this one interprets."""
    monkeypatch.setattr(specimens, "all_specimens", bad_kernels.specimens)
    assert main(["kernels", "--json"]) == 1
    out, err = capsys.readouterr()
    rows = {row["name"]: row for row in json.loads(out)["kernels"]}
    assert list(rows) == [s.name for s in bad_kernels.specimens(90)]
    assert (rows["good"]["problems"], rows["good"]["spills"], rows["good"]["wgmma"]) == ([], 0, True)
    assert rows["good"]["shared_bytes"] >= 2 * 64 * 64 * 2
    assert rows["spills"]["spills"] > FEW_SPILLED_BYTES
    assert rows["spills"]["registers"] <= 32
    assert rows["spills"]["problems"] == [f"spills {rows['spills']['spills']} bytes"]
    assert rows["shared"]["shared_bytes"] >= 2 * 64 * 1024 * 2
    assert "more than 232448" in " ".join(rows["shared"]["problems"])
    assert rows["no-wgmma"]["problems"] == ["no wgmma"]
    assert rows["no-tma"]["problems"] == ["no TMA"]
    for name, error in (
        ("refused", "N is too small for this kernel"),
        ("incomplete", "got nothing for out_ptr"),
        ("deadly", "exit code 134"),
    ):
        assert rows[name]["problems"] == ["does not compile"]
        assert error in rows[name]["error"]
    assert "LLVM ERROR: out of ideas" in rows["deadly"]["error"]
    assert "spills test: spills" in err


GOOD = CompiledKernel("sm_90", 128, 0, 0, 1000, 128, True, True, False, (), (), 0.0)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, []),
        ({"stack": 8}, []),
        ({"spills": 80}, ["spills 80 bytes"]),
        ({"shared_bytes": 227 * 1024}, []),
        ({"shared_bytes": 227 * 1024 + 1}, ["232449 bytes of shared memory, more than 232448"]),
        ({"arch": "sm_80", "shared_bytes": 167000}, ["167000 bytes of shared memory, more than 166912"]),
        ({"wgmma": False, "tma": False}, ["no wgmma", "no TMA"]),
        ({"wgmma": False, "tma": False, "arch": "sm_100"}, []),
        ({"serialized": ("C7515",)}, ["products wait for each other (C7515 of ptxas)"]),
        ({"registers": 168, "threads": 384}, []),
        ({"registers": 169, "threads": 384}, ["67584 registers in a program, more than 65536"]),
    ],
)
def test_limits(change, found):
    specimen = replace(next(iter(ping.specimens(90))), wgmma=True, tma=True)
    assert problems(specimen, replace(GOOD, **change)) == found


def test_an_interpreted_kernel_is_not_compiled(monkeypatch):
    monkeypatch.setattr("lancet_kernels.kernels.runtime.INTERPRETED", True)
    with pytest.raises(UserError, match="TRITON_INTERPRET"):
        compile_specimen(next(iter(ping.specimens(90))), 90)


def test_a_compiler_that_hangs_is_ended():
    (chosen,) = (specimen for specimen in bad_kernels.specimens(90) if specimen.name == "good")
    (row,) = compile_all([chosen], 90, timeout_s=0.1)
    assert "took more than 0.1 s" in row.error


def test_every_specimen_has_a_name_of_its_own():
    names = [(s.name, s.config) for s in all_specimens(90)]
    assert len(set(names)) == len(names)


def test_a_name_that_no_kernel_has_is_one_line(capsys):
    assert main(["kernels", "--name", "nothing-like-it"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "expected a part of a kernel's name" in err
    assert len(err.splitlines()) == 1


def test_the_bitcode_of_an_architecture(tmp_path, monkeypatch):
    monkeypatch.setenv("NVSHMEM_HOME", str(tmp_path))
    (tmp_path / "lib").mkdir()
    with pytest.raises(UserError, match=r"none for sm_90 in .*NVSHMEM_HOME"):
        nvshmem.extern_libs(90)
    for name in ("libnvshmem_device.bc", "libnvshmem_device_sm_80.bc", "libnvshmem_device_sm_100.bc"):
        (tmp_path / "lib" / name).touch()
    found = {arch: nvshmem.find_bitcode(arch).name for arch in (75, 80, 90, 100, 120)}
    assert found == {
        75: "libnvshmem_device.bc",
        80: "libnvshmem_device_sm_80.bc",
        90: "libnvshmem_device_sm_80.bc",
        100: "libnvshmem_device_sm_100.bc",
        120: "libnvshmem_device_sm_100.bc",
    }


@pytest.mark.long
def test_without_bitcode_nvshmem_is_left_out_and_said_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NVSHMEM_HOME", str(tmp_path))
    monkeypatch.setattr(specimens, "all_specimens", ping.specimens)
    assert main(["kernels", "--json", "--name", "ping 4x256 bf16"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert not any(row["nvshmem"] for row in found["kernels"])
    assert [row["config"] for row in found["skipped"]] == [
        "4x256 bf16 nvshmem",
        "4x256 bf16 nvshmem tma",
    ]
    assert "2 kernels with NVSHMEM were skipped" in err


PRINT_PTX = """
from lancet_kernels.kernels import compile
from tests.lancet_kernels.kernels.protocol import ping
from tests.processes import ROOT, printed
(specimen,) = [s for s in ping.specimens({arch}) if s.config == "4x256 bf16 {transport}"]
print(compile._compile(specimen, {arch})[0].asm["ptx"])
"""


@pytest.mark.long
@need_bitcode
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("triton", TRITONS)
def test_puts_over_nvshmem_are_linked(triton, arch):
    """The bodies are there, not only the calls; what stays open is what the CUDA driver itself offers."""
    ptx = printed_with(triton, "-c", PRINT_PTX.format(arch=arch, transport="nvshmem"))
    declared = re.findall(r"\.extern \.func\s+(?:\([^)]*\)\s*)?(\w+)", ptx)
    assert set(declared) <= {"vprintf", "__assertfail"}
    assert not re.search(r"\.extern .*nvshmem", ptx)
    # NVSHMEM's state of this PE, which nvshmemx_cumodule_init fills in
    assert re.search(r"\.visible .*nvshmemi_device_state_d", ptx)
    bodies = " ".join(re.findall(r"Begin function (\w+)", ptx))
    for name in ("nvshmemi_transfer_rma_nbi", "nvshmemi_transfer_amo_nonfetch", "nvshmemi_transfer_fence"):
        assert name in bodies
    # a signal is sent by one thread, a row is put by all
    assert "%tid.x" in ptx


@pytest.mark.long
@pytest.mark.parametrize("triton", TRITONS)
def test_puts_through_pointers_need_no_nvshmem(triton):
    ptx = printed_with(triton, "-c", PRINT_PTX.format(arch=90, transport="pointers"))
    assert "nvshmem" not in ptx
    assert re.search(r"atom\.global\.sys\.release\.exch", ptx)
