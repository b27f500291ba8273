"""Puts, signals, waits; where rows lie on every PE; which task has which number; what a failed wait says.

Letters, the same everywhere:

    W  PEs, L experts on each, E = W * L    T  tokens here    K  choices per token
    D  model width    F  hidden width    H  F, or 2F for swiglu: gate | up
    S  most rows that a PE sends    R  most rows that a pass receives    A  those of all open passes together
    BM, BN  the tile of an output    BN_IN  columns of a tile of the first GEMM    BK  step of a contraction

Words:

    pass       the launches of one direction of a layer, forward or backward; it has an epoch and, while it is
               open, rows and a place to note them (`exchange.py`)
    chunk      what a PE sends into one tile; a put is a part of it
    arrived    signal: the rows of that chunk are here         returned   its results are here
    counted    a PE's counts are here                          released   it is through with its backward
    ready, sent, done    counters of one PE: finished columns of a tile of the first GEMM, parts of a chunk,
               columns of a tile of the second GEMM
    void       a pass whose rows do not fit: nothing is put    poisoned   what may be wrong from now on: NaN
    record     note launches instead of running them           warm up    compile and load what was recorded

Four proofs, and what each would find that no other does:

    the model    `protocol_model.py` on `weak_memory.py`: every interleaving of several passes. Rows, results,
                 counts or words that are used again too early; a release that does not cover all
    the list     `test_tasks.py`: tasks, for any counts, that wait for a later one of their PE, which with one
                 program is a deadlock; numbers of the device that are not those of the rules
    the emulator `gluon_emulator/`, with mutants of the source: races inside a program of the Hopper kernel,
                 with copies, products, barriers and fences in any order
    the fuzz     `fuzz_routings.py`: kernels as they are, between processes. A row, a result or a sum that is
                 wrong for some counts
"""
