"""Symmetric memory: regions that every PE has, and the addresses by which the others reach them."""

from lancet_kernels.symmetric.create import create
from lancet_kernels.symmetric.memory import Region, SymmetricMemory
from lancet_kernels.symmetric.nvshmem import NvshmemMemory, init_module
from lancet_kernels.symmetric.shared import SharedMemory
from lancet_kernels.symmetric.torch_memory import TorchMemory
from lancet_kernels.symmetric.virtual import VirtualMemory, virtual_memories
