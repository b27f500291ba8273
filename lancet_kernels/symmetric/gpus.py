"""Which GPU is it, and can another one's memory take signals through a pointer?"""

from __future__ import annotations

from importlib import import_module

import torch


def gpu_id(device: torch.device) -> str:
    """The same in every process that sees this GPU, under whatever index."""
    return str(torch.cuda.get_device_properties(device).uuid)


def signals_reach(device: torch.device, gpu: str) -> bool:
    """Can signals go to that GPU through a pointer? Over PCIe stores arrive but atomics do not.

    A GPU that this process does not see (other processes' only, or another node of an NVLink domain) has a
    pointer over NVLink or none at all.

    Args: gpu: its `gpu_id`.
    """
    seen = [i for i in range(torch.cuda.device_count()) if gpu_id(torch.device("cuda", i)) == gpu]
    if not seen or seen[0] == device.index:
        return True
    try:
        runtime = import_module("cuda.bindings.runtime")
    except ImportError:  # cuda-python is optional; all GPUs with NVLink between them have native atomics
        links = nvlinks()
        return links is not None and links[device.index][seen[0]] > 0
    attribute = runtime.cudaDeviceP2PAttr.cudaDevP2PAttrNativeAtomicSupported
    _, native = runtime.cudaDeviceGetP2PAttribute(attribute, device.index, seen[0])
    return bool(native)


def nvlinks() -> list[list[int]] | None:
    """NVLinks between each two GPUs of this machine, by torch's own query of NVML; None if it cannot tell."""
    try:
        device_type = import_module("torch._C._autograd").DeviceType.CUDA
        detect = import_module("torch._C._distributed_c10d")._detect_dma_connectivity
        return detect(device_type, "nvlink").matrix
    except (ImportError, RuntimeError, AttributeError):
        return None
