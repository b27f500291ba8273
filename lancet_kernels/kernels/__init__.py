"""Kernels and their launchers; nothing here knows of autograd or torch.distributed.

    protocol/    puts, signals, waits, rows and tasks: what every overlap kernel does, whatever multiplies
    portable/    the overlap kernel in plain Triton: for float32, GPUs before Hopper and odd widths; says
                 what is right, and runs interpreted
    hopper/      the overlap kernel in Gluon for GPUs of compute capability 9.0
    symmetric/   memory that every PE has, and the addresses by which the others reach it

Here: the passes of a layer (`overlap.py` with its data and configuration), its parts as launches of their own
(`rows.py`), what launches share (`runtime.py`), and what each variant compiles to (`compile.py`).
"""
