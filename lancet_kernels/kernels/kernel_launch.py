"""How is a kernel launched? On the device of its tensors, whichever device is the current one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """kernel[grid](*args, **options), on the device of the first tensor.

    Triton launches on the current device, and torch changes it for its own ops only: without this, tensors on
    cuda:1 with cuda:0 current are an illegal memory access, or a kernel on the wrong GPU's stream.
    """
    with on_device(device_of((*args, *options.values()))):
        kernel[grid](*args, **options)


def device_of(args: tuple[Any, ...]) -> torch.device:
    """The device of the first tensor among a kernel's arguments."""
    return next(argument.device for argument in args if isinstance(argument, Tensor))


def on_device(device: torch.device) -> AbstractContextManager:
    """Inside, it is the current device. Nothing on the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
