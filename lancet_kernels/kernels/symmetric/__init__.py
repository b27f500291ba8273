"""Symmetric memory: regions that every PE has, and the addresses by which the others reach them."""

from lancet_kernels.kernels.symmetric.create import create
from lancet_kernels.kernels.symmetric.memory import Region, SymmetricMemory, VirtualMemory, virtual_memories
from lancet_kernels.kernels.symmetric.nvshmem import NvshmemMemory, init_module
from lancet_kernels.kernels.symmetric.shared import SharedMemory
from lancet_kernels.kernels.symmetric.torch_memory import TorchMemory
