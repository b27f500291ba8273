"""Launches with NVSHMEM: all that is needed is given to them, and over an emulated network no bit changes."""

import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lancet_kernels.compiling.specimens import all_specimens
from lancet_kernels.kernels import kernel_launch
from lancet_kernels.kernels.kernel_launch import launch
from lancet_kernels.kernels.overlap_data import ExpertGradients
from tests.grids import few_of
from tests.lancet_kernels.kernels.overlap_cases import Case
from tests.lancet_kernels.kernels.overlap_ranks import (
    GuardedMemory,
    Layer,
    check_results,
    check_rows,
    make_layer,
    same_bits,
)
from tests.lancet_kernels.kernels.protocol.emulated_network import FarMemory, network
from tests.poisoned_buffers import poisoned_buffers

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
            (Case(tokens=35, capacity=35, local=1, choices=1, dtype=FP16, width=40), {}),
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

    def warmup(self, *, grid, **options):
        self.calls.append(("warmup", grid, options))
        return "compiled"

    def __getitem__(self, grid):
        return lambda **options: self.calls.append(("run", grid, options))


def test_a_launch_is_linked_and_introduced_before_it_runs(monkeypatch):
    kernel, libraries = Kernel(), (("libnvshmem_device", "/a.bc"),)
    asked = []
    words = torch.zeros(1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernel_launch.nvshmem_bitcode, "extern_libs", lambda a: asked.append(a) or libraries)
    monkeypatch.setattr(kernel_launch, "init_module", lambda made: kernel.calls.append(("init", made)))
    kernel_launch._libraries.cache_clear()
    try:
        launch(kernel, (3,), words=(words, None), W=2, NVSHMEM=True, num_warps=4)
        launch(kernel, (3,), words=words, NVSHMEM=False, num_warps=4)
    finally:
        kernel_launch._libraries.cache_clear()
    options = {"words": (words, None), "W": 2, "NVSHMEM": True, "num_warps": 4, "extern_libs": libraries}
    assert kernel.calls == [
        ("warmup", (3,), options),
        ("init", "compiled"),
        ("run", (3,), options),
        ("run", (3,), {"words": words, "NVSHMEM": False, "num_warps": 4}),
    ]
    assert asked == [90]


def test_every_kernel_that_is_launched_has_a_specimen():
    """By the text of the modules: launch(name, ...)."""
    declared = {specimen.kernel.fn.__name__ for specimen in all_specimens(90)}
    folder = kernel_launch.__spec__.origin.rpartition("/")[0]
    launched = set()
    for path in Path(folder).rglob("*.py"):
        launched |= set(re.findall(r"\blaunch\(\s*(\w*_kernel),", path.read_text()))
    assert {"overlap_kernel", "gluon_overlap_kernel", "exchange_counts_kernel", "release_kernel"} <= launched
    assert launched <= declared, f"without a specimen: {sorted(launched - declared)}"
