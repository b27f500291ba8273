"""Kernels run where their tensors are, whichever device is the current one."""

import torch
from torch._subclasses import FakeTensorMode

from lancet_kernels.kernels.kernel_launch import launch


class Kernel:
    """Notes the grid, the arguments and the current device of each launch."""

    def __init__(self, current: list[int]) -> None:
        self.current, self.launches = current, []

    def __getitem__(self, grid):
        return lambda **options: self.launches.append((grid, sorted(options), self.current[-1]))


def test_the_device_of_the_first_tensor_is_current(monkeypatch):
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
    launch(kernel, (3,), n=7, pair=(None, x), num_warps=4)
    launch(kernel, (1,), y=y)
    assert kernel.launches == [((3,), ["n", "num_warps", "pair"], 1), ((1,), ["y"], 0)]
    assert current == [0]
