"""Simulates a paper's experiments on its clusters, and prints them beside the paper's numbers.

    python -m bench.papers lancet
    python -m bench.papers hidup --figures "7,8,table 4"
    python -m bench.papers primepar --json > primepar.json

No GPU is needed; some minutes on 2 cores. Pictures go to reproduced/.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.papers import hidup, lancet, primepar, report
from lancet_kernels.errors import UserError
from lancet_kernels.files import file_errors, json_text

PAPERS = {"lancet": lancet, "hidup": hidup, "primepar": primepar}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.papers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paper", choices=PAPERS)
    parser.add_argument("--figures", metavar="LIST", help="some of the paper's, as in 11,13 (default: all)")
    parser.add_argument(
        "--output-folder", default="reproduced", metavar="DIR", help="for pictures (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(argv)
    try:
        print(reproduced(options))
    except UserError as error:
        print(f"bench.papers: {error}", file=sys.stderr)
        return 1
    return 0


def reproduced(options: argparse.Namespace) -> str:
    """The text to print. Raises: UserError for figures that the paper does not have, and for a folder that
    cannot be written."""
    paper, folder = PAPERS[options.paper], Path(options.output_folder)
    figures = _chosen(options.figures, options.paper, paper.FIGURES)
    # Created before the simulation, which takes minutes, so that an error comes early.
    with file_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    data = paper.simulate(figures, report.in_processes)
    with file_errors(folder):
        files = report.save_pictures(paper, options.paper, data, folder)
    if options.json:
        return json_text(report.as_json(paper, data, files))
    pictures = f"\n\nPictures: {', '.join(files.values())}" if files else ""
    return report.text(paper, data) + pictures


def _chosen(names: str | None, paper: str, figures: Sequence[str]) -> list[str]:
    """In the order of the paper."""
    if names is None:
        return list(figures)
    chosen = {name.strip() for name in names.split(",")}
    if not chosen <= set(figures):
        raise UserError(
            f"figures of {paper}",
            got=names,
            expected=f"some of {','.join(figures)}" if figures else "none: all is simulated together",
            do="name others, or another paper" if figures else "leave --figures out",
        )
    return [name for name in figures if name in chosen]


if __name__ == "__main__":
    sys.exit(main())
