"""The folder that one training run writes: `runs/<name>/`.

config.json     what the run was asked to do
metrics.jsonl   one JSON line per logged step
summary.json    the result
lock            held by the process that writes here
../latest       symbolic link to the newest run
"""

import fcntl
import json
import os
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from lancet_kernels.atomic import json_text, sync_folder, write_json_atomically, write_text_atomically
from lancet_kernels.errors import UserError

LATEST = "latest"
LOCK = "lock"
# What a run that ended before its first step may leave.
_UNSTARTED = {LOCK, "plan.json"}


class RunFolder:
    """One run's folder, locked: no other process can open it until this one closes it or ends.

    Made by `create` (a new run) or `open` (to resume); usable as a context manager.
    """

    def __init__(self, path: Path, *, wait_s: float = 0.0):
        self.path = path
        self._metrics: TextIO | None = None
        self._lock = _lock(path, wait_s)

    @classmethod
    def create(cls, root: str | os.PathLike[str], name: str | None = None) -> "RunFolder":
        """Make and lock `root/name`; without a name, the date and time, with `-2`, ... if that is taken.

        A name is free again if its run ended before the first step. Raises UserError if the name is taken or
        not a plain folder name, or the folder cannot be made.
        """
        root = Path(root)
        _make(root, parents=True)
        if name is not None:
            _check_name(name)
            is_new = _make(root / name)
            if not is_new and not _is_unstarted(root / name):
                raise _name_is_used(root, name)
            run = cls(root / name)
            # Checked again, now that no other process can write there.
            if not is_new and not _is_unstarted(root / name):
                run.close()
                raise _name_is_used(root, name)
            return run
        stem = datetime.now().strftime("%Y%m%d-%H%M%S")
        name, number = stem, 1
        while not _make(root / name):
            number += 1
            name = f"{stem}-{number}"
        return cls(root / name)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, wait_s: float = 0.0) -> "RunFolder":
        """Lock the run that lies at `path`, to go on with it.

        `wait_s`: seconds to wait for another process to release it, for instance ranks that are being
        stopped. Raises UserError if there is no run at `path`, or a process, named by its pid, still holds
        it.
        """
        path = Path(path)
        if not path.is_dir():
            raise UserError(
                "run folder",
                got=f"{path}, which does not exist",
                expected="a run's folder",
                do="check the path",
            )
        return cls(path, wait_s=wait_s)

    @property
    def name(self) -> str:
        """The run's name: its folder's."""
        return self.path.name

    def write_config(self, config: Mapping[str, object]) -> None:
        """Write `config.json`, atomically."""
        write_json_atomically(self.path / "config.json", config)

    def read_config(self) -> dict[str, object]:
        """What `write_config` wrote. Raises UserError if it is missing or not JSON."""
        return read_config(self.path)

    def append_metrics(self, metrics: Mapping[str, object]) -> None:
        """Add one line to `metrics.jsonl`, handed to the system before this returns."""
        if self._metrics is None:
            self._metrics = (self.path / "metrics.jsonl").open("a", encoding="utf-8")
        self._metrics.write(json_text(metrics) + "\n")
        self._metrics.flush()

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, in order."""
        text = (self.path / "metrics.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def truncate_metrics(self, after_step: int) -> None:
        """Forget the metrics of steps later than `after_step`: a resumed run takes those steps again.

        Keeps the lines whose "step" is at most `after_step`, in their order; a line that a kill cut short is
        dropped. Atomic. Raises UserError if a line before the last is damaged.
        """
        self._close_metrics()
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = []
        for number, line in enumerate(lines, start=1):
            step = _step(line)
            if step is None and number < len(lines):
                raise UserError(
                    "metrics",
                    got=f"line {number} of {path} damaged",
                    expected='a JSON object with "step" on every line',
                    do="move the file away and resume",
                )
            if step is not None and step <= after_step:
                kept.append(line + "\n")
        write_text_atomically(path, "".join(kept))

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Write `summary.json`, atomically."""
        write_json_atomically(self.path / "summary.json", summary)

    def point_latest(self) -> None:
        """Make `latest`, beside the run's folder, a relative symbolic link to it, in one step.

        Raises UserError if something that is not a link has that name.
        """
        link = self.path.parent / LATEST
        if link.exists() and not link.is_symlink():
            raise UserError(
                "latest run",
                got=f"{link}, which is not a link",
                expected="a symbolic link",
                do="move it away",
            )
        # The lock makes this run's temporary name ours alone.
        temporary = self.path.parent / f".{LATEST}.{self.name}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(self.name)
        os.replace(temporary, link)
        sync_folder(link.parent)

    def close(self) -> None:
        """Release the lock; the folder stays. May be called twice."""
        self._close_metrics()
        self._lock.close()

    def discard(self) -> None:
        """Release a run that has not started, and delete its folder if it contains nothing but the lock."""
        self._close_metrics()
        try:
            if os.listdir(self.path) == [LOCK]:
                # While it is held: who waits for this very file sees that it is gone.
                (self.path / LOCK).unlink()
                self.path.rmdir()
        except OSError:
            pass  # A folder that cannot be removed may be used again.
        finally:
            self.close()

    def _close_metrics(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_config(run: Path) -> dict[str, object]:
    """The `config.json` of the run in the folder `run`. Raises UserError if it is missing or not JSON."""
    path = run / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            "run configuration",
            got=f"{path} ({_reason(error)})",
            expected="the JSON file of a run",
            do="name a run that was started by lancet train",
        ) from error


def resolve_run(root: str | os.PathLike[str], name_or_path: str) -> Path:
    """The folder of a run called "latest", by its name in `root`, or by its path, in that order.

    A run's folder is one with a `config.json`. Raises UserError, naming the runs that `root` has, if there is
    no such run.
    """
    root = Path(root)
    for path in (root / name_or_path, Path(name_or_path)):
        if _is_run(path):
            return path.resolve()
    shown = sorted(path.name for path in run_folders(root))[-8:]
    raise UserError(
        "run",
        got=name_or_path,
        expected=f"a run in {root} ({', '.join(shown) or 'which has none'}) or a run's folder",
        do="name one of them" if shown else "train one first",
    )


def run_folders(root: str | os.PathLike[str]) -> list[Path]:
    """The folders of the runs in `root`, by the time at which they were started."""
    root = Path(root)
    folders = (
        [path for path in root.iterdir() if _is_run(path) and path.name != LATEST] if root.is_dir() else []
    )
    return sorted(folders, key=lambda path: ((path / "config.json").stat().st_mtime, path.name))


def is_in_use(run: Path) -> bool:
    """Does a process write to this run now?"""
    try:
        with (run / LOCK).open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _is_run(path: Path) -> bool:
    return (path / "config.json").is_file()


def _is_unstarted(path: Path) -> bool:
    """Is this what a run leaves that ended before its first step?"""
    try:
        names = os.listdir(path)
    except OSError:
        return False
    return LOCK in names and _UNSTARTED.issuperset(names)


def _name_is_used(root: Path, name: str) -> UserError:
    return UserError(
        "run name",
        got=f"{name}, which exists in {root}",
        expected="a new name",
        do="choose another name, or resume that run",
    )


def _check_name(name: str) -> None:
    if name in ("", ".", "..", LATEST) or "/" in name or "\0" in name or name.startswith("."):
        raise UserError(
            "run name",
            got=repr(name),
            expected=f"a plain folder name other than {LATEST!r}",
            do="choose another name",
        )


def _make(folder: Path, *, parents: bool = False) -> bool:
    """Make `folder`; False if it is there already."""
    try:
        folder.mkdir(parents=parents)
    except FileExistsError:
        if parents and not folder.is_dir():
            raise UserError(
                "runs folder", got=f"{folder}, a file", expected="a folder", do="choose another folder"
            ) from None
        return False
    except OSError as error:
        raise UserError(
            "run folder",
            got=f"{folder} ({_reason(error)})",
            expected="a place that can be written to",
            do="choose another folder",
        ) from error
    return True


def _lock(folder: Path, wait_s: float) -> TextIO:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            # "a+": opening must not wipe the pid of a process that holds the lock.
            file = (folder / LOCK).open("a+", encoding="utf-8")
        except OSError as error:
            raise UserError(
                "run folder",
                got=f"{folder} ({_reason(error)})",
                expected="a folder that can be written to",
                do="check its permissions",
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_nlink:
                break
            file.close()  # Its run was discarded meanwhile.
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            file.close()
            if time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            raise UserError(
                "run folder",
                got=f"{folder}, in use by process {holder}",
                expected="a run that no other process writes to",
                do="wait for it, or end that process",
            ) from None
    file.seek(0)
    file.truncate()
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def _step(line: str) -> int | None:
    """The step of a metrics line; None if the line is not whole."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
