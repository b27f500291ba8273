"""The device that is tuned for: the GPU of this machine, or an architecture to compile for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lancet_kernels.kernels.launch_model import Hardware, hardware_of
from lancet_kernels.kernels.tuned_entry import MEASURED, MODELLED


@dataclass(frozen=True)
class Place:
    """The GPU of this machine (`device`), or an architecture to compile for.

    Attributes: name: of the device in the cache's keys.
    """

    device: torch.device | None
    name: str
    hardware: Hardware

    @property
    def how(self) -> str:
        return MODELLED if self.device is None else MEASURED

    @staticmethod
    def here(device: torch.device) -> Place:
        properties = torch.cuda.get_device_properties(device)
        arch = 10 * properties.major + properties.minor
        return Place(device, properties.name, hardware_of(arch, properties.name))

    @staticmethod
    def modelled(arch: int) -> Place:
        return Place(None, f"sm_{arch}", hardware_of(arch))
