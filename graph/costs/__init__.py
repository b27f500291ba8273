"""What an instruction costs.

Read `costs` first, then `clusters`; `profiler`, `measure` and `measure_device` time this machine.
"""
