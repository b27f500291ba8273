"""`lancet kernels`: compiles every kernel for a GPU architecture, and shows registers, spills and
instructions."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from lancet_kernels.cli import aligned
from lancet_kernels.cli.options import positive_int
from lancet_kernels.errors import UserError
from lancet_kernels.files import json_text

if TYPE_CHECKING:
    from lancet_kernels.kernels.compile import Row
    from lancet_kernels.kernels.specimens import Specimen

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
COLUMNS = (
    "registers", "spills", "stack", "shared_bytes", "wgmma", "tma", "tcgen05", "in_flight", "serialized",
    "seconds",
)  # fmt: skip


def add_parser(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "kernels",
        help="compile every kernel for a GPU architecture, without having one",
        description="Compile every kernel in every configuration, and show registers, spills, shared memory "
        "and instructions. Fails if a kernel spills more than a few bytes, exceeds a limit, lacks "
        "required wgmma or TMA instructions, or waits for each matrix product before the next one.",
    )
    command.add_argument(
        "--arch", choices=ARCHITECTURES, default="sm_90", help="GPU architecture (default: sm_90)"
    )
    command.add_argument(
        "--name", metavar="TEXT", help="only kernels whose name and configuration contain TEXT"
    )
    command.add_argument(
        "--quick",
        action="store_true",
        help="only the first configuration of each kernel, and one that is linked with NVSHMEM",
    )
    command.add_argument(
        "--workers", type=positive_int, default=2, help="processes that compile (default: 2)"
    )
    command.add_argument("--json", action="store_true", help="print the table as JSON")
    command.set_defaults(run=run)


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Compile and print. -> 1 if a kernel has a problem, else 0."""
    # Imported here, because it needs Triton, which is not available on every platform.
    from lancet_kernels.kernels import compile, specimens
    from lancet_kernels.kernels.symmetric import nvshmem

    arch = int(arguments.arch.removeprefix("sm_"))
    chosen = [
        specimen
        for specimen in specimens.all_specimens(arch)
        if not arguments.name or arguments.name in f"{specimen.name} {specimen.config}"
    ]
    if arguments.quick:
        chosen = _first(chosen)
    if not chosen:
        raise UserError(
            "--name",
            got=repr(arguments.name),
            expected="a part of a kernel's name",
            do="leave it out to see all",
        )
    skipped = []
    if nvshmem.find_bitcode(arch) is None:
        skipped = [specimen for specimen in chosen if specimen.nvshmem]
        chosen = [specimen for specimen in chosen if not specimen.nvshmem]
    number = count(1)

    def show(row: Row) -> None:
        if sys.stderr.isatty():
            print(f"{next(number)}/{len(chosen)} {_name(row)}", file=sys.stderr)

    rows = compile.compile_all(chosen, arch, workers=arguments.workers, on_done=show)
    failed = [row for row in rows if row.problems]
    for row in failed:
        error = f"\n{row.error}" if row.error else ""
        print(f"{_name(row)}: {'; '.join(row.problems)}{error}", file=sys.stderr)
    if skipped:
        print(
            f"{len(skipped)} kernels with NVSHMEM were skipped, because its device bitcode is not installed; "
            f"install it with pip install --no-deps {nvshmem.PACKAGE}",
            file=sys.stderr,
        )
    figures = {
        "arch": arguments.arch,
        "versions": _versions(),
        "kernels": [_as_json(row) for row in rows],
        "skipped": [{"name": s.name, "config": s.config} for s in skipped],
        "failed": len(failed),
    }
    print(json_text(figures) if arguments.json else _table(rows, arguments.arch))
    return 1 if failed else 0


def _first(specimens: Iterable[Specimen]) -> list[Specimen]:
    """The first specimen of each kernel, and the first of all with NVSHMEM."""
    first: dict[str, Specimen] = {}
    for specimen in specimens:
        first.setdefault("nvshmem" if specimen.nvshmem else specimen.name, specimen)
    return list(first.values())


def _versions() -> dict[str, str | None]:
    import torch
    import triton

    from lancet_kernels.kernels.symmetric import nvshmem

    return {"triton": triton.__version__, "torch": torch.__version__, "nvshmem": nvshmem.bitcode_version()}


def _as_json(row: Row) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": row.specimen.name, "config": row.specimen.config}
    if row.compiled is not None:
        fields |= dataclasses.asdict(row.compiled)
    return fields | {"nvshmem": row.specimen.nvshmem, "problems": row.problems, "error": row.error}


def _table(rows: Sequence[Row], arch: str) -> str:
    versions = _versions()
    cells = [["kernel", "configuration", *COLUMNS, "problems"]]
    for row in rows:
        values = ["-"] * len(COLUMNS)
        if row.compiled is not None:
            values = [_cell(getattr(row.compiled, column)) for column in COLUMNS]
        cells.append([row.specimen.name, row.specimen.config, *values, "; ".join(row.problems) or "-"])
    title = f"Compiled for {arch} with Triton {versions['triton']}, NVSHMEM {versions['nvshmem']}"
    counts = f"{len(rows)} kernels, {sum(bool(row.problems) for row in rows)} failed"
    return "\n".join([title, "", aligned(cells, right=range(2, 2 + len(COLUMNS))), "", counts])


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple) or value is None:
        return " ".join(value or ["-"])
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _name(row: Row) -> str:
    return f"{row.specimen.name} {row.specimen.config}"
