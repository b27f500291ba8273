"""The least time that work can take on a GPU, by its vendor's peaks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Hardware:
    """A GPU as its vendor describes it.

    Attributes: tflops16: dense bf16 or fp16 with tensor cores; tflops32: float32 on the plain cores.
    """

    name: str
    arch: int
    tflops16: float
    tflops32: float
    memory_gb_per_s: float

    def tflops(self, dtype: torch.dtype) -> float:
        return self.tflops16 if dtype.itemsize == 2 else self.tflops32


HARDWARE = (
    Hardware("A100", 80, 312.0, 19.5, 2039.0),
    Hardware("H100", 90, 989.0, 67.0, 3350.0),
    Hardware("H200", 90, 989.0, 67.0, 4800.0),
    Hardware("B200", 100, 2250.0, 80.0, 8000.0),
)


def hardware_of(arch: int, name: str = "") -> Hardware:
    """The one that is named, or the first of this architecture, or the newest that is not newer."""
    for hardware in HARDWARE:
        if hardware.arch == arch and hardware.name in name:
            return hardware
    older = [hardware for hardware in HARDWARE if hardware.arch <= arch] or HARDWARE[:1]
    return next(hardware for hardware in HARDWARE if hardware.arch == older[-1].arch)


def roofline_ms(flops: float, moved_bytes: float, dtype: torch.dtype, hardware: Hardware) -> float:
    """The least that this work can take: arithmetic at peak, or every byte moved once."""
    return max(flops / hardware.tflops(dtype) * 1e-9, moved_bytes / hardware.memory_gb_per_s * 1e-6)
