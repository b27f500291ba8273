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

What the overlap kernels are given, and hand on, are named tuples of pointers and sizes.

A pointer that a launch has no use for is None, which is known when the kernel is compiled. Integers are
arguments of their own, and become `Sizes` inside the kernel: in a tuple Triton would compile another variant
for a 1 or a multiple of 16.
"""

from collections import namedtuple

Sizes = namedtuple("Sizes", "rank W L D F H R tiles chunks timeout_us num_problems dense_tiles limit")
"""rank: of this PE. tiles, chunks: room for that many in the table. timeout_us: of a wait. num_problems,
dense_tiles: independent GEMMs, and their tiles. limit: of task numbers."""

# Not a variant for each size, and none in which a 1 is a constant.
NOT_SPECIALIZED = [
    "rank", "W", "L", "R", "tiles", "chunks", "timeout_us", "num_problems", "dense_tiles", "limit",
]  # fmt: skip

Constants = namedtuple(
    "Constants",
    "BACKWARD ACT NVSHMEM TMA BM BN BN_IN BK BW PUT_ROWS PUT_BLOCK STAGES PUT_SLOTS WARPS",
    defaults=[0, 0, 0],
)
"""Compile-time constants of a variant.

BACKWARD: the direction. ACT: the activation. NVSHMEM: some peers are reached by it only. TMA: operands
are loaded through descriptors. Tiles are [BM, BN], those of the first GEMM [BM, BN_IN], steps BK; BW: a
power of two, W or more. A step of a put is [PUT_ROWS, PUT_BLOCK]. Of the Hopper kernel: STAGES of
operands and PUT_SLOTS of puts in shared memory, WARPS that multiply.
"""

PassState = namedtuple("PassState", "words table ready done sent report")
"""Pointers of one pass through an exchange, all on this PE.

words: int64 [8], the epoch, then counters of claims. table: int32, `schedule.py`. ready: int64
[tiles], finished column tiles of the first GEMM. done: int64 [tiles], of the second. sent: int64
[chunks], finished parts of puts. report: int64 [8], `device.report_failure`.
"""

Arrivals = namedtuple("Arrivals", "rows rows_peers weights weights_peers arrived arrived_peers released")
"""Where rows arrive, in symmetric memory: rows [A, D], in a backward [R, D] with weights [R], float32;
arrived [tiles, W] and released [W], int64. peers: tables of their addresses."""

Returns = namedtuple("Returns", "rows rows_peers dots dots_peers returned returned_peers poisoned")
"""Where results come back, in symmetric memory: rows [S, D]; dots [S], float32, gradients of the rows'
weights; returned [chunks], int64. poisoned: int64 [1], of this PE."""

Stages = namedtuple("Stages", "rows results dots")
"""Symmetric memory from which NVSHMEM sends: rows [S, D], results [R, D], dots [R]."""

Sending = namedtuple("Sending", "rows token weights")
"""What is put: rows [T, D]; token int32 [S], which of them each row to send is; weights float32 [S], in
a backward (from symmetric memory where NVSHMEM sends)."""

Gemms = namedtuple(
    "Gemms", "weight_in bias_in pre hidden weight_out bias_out activated row_dots", defaults=[None, None]
)
"""The two GEMMs of an expert, in the order of the direction.

Forward: weight_in [L, D, H], bias_in [L, H], pre [A, H], hidden [R, F], weight_out [L, F, D], bias_out
[L, D]. Backward: weight_in [L, F, D], bias_in [L, D], pre [A, H], hidden [R, H] (dh), weight_out
[L, D, H], activated [R, F] (the forward's hidden again, weighted), row_dots [columns, R], float32.
Values of `pre` lie where the forward's rows do.
"""

Gradients = namedtuple("Gradients", "saved_rows weight_in bias_in weight_out bias_out")
"""Pointers of a backward: saved_rows [A, D], where rows of forwards lie, and where the gradients of
weights and biases go, like these."""

Pointers = namedtuple("Pointers", "of_pass arrivals returns stages sending gemms gradients problems")
"""All of them. problems: int64 [num_problems, 8], the table of independent GEMMs (`tasks.py`)."""
