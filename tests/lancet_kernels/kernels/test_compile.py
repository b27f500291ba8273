"""Every kernel compiles for GPUs that are not here, within their limits; and the checks notice what is wrong.

The newest Triton is the installed one. The oldest that is supported lies in a folder of its own, which
`make test` brings; a child process that finds it first imports it instead.
"""

import json
import os
import re
from dataclasses import replace

import pytest

from lancet_kernels.__main__ import main
from lancet_kernels.errors import UserError
from lancet_kernels.kernels import compile as compiling
from lancet_kernels.kernels import specimens
from lancet_kernels.kernels.compile import (
    FEW_SPILLED_BYTES,
    CompiledKernel,
    ProductLoop,
    Row,
    compile_all,
    problems,
    product_loops,
    serialized,
)
from lancet_kernels.kernels.specimens import all_specimens
from lancet_kernels.kernels.symmetric import nvshmem
from tests.lancet_kernels.kernels import bad_kernels
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
        if row["name"] == "gluon_overlap":
            check_loops(row, triton)
    return [(row["name"], row["config"]) for row in found["kernels"]]


def check_loops(row, triton):
    """The Hopper kernel: wgmma as wide as a tile, one always in flight, no spills in loops."""
    assert (row["problems"], row["serialized"]) == ([], []), row
    # Products across rows, of weight gradients, have a loop of their own.
    across = row["config"].startswith("backward") or "+dw" in row["config"]
    assert len(row["loops"]) == 1 + across, row
    for loop in row["loops"]:
        # A step of 64: four products, and 50 to 60 instructions of addresses. A barrier before its place
        # is empty; with Triton 3.6 also one before the wait for the operands.
        barriers = 2 if triton == "oldest" else 1
        assert (loop["shape"], loop["products"], loop["barriers"]) == ("64x256x16", 4, barriers), row
        assert (loop["in_flight"], loop["spill_stores"], loop["spill_loads"]) == (1, 0, 0), row
        assert loop["instructions"] <= 70, row


def each_option_once(arch):
    """The richest configurations of each kernel, until all its options are there in each direction."""
    every, seen, chosen = [*all_specimens(arch)], set(), set()
    for specimen in sorted(every, key=lambda specimen: len(specimen.config.split()))[::-1]:
        direction, *options = specimen.config.split()
        found = {(specimen.name, direction, option) for option in options or [""]}
        if not found <= seen:
            seen |= found
            chosen.add(specimen.config)
    return [specimen for specimen in every if specimen.config in chosen]


COMPILE_SOME = """
import sys
from lancet_kernels.__main__ import main
from lancet_kernels.kernels import specimens
from tests.lancet_kernels.kernels.test_compile import each_option_once
specimens.all_specimens = each_option_once
sys.exit(main(sys.argv[1:]))
"""
GRID = [("newest", "sm_80"), ("newest", "sm_90"), ("newest", "sm_100")]
GRID += [pytest.param("oldest", arch, marks=need_oldest) for arch in ("sm_80", "sm_90")]


@pytest.mark.long
@pytest.mark.parametrize(("triton", "arch"), GRID)
def test_every_kernel(triton, arch):
    """In all configurations by one Triton for Hopper; in all with an option of their own by others."""
    number = int(arch.removeprefix("sm_"))
    all_of_them = (triton, arch) == ("newest", "sm_90")
    program, wanted = (
        (("-m", "lancet_kernels"), all_specimens) if all_of_them else (("-c", COMPILE_SOME), each_option_once)
    )
    found = json.loads(printed_with(triton, *program, "kernels", "--json", "--arch", arch))
    has_bitcode = nvshmem.find_bitcode(number) is not None
    expected = [(s.name, s.config) for s in wanted(number) if has_bitcode or not s.nvshmem]
    assert check_rows(found, triton, arch) == expected


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
        ("incomplete", "missing 1 required positional argument: 'out_ptr'"),
        ("deadly", "exit code 134"),
    ):
        assert rows[name]["problems"] == ["does not compile"]
        assert error in rows[name]["error"]
    assert "LLVM ERROR: out of ideas" in rows["deadly"]["error"]
    assert "spills test: spills" in err


LOOP = ProductLoop(7, 2, 1, 0, 0, in_flight=1, shape="64x256x16")
GOOD = CompiledKernel("sm_90", 128, 0, 0, 1000, 128, True, True, False, (), (LOOP,), 0.0)


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
    specimen = replace(next(all_specimens(90)), wgmma=True, tma=True)
    assert problems(specimen, replace(GOOD, **change)) == found


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


@pytest.fixture
def chosen(tmp_path, monkeypatch, capsys):
    """Calls the command, which compiles nothing. -> the kernels that it chose and skipped."""

    def call(*arguments, bitcode):
        monkeypatch.setenv("NVSHMEM_HOME", str(tmp_path))
        (tmp_path / "lib").mkdir()
        if bitcode:
            (tmp_path / "lib" / "libnvshmem_device_sm_80.bc").touch()
        monkeypatch.setattr(
            compiling, "compile_all", lambda some, *_, **__: [Row(s, GOOD, None) for s in some]
        )
        assert main(["kernels", "--json", *arguments]) == 0
        out, err = capsys.readouterr()
        found = json.loads(out)
        names = ([f"{row['name']} {row['config']}" for row in found[of]] for of in ("kernels", "skipped"))
        return *names, err

    return call


def test_without_bitcode_nvshmem_is_left_out_and_said_so(chosen):
    compiled, skipped, said = chosen("--name", "release", bitcode=False)
    assert (compiled, skipped) == (["release pointers"], ["release nvshmem"])
    assert "1 kernels with NVSHMEM were skipped" in said


def test_quick_is_the_first_of_each_kernel_and_one_with_nvshmem(chosen):
    compiled, skipped, said = chosen("--quick", bitcode=True)
    assert (skipped, said) == ([], "")
    assert [name for name in compiled if "nvshmem" in name] == ["exchange_counts nvshmem"]
    assert sorted(name.split()[0] for name in compiled) == sorted(
        [*{specimen.name for specimen in all_specimens(90)}, "exchange_counts"]
    )


COUNTS, HOPPER = "exchange_counts", "gluon_overlap forward gelu bf16 128x256x64 w8 s4"
POINTERS, NVSHMEM = f"{COUNTS} pointers", f"{COUNTS} nvshmem"
PRINT_PTX = """
import json, sys
from lancet_kernels.kernels.compile import _compile
from lancet_kernels.kernels.specimens import all_specimens
named = {f"{s.name} {s.config}": s for s in all_specimens(90)}
print(json.dumps({name: _compile(named[name], 90)[0].asm["ptx"] for name in sys.argv[1:]}))
"""


@pytest.fixture(scope="module", params=TRITONS)
def ptx(request):
    """The PTX of the exchange of counts by pointers and by NVSHMEM, and of the Hopper kernel."""
    over_nvshmem = [NVSHMEM] if nvshmem.find_bitcode(90) is not None else []
    return json.loads(printed_with(request.param, "-c", PRINT_PTX, POINTERS, HOPPER, *over_nvshmem))


@pytest.mark.long
@need_bitcode
def test_puts_over_nvshmem_are_linked(ptx):
    """The bodies are there: calls without effect would go, and ptxas refuses those that it cannot find."""
    # NVSHMEM's state of this PE, which nvshmemx_cumodule_init fills in
    assert re.search(r"\.visible .*nvshmemi_device_state_d", ptx[NVSHMEM])
    bodies = " ".join(re.findall(r"Begin function (\w+)", ptx[NVSHMEM]))
    for name in ("nvshmemi_transfer_rma_nbi", "nvshmemi_transfer_amo_nonfetch", "nvshmemi_transfer_fence"):
        assert name in bodies
    # a signal is sent by one thread, a row is put by all
    assert "%tid.x" in ptx[NVSHMEM]


@pytest.mark.long
def test_puts_through_pointers_need_no_nvshmem(ptx):
    assert "nvshmem" not in ptx[POINTERS]
    assert re.search(r"atom\.global\.sys\.release\.exch", ptx[POINTERS])


@pytest.mark.long
def test_stores_of_the_hopper_kernel_are_16_bytes_wide(ptx):
    assert re.search(r"st\.global\S*\.v4", ptx[HOPPER])
    assert not re.search(r"st\.global\S*\.b16", ptx[HOPPER])


def test_the_hopper_kernel_has_no_specimens_for_other_architectures():
    counts = [sum(s.name == "gluon_overlap" for s in all_specimens(arch)) for arch in (80, 90, 100)]
    assert counts[1] > 10
    assert counts[0] == counts[2] == 0


@pytest.mark.long  # by default: made-up lines, below
def test_products_that_wait_for_each_other_are_noticed():
    pipelined, joined, waiting = compile_all([*bad_kernels.loops_of_products()], 90, workers=1)
    assert (pipelined.problems, pipelined.compiled.in_flight) == ([], 1)
    few = "0 products in flight, fewer than 1"
    assert joined.problems == ["products wait for each other (C7514 of ptxas)", few]
    assert waiting.problems == [few]


# Made-up lines as `cuobjdump -sass` prints them: a loop as in the Hopper kernel, then one in which ptxas
# waits after each product; both jump back from behind, to wait for a barrier, as does the whole program.
SASS = """
        /*0000*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R2 ;   /* 0x0 */
        /*0010*/              @!P1 BRA 0x140 ;
        /*0020*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR12].tnspB, R24 ;
        /*0030*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR12].tnspB, R24, gsb0 ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0050*/                   BAR.SYNC.DEFER_BLOCKING 0x1, 0x100 ;
        /*0060*/               @P0 BRA 0x0 ;
        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0080*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR12], R24, gsb0 ;
        /*0090*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*00a0*/                   STL [R1], R2 ;
        /*00b0*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR12], R24, gsb0 ;
        /*00c0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*00d0*/                   LDL R2, [R1] ;
        /*00e0*/               @P0 BRA 0x80 ;
        /*00f0*/                   BRA 0x0 ;
        /*0100*/                   EXIT ;
        /*0140*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R2 ;
        /*0150*/               @P1 BRA 0x20 ;
        /*0160*/                   BRA 0x140 ;
"""


def test_loops_of_products_and_what_their_strictest_wait_leaves_running():
    pipelined, waiting = product_loops(SASS)
    assert pipelined == LOOP
    assert waiting == ProductLoop(7, 2, 0, 1, 1, in_flight=0, shape="64x256x16")
    assert product_loops(SASS.replace("HGMMA", "FFMA")) == ()


def test_what_ptxas_says_of_products():
    log = "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assert serialized(f"{log}\n{log}\n0 bytes spill stores") == ("C7515",)
    assert serialized("ptxas info    : Used 168 registers") == ()
