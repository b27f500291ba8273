"""Attributes the difference between a measured and a predicted step to its terms.

A trace of torch's profiler (Kineto, Chrome's JSON) has the times of a rank's kernels; messages count only
where nothing computes, as in a prediction. Without a trace, the difference is split by the sensitivity of the
step to the relative error of each term (`UNSURE`): a term that is mostly hidden changes it little. Variances
of independent errors add up, so shares are those of the squares.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lancet_kernels.errors import UserError
from lancet_kernels.predict.answer import ATTENTION, ELEMENTWISE, HOST, PRODUCTS, Simulated
from lancet_kernels.predict.microbatch import OPTIMIZER

EXCHANGE = "all_to_all"
_KERNELS = (
    ("all_gather", r"ncclDevKernel_AllGather|ncclKernel_AllGather"),
    ("reduce_scatter", r"nccl\w*Kernel_ReduceScatter"),
    ("all_reduce", r"nccl\w*Kernel_AllReduce"),
    # NCCL's exchanges are sends and receives; DeepEP's and HybridEP's kernels have these names.
    (EXCHANGE, r"nccl\w*Kernel_SendRecv|deep_?ep|hybrid_?ep|internode|intranode|::(dispatch|combine)\b"),
    (OPTIMIZER, r"adam|multi_tensor"),
    (ATTENTION, r"flash|fmha|attention|sdpa|mha_"),
    # Recurrent layers, which count as attention: kernels of FLA, of mamba_ssm and of causal_conv1d.
    (ATTENTION, r"chunk_(scan|state|fwd|bwd|gated|local|kda|scaled|cumsum)|recompute_w_u|wy_repr"),
    (ATTENTION, r"_inverse_kernel|state_passing|selective_scan|causal_conv1d"),
    (PRODUCTS, r"gemm|nvjet|cutlass|matmul|xmma|wgmma"),
)  # fmt: skip
"""Terms and patterns of their kernels' names; the first match counts, all others are element-wise."""
MESSAGES = ("all_gather", "reduce_scatter", "all_reduce", EXCHANGE)


UNSURE = {HOST: 0.6, ELEMENTWISE: 0.5, PRODUCTS: 0.05, ATTENTION: 0.1, OPTIMIZER: 0.1}
"""Relative errors of predicted terms.

host: a launch takes 13.5 to 37.1 us by the machine (torch's `Linear`: TransformerEngine issue 2053), 28 are
predicted. element-wise: fused passes are predicted, and systems differ in what they fuse. products,
attention: the tables and benchmarks that the cluster files quote, by shape.
"""
UNSURE_MESSAGES = 0.15
"""DeepEP's documented bandwidth between 2, 4 and 8 nodes: 43, 58 and 51 GB/s."""


@dataclass(frozen=True)
class Difference:
    """A term of a step. measured_ms: None without a trace. likely_ms: its part of the difference; without a
    trace, an estimate."""

    term: str
    predicted_ms: float
    measured_ms: float | None
    likely_ms: float


def differences(
    simulated: Simulated, measured_ms: float, trace_ms: Mapping[str, float] | None = None
) -> list[Difference]:
    """The terms, those that explain most first. Args: trace_ms: of `trace_terms`."""
    predicted, missing = simulated.terms_ms, measured_ms - simulated.step_ms
    if trace_ms is not None:
        names = dict.fromkeys([*predicted, *trace_ms])
        pairs = [(name, predicted.get(name, 0.0), trace_ms.get(name, 0.0)) for name in names]
        rows = [Difference(name, ms, traced, traced - ms) for name, ms, traced in pairs]
    else:
        moves = {
            name: simulated.step_ms_with({name: 1 + UNSURE.get(name, UNSURE_MESSAGES)}) - simulated.step_ms
            for name in predicted
        }
        squares = sum(ms**2 for ms in moves.values()) or 1.0
        rows = [
            Difference(name, ms, None, missing * moves[name] ** 2 / squares) for name, ms in predicted.items()
        ]
    return sorted(rows, key=lambda row: row.likely_ms * (1 if missing >= 0 else -1), reverse=True)


def trace_terms(path: str | Path, measured_ms: float) -> dict[str, float]:
    """Milliseconds of a step by term, from a trace of one or more steps of one rank.

    Args: measured_ms: of a step, from which the number of steps in the trace follows.
    Raises: UserError for a file without kernels.
    """
    try:
        data = Path(path).read_bytes()
        events = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        events = events["traceEvents"] if isinstance(events, dict) else events
        kernels = [
            (float(e["ts"]), float(e["ts"]) + float(e["dur"]), kernel_term(e["name"]))
            for e in events
            if _is_kernel(e)
        ]
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            "--kineto",
            got=f"{path} ({error})",
            expected="a trace of torch.profiler",
            do="write it with export_chrome_trace",
        ) from error
    if not kernels:
        raise UserError(
            "--kineto",
            got=f"{path} without kernels",
            expected="GPU kernels",
            do="trace ProfilerActivity.CUDA",
        )
    computing = _union((a, b) for a, b, term in kernels if term not in MESSAGES)
    terms: dict[str, float] = {}
    for begin, end, term in kernels:
        # A message counts where nothing computes.
        ms = (end - begin if term not in MESSAGES else _outside(begin, end, computing)) * 1e-3
        terms[term] = terms.get(term, 0.0) + ms
    span = (max(b for _, b, _ in kernels) - min(a for a, _, _ in kernels)) * 1e-3
    terms[HOST] = span - sum(b - a for a, b in _union((a, b) for a, b, _ in kernels)) * 1e-3
    steps = max(1.0, round(span / measured_ms))
    return {term: ms / steps for term, ms in terms.items()}


def kernel_term(name: str) -> str:
    """The term that a kernel of this name belongs to.

    Example: `nvjet_tst_128x256` is of the products, `ncclDevKernel_SendRecv` of the exchanges.
    """
    return next((term for term, names in _KERNELS if re.search(names, name, re.I)), ELEMENTWISE)


def _is_kernel(event: Mapping[str, Any]) -> bool:
    return event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint intervals with the same points, ascending."""
    union: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((begin, end))
    return union


def _outside(begin: float, end: float, union: list[tuple[float, float]]) -> float:
    """The length of an interval's part outside of disjoint ones."""
    return end - begin - sum(max(0.0, min(end, b) - max(begin, a)) for a, b in union if a < end and b > begin)
