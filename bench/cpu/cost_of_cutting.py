"""Where does a partitioned step spend more computation than a whole one? Op by op, measured here.

    torchrun --nproc-per-node 2 bench/cpu/cost_of_cutting.py             a table: a minute
    torchrun --nproc-per-node 2 bench/cpu/cost_of_cutting.py --json > cutting.json

The step of `lancet bench overlap` over a link on which all-to-all takes 40 % of the blocking iteration, cut
as the plan `lancet` cuts it. Each instruction of the whole graph and of the cut graph is timed alone, on all
ranks at once (`graph.costs.profiler`); an op's parts together are set against the op as a whole. What only
the cut graph has is listed by what it is for.

Of 1033 ms, cutting four ranges adds 67 (6.5 %, CPU time beside other work, 2026-11-24): experts' GEMMs of
parts 25, joining rows 12, windows of rows 8, joining other parts 7, exchanges of counts 6; matrix products
that are written in place (`schedules.rewrite.in_place`) nothing. With the first range in eight parts it is
19 %: the experts' GEMMs add 56 ms, other matrix products 43, joining other parts only 8.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from lancet_kernels.graph.program.program import Kind, Program
from lancet_kernels.graph.rules.part_instruction import whole_name
from lancet_kernels.measuring.step_bench import slow_link
from lancet_kernels.optimization.captured_step import CapturedStep
from lancet_kernels.training.models import GPT2MoE, model_config
from lancet_kernels.training.ranks import report_errors, start_ranks
from lancet_kernels.training.step import TrainingStep

BATCH = 8
ADDED = {
    "aten.cat": "joining parts",
    "lancet.merge_parts": "joining rows of parts",
    "lancet.merge_rows": "joining rows of parts",
    "lancet.part_rows": "slots and counts of parts",
    "lancet.window_rows": "rows in a window of slots",
    "lancet.window_counts": "rows in a window of slots",
    "aten.slice": "slices",
    "aten.add": "summing parts",
}


def differences(whole: Program, cut: Program) -> dict[str, tuple[int, float, float]]:
    """By op: how many are cut, milliseconds of them as a whole, milliseconds of all their parts."""
    names = {i.name: i for i in whole.instructions if i.kind is Kind.COMPUTE}
    parts: Counter[str] = Counter()
    found: dict[str, list[float]] = {}
    for instruction in cut.instructions:
        if instruction.kind is not Kind.COMPUTE or instruction.name in names:
            continue
        origin = whole_name(instruction.name)
        if origin != instruction.name and origin in names:
            parts[origin] += 1
            row = found.setdefault(instruction.op, [0, 0.0, 0.0])
            if parts[origin] == 1:
                row[0] += 1
                row[1] += names[origin].milliseconds or 0.0
        else:
            row = found.setdefault(ADDED.get(instruction.op, instruction.op), [0, 0.0, 0.0])
        row[2] += instruction.milliseconds or 0.0
    return {op: (int(n), before, after) for op, (n, before, after) in found.items()}


def main() -> int:
    """Measure, and print on rank 0. -> exit code."""
    parser = argparse.ArgumentParser(description="What the parts of a plan cost beside the whole.")
    parser.add_argument(
        "--model", default="gpt2-bench-moe", help="as in `lancet train` (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    rank = start_ranks("cpu", 300.0)
    torch.manual_seed(0)
    config = model_config(arguments.model, num_experts=2 * rank.world)
    model = TrainingStep(GPT2MoE(config), rank.world)
    token_BS = torch.randint(config.vocab, (BATCH, config.sequence))
    gbps = slow_link(model, (token_BS, token_BS))
    with tempfile.TemporaryDirectory() as folder:
        step = CapturedStep.of(model, (token_BS, token_BS), {}, "sum", Path(folder, "times.json"))
        graph = step.costed(replace(step.step(), inputs=step.graph_inputs()), None)
        plan = graph.planner().plan("lancet")
        cut = step.measured(graph, plan)
    rows = sorted(differences(graph.program, cut).items(), key=lambda row: row[1][1] - row[1][2])
    total = sum(i.milliseconds or 0.0 for i in graph.program.instructions)
    if rank.rank == 0 and arguments.json:
        ranges = [{"first": r.first, "last": r.last, "parts": r.parts} for r in plan.ranges]
        figures = {op: {"cut": n, "whole_ms": a, "parts_ms": b} for op, (n, a, b) in rows}
        print(
            json.dumps({"link_gbps": gbps, "compute_ms": total, "ranges": ranges, "ops": figures}, indent=1)
        )
    elif rank.rank == 0:
        print(f"computation of the whole step: {total:.1f} ms; {len(plan.ranges)} ranges cut")
        print(f"{'':32}{'cut':>5}{'whole ms':>10}{'parts ms':>10}{'more ms':>9}")
        for op, (n, before, after) in [*rows, ("all", _sum(rows))]:
            print(f"{op:32}{n:>5}{before:>10.2f}{after:>10.2f}{after - before:>9.2f}")
    return 0


def _sum(rows: list[tuple[str, tuple[int, float, float]]]) -> tuple[int, float, float]:
    columns = list(zip(*(row for _, row in rows), strict=True)) or [(0,), (0.0,), (0.0,)]
    return sum(columns[0]), sum(columns[1]), sum(columns[2])


if __name__ == "__main__":
    raise SystemExit(report_errors(main))
