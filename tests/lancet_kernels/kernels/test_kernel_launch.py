"""What a launch is given: the device of its tensors, and all that NVSHMEM needs."""

import re
from pathlib import Path

import torch
from torch._subclasses import FakeTensorMode

from lancet_kernels.kernels import runtime
from lancet_kernels.kernels.runtime import launch
from lancet_kernels.kernels.specimens import all_specimens


class Kernel:
    """Notes how it is warmed up and launched, and the current device."""

    def __init__(self, current: list[int]) -> None:
        self.current, self.calls = current, []

    def warmup(self, *, grid, **options):
        self.calls.append(("warmup", grid, options, self.current[-1]))
        return "compiled"

    def __getitem__(self, grid):
        return lambda **options: self.calls.append(("run", grid, options, self.current[-1]))


def test_the_device_of_the_first_tensor_is_current(monkeypatch):
    """Whichever device is the current one."""
    current = [0]

    class Guard:
        def __init__(self, device):
            self.index = device.index

        def __enter__(self):
            current.append(self.index)

        def __exit__(self, *_):
            current.pop()

    monkeypatch.setattr(torch.cuda, "device", Guard)
    kernel = Kernel(current)
    with FakeTensorMode():
        x, y = torch.empty(2, device="cuda:1"), torch.empty(2)
    first, second = {"n": 7, "pair": (None, x), "num_warps": 4}, {"y": y}
    launch(kernel, (3,), **first)
    launch(kernel, (1,), **second)
    assert kernel.calls == [("run", (3,), first, 1), ("run", (1,), second, 0)]
    assert current == [0]


def test_a_launch_is_linked_and_introduced_before_it_runs(monkeypatch):
    kernel, libraries = Kernel([0]), (("libnvshmem_device", "/a.bc"),)
    asked = []
    words = torch.zeros(1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(runtime.nvshmem, "extern_libs", lambda a: asked.append(a) or libraries)
    monkeypatch.setattr(runtime, "init_module", lambda made: kernel.calls.append(made))
    launch(kernel, (3,), words=(words, None), W=2, NVSHMEM=True, num_warps=4)
    launch(kernel, (3,), words=words, NVSHMEM=False, num_warps=4)
    options = {"words": (words, None), "W": 2, "NVSHMEM": True, "num_warps": 4, "extern_libs": libraries}
    assert kernel.calls == [
        ("warmup", (3,), options, 0),
        "compiled",
        ("run", (3,), options, 0),
        ("run", (3,), {"words": words, "NVSHMEM": False, "num_warps": 4}, 0),
    ]
    assert asked == [90]


def test_every_kernel_that_is_launched_has_a_specimen():
    """By the text of the modules: launch(name, ...)."""
    declared = {specimen.kernel.fn.__name__ for specimen in all_specimens(90)}
    folder = runtime.__spec__.origin.rpartition("/")[0]
    launched = set()
    for path in Path(folder).rglob("*.py"):
        launched |= set(re.findall(r"\blaunch\(\s*(\w*_kernel),", path.read_text()))
    assert {"overlap_kernel", "gluon_overlap_kernel", "exchange_counts_kernel", "release_kernel"} <= launched
    assert launched <= declared, f"without a specimen: {sorted(launched - declared)}"
