"""`python -m bench.published [--json | --markdown] [--only TEXT] [--save]`: measurements of others, beside
predictions."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from bench.published.rows import Checked, check, load_rows, summary
from lancet_kernels.predict.report import PUBLISHED


def main() -> None:
    """Predict rows and print them."""
    parser = argparse.ArgumentParser(prog="python -m bench.published", description=__doc__)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the rows as JSON")
    form.add_argument("--markdown", action="store_true", help="print the tables of the documentation")
    parser.add_argument("--save", action="store_true", help="write what `lancet plan --report` shows of them")
    parser.add_argument("--only", default="", metavar="TEXT", help="the rows with this in their name")
    options = parser.parse_args()
    if options.only and options.save:
        parser.error("--save writes all rows, not those of --only")
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
    width = max(len(one.row.name) for one in checked)
    lines = [f"{'':{width}} {'measured':>12} {'predicted':>12} {'error':>8}"]
    for one in checked:
        mark = " fitted" if one.row.fitted else ""
        measured, predicted, error = _cells(one)
        lines.append(f"{one.row.name:{width}} {measured:>12} {predicted:>12} {error:>8}{mark}")
    return "\n".join([*lines, "", *_summary_lines(checked)])


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

    error = (
        "-"
        if one.error is None
        else f"{one.error:+.1%}"
        if quantity != "gain"
        else f"{one.error * 100:+.1f} pp"
    )
    return shown(one.row.measured), shown(one.predicted), error


if __name__ == "__main__":
    main()
