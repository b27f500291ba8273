"""`python -m bench.published.overlap_table`: what strategies hide, and what it costs, on the configuration of
torchtitan issue 3434, whose own table has the same columns.

Cutting a batch makes messages, kernels and grouped products more and smaller; moving weight gradients does
not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bench.published.rows import load_rows, question_of
from lancet_kernels.graph.ops import facts
from lancet_kernels.graph.program.program import Instruction, Kind
from lancet_kernels.predict.answer import Captured, Simulated, host_of
from lancet_kernels.schedules import MICROBATCHES

STRATEGIES = ("none", "duplex", "lancet-dw", "lancet", MICROBATCHES)


def table() -> str:
    """The table as Markdown."""
    row = next(row for row in load_rows() if "EP32, FSDP2, no overlap" in row.name)
    asked = question_of(row)
    lines = [
        "| strategy | step | exchanges | hidden | exposed | launches | grouped products |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    whole = Captured.of(asked)
    for name in STRATEGIES:
        if name == MICROBATCHES:
            half = replace(asked, microbatch=asked.microbatch // 2, accumulate=2)
            lines.append(_line(f"{name} (2 x {half.microbatch})", Captured.of(half), name))
        else:
            lines.append(_line(name, whole, name))
    return "\n".join(lines)


def _line(title: str, captured: Captured, strategy: str) -> str:
    result, shallow_and_deep = captured.simulated(strategy), captured.at_depths(strategy)
    microbatches = captured.microbatches[0].question.accumulate

    def total(of: Callable[[Simulated], float]) -> float:
        return captured.depths.at_full_depth(*map(of, shallow_and_deep)) * microbatches

    def milliseconds(counts: Callable[[Instruction], bool]) -> float:
        return total(
            lambda one: sum(t for i, t in zip(one.program.instructions, one.ms, strict=True) if counts(i))
        )

    cost = captured.microbatches[0].question.cost
    exchanges = milliseconds(lambda i: i.kind is Kind.ALL_TO_ALL)
    grouped = milliseconds(lambda i: bool(facts(i.op).grouped_gemm))
    launches = total(lambda one: sum(ms > 0 for ms in host_of(one.program, cost).ms))
    exposed = result.exposed_ms.get("all_to_all", 0.0)
    return (
        f"| `{title}` | {result.step_ms:,.0f} ms | {exchanges:.0f} ms | {1 - exposed / exchanges:.0%} "
        f"| {exposed:.0f} ms | {launches:,.0f} | {grouped:.0f} ms |"
    )


if __name__ == "__main__":
    print(table())
