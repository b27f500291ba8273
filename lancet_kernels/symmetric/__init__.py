"""Symmetric memory: regions that every PE has, and the addresses by which the others reach them."""

from lancet_kernels.symmetric.memory import Region, SymmetricMemory
from lancet_kernels.symmetric.shared import SharedMemory
from lancet_kernels.symmetric.virtual import VirtualMemory, virtual_memories

__all__ = ["Region", "SharedMemory", "SymmetricMemory", "VirtualMemory", "virtual_memories"]
