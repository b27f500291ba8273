"""Trains set-ups that are drawn, prints what becomes of each at once, and in the end how many were refused,
and why.

    python -m tests.generated_setups --ranks 2 --first 0 --count 500
    python -m tests.generated_setups --ranks 4 --count 100 --json bench/results/drawn-set-ups-4-ranks.json

The files in bench/results are shown in docs/explanation/proof.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import time
from collections import Counter
from datetime import date
from pathlib import Path
from random import Random

os.environ |= {"OMP_NUM_THREADS": "1", "LANCET_CHECK": "1"}

from tests.generated_setups.describe import drawn
from tests.generated_setups.outcomes import end_of
from tests.ranks import RankPool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("--ranks", 2), ("--first", 0), ("--count", 500)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--json", type=Path, help="file in which the ends and reasons are kept")
    given = parser.parse_args()
    ends, reasons, begin = Counter[str](), Counter[str](), time.monotonic()
    # Told to stop, it says what it has seen.
    with contextlib.closing(RankPool()) as pool, contextlib.suppress(KeyboardInterrupt):
        for number in range(given.first, given.first + given.count):
            setup = drawn(Random(number), given.ranks)
            end = end_of(pool, setup)
            ends[end.kind] += 1
            print(f"{number}: {end.kind}", flush=True)
            if end.kind == "failed":
                print(f"    {end.why}\n    {setup!r}", flush=True)
            elif end.why:
                # Of one reason, whatever names and numbers are in it.
                reasons[f"{end.kind}: {re.sub(r'[0-9]+', 'N', end.why)}"] += 1
    seconds = time.monotonic() - begin
    print(f"{given.ranks} ranks, {ends.total()} set-ups from {given.first}, {seconds:.0f} s:")
    print(", ".join(f"{count} {kind}" for kind, count in ends.most_common()))
    for reason, count in reasons.most_common():
        print(f"{count:5} {reason}")
    if given.json:
        kept = {"date": str(date.today()), "ranks": given.ranks, "ends": ends, "reasons": reasons}
        given.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
