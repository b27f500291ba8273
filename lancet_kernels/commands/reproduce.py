"""`lancet reproduce`: simulates a paper's evaluation, and shows it beside the paper's numbers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from lancet_kernels.atomic import json_text
from lancet_kernels.errors import UserError

ALL = ("11", "12", "13", "14", "15", "16")
HIDUP = ("6", "7", "8", "11", "12", "14", "table 4", "table 5")


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser of `lancet`."""
    command = commands.add_parser(
        "reproduce",
        help="a paper's evaluation, by simulation",
        description="Simulate the experiments of a paper on its clusters and print them beside the paper's "
        "numbers: figures 11 to 16 of Lancet, HiDup's, or PrimePar's. Needs no GPU; some minutes on 2 cores.",
    )
    command.add_argument(
        "--paper", choices=("lancet", "hidup", "primepar"), default="lancet", help="default: %(default)s"
    )
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
    if arguments.paper == "primepar":
        return _primepar(arguments)
    if arguments.paper == "hidup":
        return _hidup(arguments)
    arguments.figures = _of_paper(arguments.figures, ALL, "lancet")
    # Imported here, because it imports the solver.
    from lancet_kernels.paper import pictures, tables
    from lancet_kernels.paper.figures import run_figures

    # Created before the simulation, which takes minutes, so that an error comes early.
    folder = _folder(arguments.output_folder)
    with tqdm(desc="simulating", unit="setting", disable=not sys.stderr.isatty(), leave=False) as bar:

        def progress(done: int, of: int) -> None:
            bar.total = of
            bar.update(done - bar.n)

        figures = run_figures(arguments.figures or ALL, progress)
    files = {}
    for number, data in figures.items():
        files[number] = str(folder / f"figure{number}.png")
        try:
            pictures.save(number, data, Path(files[number]))
        except OSError as error:
            raise _not_writable(files[number], error) from error
    if arguments.json:
        assumptions = [*tables.ASSUMPTIONS, *tables.FURTHER_ASSUMPTIONS]
        print(
            json_text({"simulated": True, "assumptions": assumptions, "figures": figures, "pictures": files})
        )
    else:
        print(tables.text(figures))
        print(f"\nPictures: {', '.join(files.values())}")
    return 0


def _primepar(arguments: argparse.Namespace) -> int:
    from lancet_kernels.paper import primepar, primepar_report

    if arguments.figures:
        raise UserError(
            "--figures",
            got=",".join(arguments.figures),
            expected="none with --paper primepar",
            do="leave it out",
        )
    folder = _folder(arguments.output_folder)
    with tqdm(desc="searching", unit="setting", disable=not sys.stderr.isatty(), leave=False) as bar:

        def progress(done: int, of: int) -> None:
            bar.total = of
            bar.update(done - bar.n)

        data = primepar.reproduce(progress=progress)
    try:
        files = primepar_report.save_pictures(data, folder)
    except OSError as error:
        raise _not_writable(str(folder), error) from error
    if arguments.json:
        print(json_text({"simulated": True, "assumptions": primepar.ASSUMPTIONS, **data, "pictures": files}))
    else:
        print(primepar_report.text(data))
        print(f"\nPictures: {', '.join(files.values())}")
    return 0


def _figures(text: str) -> tuple[str, ...]:
    """Example: `13,11` -> ("11", "13")."""
    names = {part.strip() for part in text.split(",")}
    known = [*sorted({*ALL, *HIDUP[:-2]}, key=int), *HIDUP[-2:]]
    if not names or not names <= set(known):
        raise argparse.ArgumentTypeError(f"got {text}, expected some of {','.join(known)}")
    return tuple(name for name in known if name in names)


def _of_paper(chosen: tuple[str, ...], figures: tuple[str, ...], paper: str) -> tuple[str, ...]:
    others = [number for number in chosen if number not in figures]
    if others:
        raise UserError(
            f"figures of paper {paper}",
            got=",".join(others),
            expected=f"some of {','.join(figures)}",
            do="name others, or another --paper",
        )
    return chosen or figures


def _hidup(arguments: argparse.Namespace) -> int:
    # Imported here, because it imports the models.
    from lancet_kernels.paper import hidup, hidup_report

    layers = arguments.layers
    if layers is not None and (layers < 2 or layers % 2):
        raise UserError("--layers", got=layers, expected="an even number", do="every other layer has experts")
    numbers = _of_paper(arguments.figures, HIDUP, "hidup")
    folder = _folder(arguments.output_folder)
    with tqdm(desc="figures", total=len(numbers), disable=not sys.stderr.isatty(), leave=False) as bar:
        figures = hidup.run_figures(numbers, layers, bar.update)
    try:
        files = hidup_report.save_pictures(figures, folder)
    except OSError as error:
        raise _not_writable(str(folder), error) from error
    if arguments.json:
        data = {"simulated": True, "paper": "hidup", "assumptions": list(hidup.ASSUMPTIONS)}
        claims = hidup_report.claims(figures)
        print(json_text({**data, "figures": figures, "claims": claims, "pictures": files}))
    else:
        print(hidup_report.text(figures))
        if files:
            print(f"\nPictures: {', '.join(files.values())}")
    return 0


def _folder(name: str) -> Path:
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(name, error) from error
    return Path(name)


def _not_writable(name: str, error: OSError) -> UserError:
    return UserError(
        "output folder", got=f"{name} ({error.strerror})", expected="a writable folder", do="name another one"
    )
