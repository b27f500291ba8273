"""How much communication do `overlap_pass` and torch's pass hide within a memory limit? By one simulator.

    python -m bench.cpu.memory_limit                          a table: some minutes, a CPU is enough
    python -m bench.cpu.memory_limit --gbps 10 5 2        links of 10, 5 and 2 GB/s
    python -m bench.cpu.memory_limit --json > limits.json

Three training steps with FSDP and expert parallelism (`fsdp_step.SHAPES`), captured under a fake process
group. Nothing runs: times are simulated with the costs of a cluster file, for both the same. With `--gbps`
each rank has one link of that rate, and computation takes the time of a V100 (p3dn, float32): so it takes
longer than communication at 10 GB/s, and less time at 2 GB/s. Limits are times the peak of the original
order. torch's `schedule_overlap_bucketing` gets the same limit, and buckets nothing; where it needs more all
the same, `peak` says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.cpu.fsdp_step import SHAPES, CapturedStep, Shape, captured, order_of_pass, order_of_torch
from lancet_kernels.graph.costs.costs import Cost, Tensors, collective_of, durations
from lancet_kernels.graph.program.program import Instruction
from lancet_kernels.schedules.time.peak_memory import peak_memory
from lancet_kernels.schedules.time.simulate import lower_bound_ms, run

LIMITS = (1.0, 1.03, 1.1, 1.25, None)
"""Times the original peak; None: no limit."""
SLOW_CLUSTER, SLOW_LATENCY_MS = "p3dn", 0.02


def slow_link(shape: Shape, gb_per_s: float) -> Cost:
    """Costs of a shape with one link of `gb_per_s` per rank; computation as on `SLOW_CLUSTER`."""
    computation = replace(shape, cluster=SLOW_CLUSTER).cost

    def cost(instruction: Instruction, tensors: Tensors) -> float:
        if not instruction.kind.is_communication:
            return computation(instruction, tensors)
        ranks = shape.ranks
        if collective_of(instruction) == "all_to_all":
            ranks = shape.expert_ranks
        elif instruction.attributes.get("group") == "replica":
            ranks //= shape.expert_ranks
        return SLOW_LATENCY_MS + instruction.bytes * (ranks - 1) / ranks / gb_per_s * 1e-6

    return cost


@dataclass(frozen=True)
class Row:
    """One order of one step. Times in simulated milliseconds; seconds of a CPU are what finding the order
    took here; gbps is None for the links of the shape's cluster."""

    step: str
    gbps: float | None
    limit: float | None
    method: str
    iteration_ms: float
    exposed_ms: float
    hidden: float
    """Share of the communication."""
    peak: float
    """Times the original peak."""
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """What is the same on every machine."""
        return {key: value for key, value in asdict(self).items() if key != "seconds"}


def rows(
    step: CapturedStep, limits: Sequence[float | None] = LIMITS, gbps: float | None = None
) -> Iterator[Row]:
    """The original order, then torch's and ours for each limit, at the costs of the step."""
    program, ms = step.program, durations(step.program, step.cost)
    original = list(range(len(program)))
    peak = peak_memory(program)

    def row(limit: float | None, method: str, order: list[int], seconds: float) -> Row:
        times = run(program, ms, order)
        link = sum(times.end[i] - times.start[i] for i in times.messages)
        hidden = 1 - times.exposed_ms / link
        needed = peak_memory(program, order) / peak
        took = times.iteration_ms, times.exposed_ms
        return Row(program.name, gbps, limit, method, *took, hidden, needed, seconds)

    yield row(None, "original", original, 0.0)
    for limit in limits:
        for method, find in (("torch", order_of_torch), ("ours", order_of_pass)):
            begin = time.process_time()
            order = find(step, limit)
            yield row(limit, method, order, time.process_time() - begin)


def measured(shape: Shape, gbps: Sequence[float | None] = (None,)) -> Iterator[tuple[str, list[Row]]]:
    """A line about the step and its rows, for each rate of the links (None: those of its cluster)."""
    with captured(shape) as own:
        for rate in gbps:
            step = own if rate is None else replace(own, cost=slow_link(shape, rate))
            program, ms = step.program, durations(step.program, step.cost)
            bound = lower_bound_ms(program, ms)
            peak = peak_memory(program) / 1e9
            where = shape.cluster if rate is None else f"links of {rate:g} GB/s, {SLOW_CLUSTER}'s computation"
            about = (
                f"{shape.name}: {len(program)} instructions, {shape.layers} layers, {shape.ranks} ranks, "
                f"experts over {shape.expert_ranks}, {where}; peak {peak:.1f} GB; "
                f"no order under {bound:.1f} ms"
            )
            yield about, list(rows(step, gbps=rate))


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
    parser.add_argument(
        "--gbps", nargs="+", type=float, help="GB/s of each rank (default: the cluster's links)"
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args(argv)
    everything = []
    for name in options.steps:
        shape = SHAPES[name]
        shape = shape if options.layers is None else replace(shape, layers=options.layers)
        for about, found in measured(shape, options.gbps or (None,)):
            everything += found
            if not options.json:
                print(f"{about}. Simulated.\n\n{table(found)}\n", flush=True)
    if options.json:
        print(json.dumps({"simulated": True, "rows": [row.to_json() for row in everything]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
