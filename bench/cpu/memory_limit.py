"""How much communication do `overlap_pass` and torch's pass hide within a memory limit? By one simulator.

    python -m bench.cpu.memory_limit                          a table: some minutes, a CPU is enough
    python -m bench.cpu.memory_limit --json > limits.json

Three training steps with FSDP and expert parallelism (`fsdp_step.SHAPES`), captured under a fake process
group. Nothing runs: times are simulated with the costs of a cluster file, for both the same. Limits are
times the peak of the original order. torch's `schedule_overlap_bucketing` gets the same limit, and
buckets nothing; where it needs more all the same, `peak` says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from bench.cpu.fsdp_step import SHAPES, CapturedStep, Shape, captured, order_of_pass, order_of_torch
from lancet_kernels.graph.costs.costs import durations
from lancet_kernels.schedules.time.peak_memory import peak_memory
from lancet_kernels.schedules.time.simulate import lower_bound_ms, run

LIMITS = (1.0, 1.03, 1.1, 1.25, None)
"""Times the original peak; None: no limit."""


@dataclass(frozen=True)
class Row:
    """One order of one step. Times in simulated milliseconds; seconds are what finding the order took
    here."""

    step: str
    limit: float | None
    method: str
    iteration_ms: float
    exposed_ms: float
    hidden: float
    """Share of the communication."""
    peak: float
    """Times the original peak."""
    seconds: float


def rows(step: CapturedStep, limits: Sequence[float | None] = LIMITS) -> Iterator[Row]:
    """The original order, then torch's and ours for each limit."""
    program, ms = step.program, durations(step.program, step.cost)
    original = list(range(len(program)))
    peak = peak_memory(program)

    def row(limit: float | None, method: str, order: list[int], seconds: float) -> Row:
        times = run(program, ms, order)
        link = sum(times.end[i] - times.start[i] for i in times.messages)
        hidden = 1 - times.exposed_ms / link
        needed = peak_memory(program, order) / peak
        return Row(program.name, limit, method, times.iteration_ms, times.exposed_ms, hidden, needed, seconds)

    yield row(None, "original", original, 0.0)
    for limit in limits:
        begin = time.process_time()
        order = order_of_torch(step, 1e3 if limit is None else limit - 1)
        yield row(limit, "torch", order, time.process_time() - begin)
        begin = time.process_time()
        order = order_of_pass(step, limit)
        yield row(limit, "ours", order, time.process_time() - begin)


def measured(shape: Shape) -> tuple[str, list[Row]]:
    """A line about a step, and its rows."""
    with captured(shape) as step:
        program, ms = step.program, durations(step.program, step.cost)
        bound = lower_bound_ms(program, ms)
        peak = peak_memory(program) / 1e9
        about = (
            f"{shape.name}: {len(program)} instructions, {shape.layers} layers, {shape.ranks} ranks, "
            f"experts over {shape.expert_ranks}, {shape.cluster}; peak {peak:.1f} GB; "
            f"no order under {bound:.1f} ms"
        )
        return about, list(rows(step))


def table(found: Sequence[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| limit | order | iteration ms | exposed ms | hidden | peak | seconds |", "|---" * 7 + "|"]
    for r in found:
        limit = "" if r.method == "original" else "none" if r.limit is None else f"{r.limit:g}"
        found_ms = f"| {limit} | {r.method} | {r.iteration_ms:.1f} | {r.exposed_ms:.1f} "
        lines.append(f"{found_ms}| {r.hidden:.1%} | {r.peak:.3f} | {r.seconds:.1f} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="memory_limit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--layers", type=int, help="number of layers (default: the model's own)")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args(argv)
    everything = []
    for name in options.steps:
        shape = SHAPES[name]
        about, found = measured(shape if options.layers is None else replace(shape, layers=options.layers))
        everything += found
        if not options.json:
            print(f"{about}. Simulated.\n\n{table(found)}\n", flush=True)
    if options.json:
        print(json.dumps({"simulated": True, "rows": [asdict(row) for row in everything]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
