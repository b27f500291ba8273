"""Triton's interpreter, sped up: prepared once per launch, and left as it was found."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from lancet_kernels.errors import UserError
from lancet_kernels.kernels import runtime

pytestmark = pytest.mark.skipif(not runtime.INTERPRETED, reason="about the interpreter")


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


def launch(times: int, fail: bool = False) -> int:
    out = torch.zeros(1, dtype=torch.int64)
    add_kernel[(1,)](torch.tensor([5]), out, TIMES=times, fail=fail)
    return out.item()


def test_calls_inside_a_kernel_prepare_nothing(monkeypatch) -> None:
    prepared = []
    patch = interpreter._patch_builtin
    monkeypatch.setattr(
        interpreter, "_patch_builtin", lambda package, *a: (prepared.append(package), patch(package, *a))
    )
    counts = []
    for times in (1, 2, 50):
        prepared.clear()
        assert launch(times) == 5 + 2 * times
        counts.append(len(prepared))
    assert counts[1] == counts[2] > 0


@pytest.mark.parametrize("fail", [False, True])
def test_after_a_launch_the_language_is_as_before(fail) -> None:
    load, reverse = tl.load, tl.tensor.__radd__
    assert tl.core.is_builtin(load)
    for _ in range(2):
        if fail:
            with pytest.raises(Exception, match="asked to fail"):
                launch(1, fail=True)
        else:
            launch(1)
        assert tl.load is load
        assert tl.tensor.__radd__ is reverse
    assert launch(2) == 9


def test_a_numpy_that_the_interpreter_does_not_take_is_refused() -> None:
    for triton_version, numpy_version in (("3.6.0", "2.3.5"), ("3.6.0", "1.26.4"), ("3.7.0", "2.4.0")):
        runtime.check_interpreter(triton_version, numpy_version)
    with pytest.raises(
        UserError, match=r"got Triton 3\.6\.0 with numpy 2\.5\.1, expected numpy older than 2\.4"
    ):
        runtime.check_interpreter("3.6.0", "2.5.1")
