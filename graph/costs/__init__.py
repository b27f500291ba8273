"""Costs of instructions.

Read `costs` first, then `clusters`; `profiler`, `measure` and `measure_device` time this machine.
"""
