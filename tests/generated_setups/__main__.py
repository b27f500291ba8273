"""Runs set-ups drawn at random, and says which trained right, which were refused and why, and which failed.

    python -m tests.generated_setups --count 500                  numbers 0 to 499
    python -m tests.generated_setups --first 500 --count 100 --results /tmp/setups.jsonl
    python -m tests.generated_setups --setup "Setup(blocks=(Block(),), strategy='none')" --shrink

What --results has already is not run again, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tests.generated_setups import describe
from tests.generated_setups.describe import Setup, drawn
from tests.generated_setups.run import outcome_on_ranks, signature, smallest
from tests.generated_setups.train import Outcome
from tests.ranks import RankPool


def main() -> int:
    """-> 0 if nothing failed, 1 otherwise."""
    parser = argparse.ArgumentParser(
        prog="tests.generated_setups",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--first", type=int, default=0, help="the first number (default: 0)")
    parser.add_argument("--count", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--results", type=Path, help="file with a line for each that has run")
    parser.add_argument("--setup", help="this one instead, as Python or as JSON")
    parser.add_argument("--shrink", action="store_true", help="make what fails smaller")
    options = parser.parse_args()
    done = _read(options.results)
    if options.setup:
        done, wanted = {}, {options.first: _parse(options.setup)}
    else:
        wanted = {n: drawn(n) for n in range(options.first, options.first + options.count)}
    pool = RankPool(2)
    try:
        for number, setup in wanted.items():
            if number not in done:
                done[number] = _run(pool, number, setup, options.shrink)
                _append(options.results, number, setup, done[number])
    finally:
        pool.close()
        failed = _report({number: done[number] for number in wanted if number in done})
    return 1 if failed else 0


def _run(pool: RankPool, number: int, setup: Setup, shrink: bool) -> Outcome:
    found = outcome_on_ranks(pool, setup)
    print(f"{number}: {found.kind} in {found.seconds:.1f} s  {found.why}", flush=True)
    if found.kind == "failed":
        print(f"    {setup!r}\n    {found.where}", flush=True)
        if shrink:
            small, why = smallest(pool, setup, found)
            print(f"    smallest: {small!r}\n    {why.why}\n    {why.where}", flush=True)
    return found


def _report(outcomes: dict[int, Outcome]) -> int:
    """How many of each kind, and why. -> how many failed."""
    by_kind = Counter(one.kind for one in outcomes.values())
    planned = sum(one.kind == "right" and not one.fallbacks for one in outcomes.values())
    print(f"{len(outcomes)} set-ups: {dict(by_kind)}; {planned} right with the plan in every step")
    for kind in ("refused", "failed"):
        why: dict[str, list[int]] = {}
        for number, one in outcomes.items():
            if one.kind == kind:
                why.setdefault(_alike(one) if kind == "refused" else signature(one), []).append(number)
        for text, numbers in sorted(why.items(), key=lambda item: -len(item[1])):
            print(f"  {len(numbers):4} {kind}: {text}  {numbers[:10]}")
    return by_kind["failed"]


def _alike(outcome: Outcome) -> str:
    """A message without names and numbers."""
    return re.sub(r"blocks\.[\w.]+|\d+", "..", outcome.why)[:160]


def _parse(text: str) -> Setup:
    return Setup.from_json(text) if text.lstrip().startswith("{") else eval(text, vars(describe))


def _read(path: Path | None) -> dict[int, Outcome]:
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["number"]: Outcome(**line["outcome"]) for line in lines}


def _append(path: Path | None, number: int, setup: Setup, outcome: Outcome) -> None:
    if path is not None:
        with path.open("a") as file:
            line = {"number": number, "outcome": asdict(outcome), "setup": json.loads(setup.to_json())}
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
