"""`python -m bench.published [--json | --markdown] [--only TEXT] [--save]`: published measurements, beside
predictions.

`python -m bench.published --hidden`: communication that strategies hide, and its costs, on the configuration
of torchtitan issue 3434, whose own table has the same columns. Cutting a batch makes messages, kernels and
grouped products more and smaller; moving weight gradients does not.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from bench.published.rows import Checked, check, load_rows, question_of, summary
from lancet_kernels.cli import aligned
from lancet_kernels.graph.ops import facts
from lancet_kernels.graph.program import Instruction, Kind
from lancet_kernels.predict.answer import GRAPH_TRAINER, Captured, Simulated, host_of
from lancet_kernels.predict.report import PUBLISHED
from lancet_kernels.schedules import MICROBATCHES

STRATEGIES = ("none", GRAPH_TRAINER, "duplex", "lancet-dw", "lancet", "lancet+duplex", MICROBATCHES)
"""Rows of the table of --hidden."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.published", description=__doc__)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the rows as JSON")
    form.add_argument("--markdown", action="store_true", help="print the tables of the documentation")
    form.add_argument("--hidden", action="store_true", help="print the table of what strategies hide")
    parser.add_argument("--save", action="store_true", help="write what `lancet plan --report` shows of them")
    parser.add_argument("--only", default="", metavar="TEXT", help="the rows with this in their name")
    options = parser.parse_args()
    if options.only and options.save:
        parser.error("--save writes all rows, not those of --only")
    if options.hidden:
        print(hidden())
        return
    checked = check([row for row in load_rows() if options.only in row.name])
    if options.save:
        names = ("name", "quantity", "measured", "predicted", "error", "fitted", "source")
        rows = [{name: one.to_json()[name] for name in names} for one in checked]
        Path(str(PUBLISHED)).write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    if options.json:
        rows = [one.to_json() for one in checked]
        print(json.dumps({"rows": rows, "summary": summary(checked)}, indent=2))
    elif options.markdown:
        print(markdown(checked))
    else:
        print(text(checked))


def text(checked: Sequence[Checked]) -> str:
    """One line for each row, then the summary."""
    rows = [(one.row.name, *_cells(one), "fitted" if one.row.fitted else "") for one in checked]
    lines = aligned([("", "measured", "predicted", "error", ""), *rows], right=(1, 2, 3))
    return "\n".join([lines, "", *_summary_lines(checked)])


def _summary_lines(checked: Sequence[Checked]) -> list[str]:
    return [
        f"{name}: {numbers['rows']:.0f} rows, mean absolute error {numbers['mean']:.1%}, median "
        f"{numbers['median']:.1%}, worst {numbers['worst']:.1%}"
        for name, numbers in summary(checked).items()
    ]


def markdown(checked: Sequence[Checked]) -> str:
    """The tables of the documentation: fitted, predicted, not simulated."""
    fitted = [one for one in checked if one.row.fitted]
    predicted = [one for one in checked if not one.row.fitted and one.predicted is not None]
    missing = [one for one in checked if one.predicted is None]
    lines = [
        "| predicted row | measured | predicted | error | what is known of the error |",
        "|---|--:|--:|--:|---|",
    ]
    lines += [f"| {one.row.name} | {' | '.join(_cells(one))} | {one.row.why} |" for one in predicted]
    lines += ["", "| fitted row | measured | predicted | error |", "|---|--:|--:|--:|"]
    lines += [f"| {one.row.name} | {' | '.join(_cells(one))} |" for one in fitted]
    lines += ["", "| not simulated | measured | why |", "|---|--:|---|"]
    lines += [f"| {one.row.name} | {_cells(one)[0]} | {one.row.not_simulated} |" for one in missing]
    lines += ["", *(f"- {line}" for line in _summary_lines(checked))]
    return "\n".join(lines)


def _cells(one: Checked) -> tuple[str, str, str]:
    quantity = one.row.quantity

    def shown(value: float | None) -> str:
        if value is None:
            return "-"
        if quantity == "gain":
            return f"{value:.1%}"
        unit = "ms" if quantity.endswith("_ms") else "GiB" if quantity.endswith("_gib") else ""
        return f"{value:,.{0 if value > 100 else 2}f} {unit}".strip()

    error = "-"
    if one.error is not None:
        error = f"{one.error * 100:+.1f} pp" if quantity == "gain" else f"{one.error:+.1%}"
    return shown(one.row.measured), shown(one.predicted), error


def hidden() -> str:
    """The table of --hidden in Markdown."""
    row = next(row for row in load_rows() if "EP32, FSDP2, no overlap" in row.name)
    question = question_of(row)
    lines = [
        "| strategy | step | exchanges | hidden | exposed | launches | grouped products |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    whole = Captured.of(question)
    for name in STRATEGIES:
        if name == MICROBATCHES:
            half = replace(question, microbatch=question.microbatch // 2, accumulate=2)
            lines.append(_line(f"{name} (2 x {half.microbatch})", Captured.of(half), name))
        else:
            lines.append(_line(name, whole, name))
    # For EP16 the hidden share is published.
    on_two_nodes = Captured.of(replace(question, expert_ranks=16))
    lines.append(_line(f"{GRAPH_TRAINER}, EP16", on_two_nodes, GRAPH_TRAINER))
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
    main()
