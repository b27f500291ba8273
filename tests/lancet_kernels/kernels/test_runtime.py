"""What a launch is given: the device of its tensors, all of NVSHMEM. The interpreter, prepared once."""

import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses import FakeTensorMode
from triton.runtime import interpreter

from lancet_kernels.errors import UserError
from lancet_kernels.kernels import runtime
from lancet_kernels.kernels.runtime import launch
from lancet_kernels.kernels.specimens import all_specimens

interpreted = pytest.mark.skipif(not runtime.INTERPRETED, reason="about the interpreter")


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


@triton.jit
def add_some(value, amount):
    # tl.cdiv is a @triton.jit function of another module, which sees tl.core and not tl.
    return value + tl.cdiv(amount, 2)


@triton.jit
def add_kernel(values, out, TIMES: tl.constexpr, fail: tl.constexpr = False):
    total = tl.load(values)
    for _ in range(TIMES):
        total = add_some(total, 3)
    if fail:
        tl.static_assert(False, "asked to fail")
    tl.store(out, total)


def added(times: int, fail: bool = False) -> int:
    out = torch.zeros(1, dtype=torch.int64)
    add_kernel[(1,)](torch.tensor([5]), out, TIMES=times, fail=fail)
    return out.item()


@interpreted
def test_calls_inside_a_kernel_prepare_nothing(monkeypatch) -> None:
    prepared = []
    patch = interpreter._patch_builtin
    monkeypatch.setattr(
        interpreter, "_patch_builtin", lambda package, *a: (prepared.append(package), patch(package, *a))
    )
    counts = []
    for times in (1, 2, 50):
        prepared.clear()
        assert added(times) == 5 + 2 * times
        counts.append(len(prepared))
    assert counts[1] == counts[2] > 0


@interpreted
@pytest.mark.parametrize("fail", [False, True])
def test_after_a_launch_the_language_is_as_before(fail) -> None:
    load, reverse = tl.load, tl.tensor.__radd__
    assert tl.core.is_builtin(load)
    for _ in range(2):
        if fail:
            with pytest.raises(Exception, match="asked to fail"):
                added(1, fail=True)
        else:
            added(1)
        assert tl.load is load
        assert tl.tensor.__radd__ is reverse
    assert added(2) == 9


def test_a_numpy_that_the_interpreter_does_not_take_is_refused() -> None:
    for triton_version, numpy_version in (("3.6.0", "2.3.5"), ("3.6.0", "1.26.4"), ("3.7.0", "2.4.0")):
        runtime.check_interpreter(triton_version, numpy_version)
    with pytest.raises(
        UserError, match=r"got Triton 3\.6\.0 with numpy 2\.5\.1, expected numpy older than 2\.4"
    ):
        runtime.check_interpreter("3.6.0", "2.5.1")
