"""What is said of a run of `make gpu`: a compact table of its figures, and last of all a short summary.

    python -m bench.gpu.gpu_table FIGURES.json LOGS    prints both; LOGS: the folder of the logs of its stages

Together they are short enough for readers who see only the last 12,000 characters. Needs nothing but Python.
Exit code 0: all passed, all was measured, and nothing is wrong.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

MEASURED = "measured"
# What a list may take in the summary.
MOST_NAMES, MOST_REMARKS, MOST_REASONS, WIDEST = 20, 12, 8, 200
OUTCOME = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
BEGUN = re.compile(r"^(tests/\S+\.py::\S.*?)\s*$")
NOT_COLLECTED = re.compile(r"^ERROR (tests/\S+?\.py)(?: |$)")
WHY = re.compile(r"^(?:FAILED|ERROR) (tests/\S+::.+?) - (.+)$")
SKIPPED = re.compile(r"^SKIPPED \[\d+\] \S+: (.+)$")
EXIT_CODE = re.compile(r"^exit code (\d+)$")
# Of `timeout`: time was up, and the command went by itself or had to be killed.
OUT_OF_TIME = (124, 137)


def wrong(figure: dict) -> str:
    """Why what was timed does not compute what it should; "" if nothing says so."""
    if "largest_difference" not in figure:
        return ""
    off, allowed = float(figure["largest_difference"]), figure["difference_allowed"]
    # NaN is not below anything: it is wrong.
    return "" if off <= allowed else f"difference {off:.2g}, allowed {allowed:g}"


def table(found: dict) -> str:
    """A line for each ratio: of all sizes the median, the tenth and ninetieth percentile, and the goal."""
    figures = found["figures"]
    if found["label"] != MEASURED:
        return f"{found['label']}; ran: " + ", ".join(f"{f['figure']} ({f['name']})" for f in figures)
    lines: dict[str, list[str]] = {}
    for figure in figures:
        mark = " WRONG" if wrong(figure) else ""
        for ratio in figure["ratios"]:
            value, goal = ratio["value"], ratio["goal"]
            cell = f"{figure['name']} {value['median']:.3f} ({value['p10']:.3f} {value['p90']:.3f})"
            if goal is not None:
                cell += f" goal {goal:g} " + ("reached" if value["median"] >= goal else "below")
            lines.setdefault(f"{figure['figure']}, {ratio['what']}", []).append(cell + mark)
    head = f"== figures, {found['device']}: median (p10 p90)"
    absent = {who: why for figure in figures for who, why in figure.get("absent", {}).items()}
    return "\n".join(
        [
            head,
            *(f"{what}: {'; '.join(cells)}" for what, cells in lines.items()),
            *_first([f"without {who}: {why}" for who, why in absent.items()], MOST_REMARKS),
        ]
    )


def remarks(found: dict) -> list[str]:
    """Figures that are wrong, and what was not measured."""
    mistakes = [f"WRONG: {w['what']}: {w['why']}" for w in found["wrong"]]
    missing = [f"not measured: {m['what']}: {m['why']}" for m in found["not_measured"]]
    return _first(mistakes, MOST_REMARKS) + _first(missing, MOST_REMARKS)


@dataclass
class StageLogs:
    """What the logs of one stage say, each a `pytest -v` with its exit code behind it.

    Attributes:
        counts: tests by outcome. failed: names, and why. begun: tests without an outcome, for the stage was
            stopped. reasons: why tests were skipped. troubles: what else went wrong.
    """

    logs: int = 0
    counts: Counter = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    reasons: Counter = field(default_factory=Counter)
    troubles: list[str] = field(default_factory=list)

    def read(self, text: str) -> None:
        self.logs += 1
        outcomes: dict[str, set[str]] = {}
        status, not_collected = None, []
        why: dict[str, str] = {}
        for line in text.splitlines():
            if match := OUTCOME.match(line):
                outcomes.setdefault(match[1], set()).add(match[2])
            elif match := BEGUN.match(line):
                outcomes.setdefault(match[1], set())
            elif match := WHY.match(line):
                why.setdefault(match[1], match[2])
            elif match := NOT_COLLECTED.match(line):
                not_collected.append(match[1])
            elif match := SKIPPED.match(line):
                self.reasons[match[1]] += 1
            elif match := EXIT_CODE.match(line):
                status = int(match[1])
        failed = [name for name, said in outcomes.items() if said & {"FAILED", "ERROR"}] + not_collected
        begun = [name for name, said in outcomes.items() if not said]
        self.failed += [f"{name}: {why[name]}" if name in why else name for name in failed]
        self.begun += begun
        self.counts["failed"] += len(failed)
        self.counts["passed"] += sum(said in ({"PASSED"}, {"XPASS"}) for said in outcomes.values())
        self.counts["skipped"] += sum(bool(said & {"SKIPPED", "XFAIL"}) for said in outcomes.values())
        if status in OUT_OF_TIME:
            self.troubles.append("stopped, for its time was up")
        elif status != 0 and not failed:
            self.troubles += [f"exit code {status}", *text.rstrip().splitlines()[-6:-1]]

    def lines(self, name: str, most_names: int) -> list[str]:
        counts = ", ".join(f"{self.counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
        head = f"{name}: {counts}" + (f" in {self.logs} processes" if self.logs > 1 else "")
        return [
            head,
            *_first([f"  {trouble}" for trouble in dict.fromkeys(self.troubles)], MOST_REASONS),
            *_first([f"  FAILED {test}" for test in self.failed], most_names),
            *_first([f"  was running: {test}" for test in self.begun], MOST_REASONS),
            *_first([f"  skipped: {reason}" for reason in self.reasons], MOST_REASONS),
        ]


def stages(logs: Path) -> dict[str, StageLogs]:
    """By name, in the order of their beginning; `name-3.log` is the log of the third process."""
    found: dict[str, StageLogs] = {}
    for log in sorted(logs.glob("*.log")):
        if log.stem != "measure":
            name = re.sub(r"-\d+$", "", log.stem)
            found.setdefault(name, StageLogs()).read(log.read_text(encoding="utf-8", errors="replace"))
    return found


def summary(found: dict | None, figures: Path, logs: Path) -> tuple[str, bool]:
    """-> the last lines of a run, and whether all is well. found: None if nothing was written."""
    lines, well = ["== summary"], True
    found_stages = stages(logs)
    failing = sum(bool(stage.failed) for stage in found_stages.values())
    for name, stage in found_stages.items():
        lines += stage.lines(name, MOST_NAMES // max(1, failing))
        well = well and not stage.failed and not stage.troubles
    notes = [*sorted(logs.glob("*-not-run.txt")), *sorted(logs.glob("*-said.txt"))]
    lines += [note.read_text(encoding="utf-8").rstrip() for note in notes]
    if found is None:
        log = logs / "measure.log"
        said = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines() if log.exists() else []
        lines += ["measure: no figures", *(f"  {line}" for line in said[-6:])]
    else:
        ended = "" if found["complete"] else ", cut short"
        lines += [f"measure: {len(found['figures'])} figures{ended}", *(f"  {r}" for r in remarks(found))]
    well = well and found is not None and found["complete"] and not remarks(found)
    lines += [f"figures: {figures}", f"logs: {logs}"]
    lines.append("all passed and measured" if well else "make gpu: not all passed, or not all was measured")
    return "\n".join(_short(line) for line in lines), well


def _first(lines: list[str], most: int) -> list[str]:
    more = len(lines) - most
    return lines[:most] + ([f"  ... and {more} more, see the logs and figures"] if more > 0 else [])


def _short(line: str) -> str:
    line = " ".join(line.splitlines()).rstrip()
    return line if len(line) <= WIDEST else line[: WIDEST - 3] + "..."


def main(figures: str, logs: str) -> int:
    try:
        found = json.loads(Path(figures).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if found is not None:
        print(table(found))
    text, well = summary(found, Path(figures), Path(logs))
    print(text)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
