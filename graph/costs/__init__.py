"""What an instruction costs.

Read `costs` first, then `clusters` and `communication`; `profiler`, `measure` and `measure_device` time this
machine.
"""
