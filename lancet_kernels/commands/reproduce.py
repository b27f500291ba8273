"""`lancet reproduce`: simulates a paper's evaluation, and shows it beside the paper's numbers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from tqdm import tqdm

from lancet_kernels.atomic import file_errors, json_text
from lancet_kernels.errors import UserError

FIGURES = {
    "lancet": ("11", "12", "13", "14", "15", "16"),
    "hidup": ("6", "7", "8", "11", "12", "14", "table 4", "table 5"),
    "primepar": (),
}
"""Of each paper, those that can be chosen. Each has a module `lancet_kernels.paper.<paper>_report`."""


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser of `lancet`."""
    command = commands.add_parser(
        "reproduce",
        help="a paper's evaluation, by simulation",
        description="Simulate the experiments of a paper on its clusters and print them beside the paper's "
        "numbers: figures 11 to 16 of Lancet, HiDup's, or PrimePar's. Needs no GPU; some minutes on 2 cores.",
    )
    command.add_argument("--paper", choices=tuple(FIGURES), default="lancet", help="default: %(default)s")
    command.add_argument(
        "--figures",
        type=_figures,
        default=(),
        metavar="LIST",
        help="figures of Lancet's or HiDup's to simulate, as in 11,13, and HiDup's 'table 4', 'table 5' "
        "(default: all)",
    )
    command.add_argument("--layers", type=int, metavar="N", help="of HiDup's models, even (default: 8)")
    command.add_argument(
        "--output-folder",
        default="reproduced",
        metavar="DIR",
        help="folder for the pictures (default: %(default)s)",
    )
    command.add_argument("--json", action="store_true", help="print the figures as JSON")
    command.set_defaults(run=run)


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Simulate, draw and print. -> exit code."""
    layers = arguments.layers
    if layers is not None and (layers < 2 or layers % 2):
        raise UserError("--layers", got=layers, expected="an even number", do="every other layer has experts")
    numbers = _of_paper(arguments.figures, arguments.paper)
    # Created before the simulation, which takes minutes, so that an error comes early.
    folder = Path(arguments.output_folder)
    with file_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    # Imported here, because it imports the models and the solver.
    report = import_module(f"lancet_kernels.paper.{arguments.paper}_report")
    with tqdm(desc="simulating", disable=not sys.stderr.isatty(), leave=False) as bar:

        def progress(done: int, of: int) -> None:
            bar.total = of
            bar.update(done - bar.n)

        data = report.simulate(numbers, layers, progress)
    with file_errors(folder):
        files = report.save_pictures(data, folder)
    if arguments.json:
        facts = {"simulated": True, "assumptions": report.ASSUMPTIONS}
        print(json_text({**facts, **report.as_json(data), "pictures": files}))
    else:
        print(report.text(data))
        if files:
            print(f"\nPictures: {', '.join(files.values())}")
    return 0


def _figures(text: str) -> tuple[str, ...]:
    """Example: `13,11` -> ("11", "13")."""
    names = {part.strip() for part in text.split(",")}
    numbers = sorted({name for group in FIGURES.values() for name in group}, key=lambda n: (len(n), n))
    if not names or not names <= set(numbers):
        raise argparse.ArgumentTypeError(f"got {text}, expected some of {','.join(numbers)}")
    return tuple(name for name in numbers if name in names)


def _of_paper(chosen: tuple[str, ...], paper: str) -> tuple[str, ...]:
    figures = FIGURES[paper]
    others = [number for number in chosen if number not in figures]
    if others:
        raise UserError(
            f"figures of paper {paper}",
            got=",".join(others),
            expected=f"some of {','.join(figures)}" if figures else "none: all is simulated together",
            do="name others, or another --paper" if figures else "leave --figures out",
        )
    return chosen or figures
