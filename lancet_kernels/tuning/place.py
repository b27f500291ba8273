"""The device to tune for: the GPU of this machine, or for a dry run an architecture."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Multiprocessors of the A100, the H100 and the B200, by architecture.
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}


@dataclass(frozen=True)
class Place:
    """The GPU of this machine (`device`), or an architecture for a dry run (device None).

    Attributes: name: of the device in the cache's keys. arch: 90 for sm_90. sms: multiprocessors.
    """

    device: torch.device | None
    name: str
    arch: int
    sms: int

    @staticmethod
    def here(device: torch.device) -> Place:
        properties = torch.cuda.get_device_properties(device)
        arch = 10 * properties.major + properties.minor
        return Place(device, properties.name, arch, properties.multi_processor_count)

    @staticmethod
    def elsewhere(arch: int) -> Place:
        return Place(None, f"sm_{arch}", arch, MULTIPROCESSORS[arch])
