"""The folder that one training run writes: `runs/<name>/`.

config.json     what the run was asked to do, and what it trains
plan.json       the plan of its step; a resumed run has the same
metrics.jsonl   one JSON line per step
checkpoints/    see `lancet_kernels.training.checkpoint`
summary.json    the result
lock            held by the process that writes here
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from lancet_kernels.atomic import file_errors, json_text, write_text_atomically
from lancet_kernels.errors import UserError

LATEST = "latest"
# What a run that ended before its first step may leave.
_UNSTARTED = {"lock", "plan.json"}


def new_run(root: str | os.PathLike[str], name: str | None = None) -> Path:
    """Make the folder `root/name`; without a name, the date and time, with `-2`, ... if that is taken.

    A name is free again if its run ended before the first step. Raises UserError if the name is taken or not
    a plain folder name, or the folder cannot be made.
    """
    if name is not None and (name in ("", LATEST) or "/" in name or "\0" in name or name[0] == "."):
        expected = f"a plain folder name other than {LATEST!r}"
        raise UserError("run name", got=repr(name), expected=expected, do="choose another name")
    stem = name or datetime.now().strftime("%Y%m%d-%H%M%S")
    for number in count(1):
        run = Path(root, stem if number == 1 else f"{stem}-{number}")
        with file_errors(run), contextlib.suppress(FileExistsError):
            run.mkdir(parents=True)
            break
        if name is not None:
            if run.is_dir() and _UNSTARTED.issuperset(os.listdir(run)):
                break
            raise UserError(
                "run name",
                got=f"{name}, which exists in {root}",
                expected="a new name",
                do="choose another name, or resume that run",
            )
    return run


@contextlib.contextmanager
def writing(run: Path, wait_s: float = 5.0) -> Iterator[None]:
    """Hold the run's lock: no other process can write there until the block or this process ends.

    Args: wait_s: how long to wait for a process that holds it, a rank that is being stopped say.
    Raises: UserError if a process still holds it then.
    """
    deadline = time.monotonic() + wait_s
    with file_errors(run):
        file = (run / "lock").open("w")
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise UserError(
                        "run folder",
                        got=f"{run}, in use by another process",
                        expected="a run that no other process writes to",
                        do="wait for it, or end that process",
                    ) from None
                time.sleep(0.05)
        yield


def is_in_use(run: Path) -> bool:
    """Does a process write to this run now?"""
    try:
        with (run / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def read_config(run: Path) -> dict[str, Any]:
    """The `config.json` of the run in the folder `run`. Raises UserError if it is missing or not JSON."""
    path = run / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            "run configuration",
            got=f"{path} ({getattr(error, 'strerror', None) or error})",
            expected="the JSON file of a run",
            do="name a run that was started by lancet train",
        ) from error


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`, in order, without one that a kill cut short."""
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("}")]


def append_metrics(run: Path, metrics: Mapping[str, object]) -> None:
    """Add one line to `metrics.jsonl`, handed to the system before this returns."""
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json_text(metrics) + "\n")


def truncate_metrics(run: Path, after_step: int) -> None:
    """Forget the metrics of steps later than `after_step`, which a resumed run takes again. Atomic."""
    kept = [json_text(m) + "\n" for m in read_metrics(run) if m["step"] <= after_step]
    write_text_atomically(run / "metrics.jsonl", "".join(kept))


def resolve_run(root: str | os.PathLike[str], name_or_path: str) -> Path:
    """The folder of the run that was started last ("latest"), or of one by its name in `root` or its path.

    A run's folder is one with a `config.json`. Raises UserError, naming the runs that `root` has, if there is
    no such run.
    """
    runs = run_folders(root)
    if name_or_path == LATEST and runs:
        return runs[-1]
    for path in (Path(root, name_or_path), Path(name_or_path)):
        if _is_run(path):
            return path
    shown = ", ".join(sorted(path.name for path in runs)[-8:])
    raise UserError(
        "run",
        got=name_or_path,
        expected=f"a run in {root} ({shown or 'which has none'}) or a run's folder",
        do="name one of them" if shown else "train one first",
    )


def run_folders(root: str | os.PathLike[str]) -> list[Path]:
    """The folders of the runs in `root`, by the time at which they were started or resumed."""
    folders = [path for path in Path(root).iterdir() if _is_run(path)] if Path(root).is_dir() else []
    return sorted(folders, key=lambda path: ((path / "config.json").stat().st_mtime, path.name))


def _is_run(path: Path) -> bool:
    return (path / "config.json").is_file()
