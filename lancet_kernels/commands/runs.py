"""`lancet runs`: the training runs in a folder, the newest last."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lancet_kernels.atomic import json_text
from lancet_kernels.commands import aligned
from lancet_kernels.errors import UserError
from lancet_kernels.training.runs import is_in_use, read_config, read_metrics, run_folders

COLUMNS = ("run", "state", "model", "ranks", "strategy", "steps", "loss", "tokens/s")


def add_parser(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "runs",
        help="list the training runs in a folder",
        description="List the runs of `lancet train` in a folder, the newest last: how far each came, its "
        "loss and its speed.",
    )
    command.add_argument(
        "--runs",
        default="runs",
        metavar="FOLDER",
        help="folder that contains the run folders (default: runs)",
    )
    command.add_argument("--json", action="store_true", help="print the list as JSON")
    command.set_defaults(run=run)


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Print the list. -> exit code."""
    rows = [_row(path) for path in run_folders(arguments.runs)]
    if arguments.json:
        print(json_text({"runs": rows}))
    elif rows:
        print(_table(rows))
    else:
        print(f"no runs in {arguments.runs}")
    return 0


def _row(path: Path) -> dict[str, Any]:
    try:
        config = read_config(path)
    except UserError:
        config = {}  # a damaged file must not hide the other runs
    last = (read_metrics(path) or [{}])[-1]
    step, wanted = last.get("step", 0), config.get("steps")
    finished = (path / "summary.json").is_file() and step == wanted
    state = "running" if is_in_use(path) else "finished" if finished else "stopped"
    return {
        "run": path.name,
        "state": state,
        "model": config.get("model"),
        "ranks": config.get("ranks"),
        "strategy": config.get("strategy"),
        "step": step,
        "steps": wanted,
        "loss": last.get("loss"),
        "tokens_per_s": last.get("tokens_per_s"),
    }


def _table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [list(COLUMNS)]
    for row in rows:
        loss, speed = row["loss"], row["tokens_per_s"]
        cells.append(
            [
                row["run"], row["state"], str(row["model"] or "-"), str(row["ranks"] or "-"),
                str(row["strategy"] or "-"), f"{row['step']}/{row['steps'] or '?'}",
                "-" if loss is None else f"{loss:.3f}", "-" if speed is None else f"{speed:.0f}",
            ]
        )  # fmt: skip
    return aligned(cells)
