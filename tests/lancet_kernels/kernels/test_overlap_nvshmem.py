"""Launches with NVSHMEM: all that is needed is given to them, and over an emulated network no bit changes."""

import re
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lancet_kernels.compiling.compile import all_specimens
from lancet_kernels.compiling.overlap_specimens import PES, specimens
from lancet_kernels.kernels import kernel_launch, overlap, runtime
from lancet_kernels.kernels.kernel_launch import launch
from lancet_kernels.kernels.overlap_config import OverlapConfig
from lancet_kernels.kernels.overlap_data import DenseGemm, ExpertGradients
from lancet_kernels.kernels.protocol import exchange, schedule
from lancet_kernels.kernels.protocol.exchange import Exchange
from lancet_kernels.symmetric import virtual_memories
from tests.grids import few_of
from tests.lancet_kernels.kernels.overlap_cases import Case
from tests.lancet_kernels.kernels.overlap_ranks import (
    GuardedMemory,
    Layer,
    check_results,
    check_rows,
    make_layer,
    poisoned_buffers,
    same_bits,
)
from tests.lancet_kernels.kernels.protocol.emulated_network import FarMemory, network

FP16, BF16 = torch.float16, torch.bfloat16

# ---- rows over a network that is late


def far_and_near_on_rank(case: Case, options: dict) -> SimpleNamespace:
    """The same two passes over the network and over pointers -> how often the network was used."""
    with GuardedMemory(timeout_s=30) as memory, FarMemory(timeout_s=30) as far_memory:
        with poisoned_buffers():
            near = make_layer(memory, "near", case, **options)
            expected = pass_of(near)
        with poisoned_buffers(), network(far_memory) as wires:
            far = make_layer(far_memory, "far", case, **options)
            for way in (far.forward, far.backward):
                for stage in way.buffers.stage:
                    stage.local.fill_(float("nan"))
            found = pass_of(far)
        check_rows(far)
        check_results(far, near)
        for name, value in expected.items():
            assert same_bits(found[name], value), f"{case}: {name} differs over the network"
        far_memory.check_guards()
        memory.barrier()
        return wires.counts


def pass_of(layer: Layer) -> dict[str, torch.Tensor | None]:
    out, saved = layer.run_forward()
    gradients = layer.run_backward(saved)
    layer.check()
    return {"out": out} | {each.name: getattr(gradients, each.name) for each in fields(ExpertGradients)}


@pytest.mark.parametrize(
    ("case", "options"),
    few_of(
        [
            (Case(), {}),
            (Case(tokens=35, capacity=35, local=1, choices=1, dtype=FP16, width=40), {"split": True}),
            (Case(dtype=BF16, bias=False, choose="few", uneven=True), {}),
        ]
    ),
    ids=str,
)
def test_the_network_changes_no_bit(pool, case, options):
    for counts in pool.run(far_and_near_on_rank, case, options):
        assert min(counts.signals, counts.acquired, counts.quiet) > 0
        assert counts.puts > 0


# ---- what a launch is given


class Kernel:
    """Notes how it is warmed up and launched."""

    def __init__(self):
        self.calls = []

    def warmup(self, *arguments, grid, **options):
        self.calls.append(("warmup", arguments, grid, options))
        return "compiled"

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.calls.append(("run", arguments, grid, options))


def test_a_launch_is_linked_and_introduced_before_it_runs(monkeypatch):
    kernel, libraries = Kernel(), (("libnvshmem_device", "/a.bc"),)
    asked = []
    words = torch.zeros(1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernel_launch.nvshmem_bitcode, "extern_libs", lambda a: asked.append(a) or libraries)
    monkeypatch.setattr(kernel_launch, "init_module", lambda made: kernel.calls.append(("init", made)))
    kernel_launch._libraries.cache_clear()
    try:
        launch(kernel, (3,), words, 2, NVSHMEM=True, num_warps=4)
        launch(kernel, (3,), 2, words=words, NVSHMEM=False, num_warps=4)
    finally:
        kernel_launch._libraries.cache_clear()
    options = {"NVSHMEM": True, "num_warps": 4, "extern_libs": libraries}
    assert kernel.calls == [
        ("warmup", (words, 2), (3,), options),
        ("init", "compiled"),
        ("run", (words, 2), (3,), options),
        ("run", (2,), (3,), {"words": words, "NVSHMEM": False, "num_warps": 4}),
    ]
    assert asked == [90]


# ---- every launch is a specimen


# Beside what the specimens combine in every way, these vary one by one, in whole passes.
ARGUMENTS = set(overlap.overlap_kernel.arg_names) - set(overlap.overlap_kernel.fn.__annotations__)
ONE_BY_ONE = (
    "ACT",
    "HAS_BIAS",
    "dtype",
    "BM",
    "BN",
    "BN_IN",
    "BK",
    "TMA",
    "num_warps",
    "num_stages",
    "maxnreg",
)


def launches_of(
    case: Case,
    kinds: tuple[str, ...],
    arch: int,
    *,
    split: bool = False,
    far: bool = False,
    rider: int = 16,
) -> list[dict]:
    """The launch options of a pass forward and backward, as `arch` has them by default; nothing is run.

    rider: width of what rides along.
    """
    seen = []

    def note(kernel, grid, *arguments, **options):
        if kernel is overlap.overlap_kernel:
            assert options.keys() >= set(kernel.arg_names)
            given = {name: value for name, value in options.items() if name not in ARGUMENTS}
            # How many PEs there are only sets the widths of blocks.
            seen.append(given | {"dtype": case.dtype, "BW": PES})
        elif kernel is exchange.release_kernel:
            assert options["NVSHMEM"] == far
            assert options.items() >= kernel_launch.small_kernel(far).items()
        else:
            assert kernel in (schedule.exchange_counts_kernel, schedule.schedule_kernel)
            assert options.get("NVSHMEM", far) == far

    (memory,) = virtual_memories(1)
    memory.far = far
    config = OverlapConfig.for_gpu(case.width, case.hidden, case.activation, case.dtype, arch, programs=1)
    config = replace(config, split=split)
    sizes = {"local_experts": 2, "send_rows": 9, "receive_rows": 9, "width": case.width, "dtype": case.dtype}
    sizes["chunk_rows"] = config.gemm.block_m
    patch = pytest.MonkeyPatch()
    with patch.context() as m:
        m.setattr(overlap, "launch", note)
        m.setattr(exchange, "launch", note)
        m.setattr(runtime, "needs_upcast", lambda dtype: False)
        ways = [Exchange(memory, way, **sizes) for way in ("forward", "backward")]
        layer = Layer(replace(case, world=1), 0, *ways, config)
        layer.dense = [_dense(kind, rider, case.dtype) for kind in kinds]
        layer.run()
    return seen


def _dense(kind: str, width: int, dtype: torch.dtype) -> DenseGemm:
    return DenseGemm(kind, *(torch.zeros(width, width, dtype=dtype) for _ in "abc"))


def key_of(options: dict, without: tuple[str, ...]) -> tuple:
    return tuple(sorted((name, str(value)) for name, value in options.items() if name not in without))


def specimen_options(arch: int) -> list[dict]:
    names = {"bf16": BF16, "fp16": FP16, "fp32": torch.float32}
    found = []
    for specimen in specimens(arch):
        if specimen.name == "overlap":
            launched = {"num_warps": specimen.num_warps, "num_stages": specimen.num_stages}
            dtype = names[specimen.signature["rows_ptr"].removeprefix("*")]
            found.append(specimen.constexprs | launched | specimen.options | {"dtype": dtype})
    return found


SMALL = Case(world=1, local=2, tokens=3, choices=1, width=16, hidden=16, dtype=BF16)


@pytest.mark.parametrize("arch", few_of([90, 80, 100]))
def test_every_launch_is_a_specimen(arch):
    """Stages, riders and transports in every combination; the rest one by one, for launches of whole passes.

    Specimens are compiled elsewhere (`test_compile.py`); none of them is of a launch that nobody makes.
    """
    made = specimen_options(arch)
    combined = {key_of(options, ()) for options in made}
    launched = set()

    def note(launches: list[dict]) -> None:
        for options in launches:
            key = key_of(options, ())
            assert key in combined, f"no specimen for {options}"
            launched.add(key)

    kinds = ((), ("tn",), ("tn", "tn"), ("nn",), ("nt", "tn"), ("nn", "nt", "tn"))
    for riders, split, far in product(kinds, (False, True), (False, True)):
        for tokens in (0, 3):
            note(launches_of(replace(SMALL, tokens=tokens), riders, arch, split=split, far=far))
    odd = replace(SMALL, width=17, hidden=19)
    for case in (odd, replace(odd, activation="swiglu"), replace(odd, dtype=torch.float32)):
        for riders in ((), kinds[-1]):
            found = launches_of(case, riders, arch)
            assert not any(options["TMA"] for options in found)
            note(found)
    note(launches_of(SMALL, kinds[-1], arch, rider=17))
    changes = [{"bias": False}, {"activation": "silu"}, {"activation": "swiglu"}]
    changes += [{"dtype": FP16}, {"dtype": torch.float32}]
    for change in changes:
        case = replace(SMALL, **change)
        found = launches_of(case, (), arch)
        assert all(options["TMA"] == (arch >= 90) for options in found)
        note(found)
        # In other combinations of these there is no other code; only what they are combined with.
        for options in launches_of(case, ("tn",), arch, split=True, far=True):
            assert key_of(options, ONE_BY_ONE) in {key_of(other, ONE_BY_ONE) for other in made}
    assert launched == combined


def test_every_kernel_that_is_launched_has_a_specimen():
    """By the text of the modules: name[grid](...), launch(name, ...), or partial(launch, name)."""
    declared = {specimen.kernel.__name__ for _, specimen in all_specimens(90)}
    folder = kernel_launch.__spec__.origin.rpartition("/")[0]
    launched = set()
    for path in Path(folder).rglob("*.py"):
        launched |= set(re.findall(r"\b(\w*kernel)\[|\blaunch(?:\(\s*|, )(\w*_kernel)[,)]", path.read_text()))
    names = {a or b for a, b in launched} - {"kernel"}
    launchers = {"overlap_kernel", "gluon_overlap_kernel", "exchange_counts_kernel", "release_kernel"}
    assert launchers <= names
    assert names <= declared, f"without a specimen: {sorted(names - declared)}"
