"""`lancet explain`: what a saved plan does, or how two plans differ."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lancet_kernels.files import json_text
from lancet_kernels.schedules.plan import Plan


def add_parser(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "explain",
        help="say what a saved plan does, or how two plans differ",
        description="Print a plan that `lancet plan --save`, `Plan.save` or optimize(cache=...) wrote, as "
        "its `explain()` does; of two plans, what differs.",
    )
    command.add_argument("plan", metavar="PLAN.json", help="a saved plan")
    command.add_argument("other", metavar="OTHER.json", nargs="?", help="a second one, to compare with it")
    command.add_argument("--details", action="store_true", help="also what the planner did, op by op")
    command.add_argument("--json", action="store_true", help="print predictions and differences as JSON")
    command.set_defaults(run=run)


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Print the plan, or the difference. -> exit code."""
    files = [arguments.plan] if arguments.other is None else [arguments.plan, arguments.other]
    plans = [Plan.load(file) for file in files]
    facts = {file: _facts(plan) for file, plan in zip(files, plans, strict=True)}
    if len(plans) == 1:
        print(json_text(facts) if arguments.json else plans[0].explain(arguments.details))
        return 0
    different, same = difference(*plans), plans[0].fingerprint == plans[1].fingerprint
    if arguments.json:
        print(json_text({"plans": facts, "runs_the_same": same, "different": different}))
        return 0
    print(f"{'predicted':<40}{'iteration ms':>14}{'exposed ms':>12}{'peak GB':>9}")
    for file, plan in zip(files, plans, strict=True):
        p = plan.report.predicted
        print(f"{file:<40}{p.iteration_ms:>14.2f}{p.exposed_ms:>12.2f}{p.peak_memory_gb:>9.3g}")
    print("\n".join(["", *different, *(["Both plans run the same."] if same else [])]))
    return 0


def difference(one: Plan, other: Plan) -> list[str]:
    """The differences of two plans, a line each."""
    lines = []
    if one.program_fingerprint != other.program_fingerprint:
        lines.append(f"program: {one.program}, and {other.program}: another model, width or number of ranks")
    settings = [_settings(plan) for plan in (one, other)]
    for name in settings[0]:
        values = settings[0][name], settings[1][name]
        if values[0] != values[1]:
            lines.append(f"{name.replace('_', ' ')}: {values[0] or 'none'}, and {values[1] or 'none'}")
    cut = [{f"{r.first} .. {r.last} in {r.parts} parts" for r in p.ranges} for p in (one, other)]
    fused = [{group.layer for group in plan.fused if group.fused} for plan in (one, other)]
    for what, (first, second) in (("cut", cut), ("fused launch", fused)):
        lines += [f"{what} in the first only: {text}" for text in sorted(first - second)]
        lines += [f"{what} in the second only: {text}" for text in sorted(second - first)]
    waits = len(one.blocking), len(other.blocking)
    if set(one.blocking) != set(other.blocking):
        lines.append(f"computation waits for: {waits[0]} collectives, and {waits[1]}")
    common = set(one.order) & set(other.order)
    orders = [[name for name in plan.order if name in common] for plan in (one, other)]
    moved = sum(a != b for a, b in zip(*orders, strict=True))
    if moved:
        lines.append(f"order: {moved} of {len(common)} common instructions stand at another place")
    return lines


def _settings(plan: Plan) -> dict[str, Any]:
    names = ("chosen", "method", "costs", "memory_limit_gb")
    return {"strategy": plan.strategy, **{name: getattr(plan.report, name) for name in names}}


def _facts(plan: Plan) -> dict[str, object]:
    return {
        "program": plan.program,
        "predicted": asdict(plan.report.predicted),
        **_settings(plan),
        "compared": {name: asdict(p) for name, p in plan.report.compared.items()},
    }
