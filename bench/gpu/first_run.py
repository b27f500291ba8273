"""The first minutes on a GPU: checks and measurements by priority, each in its own process with a time limit.

    python bench/gpu/first_run.py --out DIR [--until SECONDS] [--only machine,eta]
    python bench/gpu/first_run.py --out DIR --device cpu      what runs in Triton's interpreter: no figures

DIR/first-run-DEVICE-DATE.jsonl has a line as soon as a step ends; the .log beside it has the output of all
steps. A step that hangs or crashes costs at most its limit, and its line has the results before that. It runs
from a checkout with the Python that calls it (3.10 or newer, torch, Triton, numpy, pytest), and installs
nothing.

Exit code: 0 all that ran is right; 1 a step failed, hung, or is wrong; 2 a requirement is missing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FACT = "FACT "  # what a step prints before each of its results, a JSON object


class Step(NamedTuple):
    """A step of `module`, killed after limit_s, and not begun with less than expected_s left."""

    limit_s: float
    expected_s: float
    module: str = "bench.gpu.steps"


# By priority. Expected times are those on an H100 with an empty Triton cache.
STEPS = {
    "machine": Step(60, 15),
    "one_program": Step(75, 30),
    "all_programs": Step(75, 25),
    "speed_sonic": Step(90, 20),
    "virtual_pes": Step(150, 50),
    "eta": Step(90, 30),
    "speed_mixtral": Step(90, 20),
    "speed_qwen3": Step(60, 20),
    "speed_deepseek": Step(90, 20),
    "planned_step": Step(240, 90),
    "large_step": Step(240, 90),
    "host": Step(170, 60),
    "layers": Step(120, 45),
    "ops": Step(120, 45),
    "counters": Step(120, 45),
    "ranks_on_one_gpu": Step(90, 45),
    "shapes": Step(120, 45),
    "passes": Step(90, 30),
    "virtual_pes_more": Step(150, 60),
    "sanitizer": Step(200, 60),
    "wire": Step(60, 15),
}
ONLY_ON_GPU = ("counters", "sanitizer", "wire")
PROBE = """
import importlib.util, json, platform, sys
lacking = [name for name in ("torch", "triton", "pytest", "numpy") if importlib.util.find_spec(name) is None]
if lacking:
    sys.exit(f"{sys.executable} lacks {', '.join(lacking)}")
import torch, triton
if sys.argv[1] == "cuda" and not torch.cuda.is_available():
    sys.exit(f"no CUDA device that torch {torch.__version__} can use")
name = torch.cuda.get_device_name() if sys.argv[1] == "cuda" else platform.machine()
versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
print(json.dumps({"device": name, **versions}))
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results", help="the folder to write to")
    parser.add_argument("--until", type=float, default=540.0, help="seconds after which all is over")
    parser.add_argument("--only", default=",".join(STEPS), help="steps, with commas in between")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(argv)
    until = time.monotonic() + options.until
    chosen = options.only.split(",")
    if unknown := [name for name in chosen if name not in STEPS]:
        return _refuse(f"no step {unknown[0]!r}; there are {', '.join(STEPS)}")
    probe = ["timeout", "90", sys.executable, "-c", PROBE, options.device]
    probed = subprocess.run(probe, capture_output=True, text=True)
    if probed.returncode:
        return _refuse((probed.stderr.strip() or "torch did not find its device in 90 s").splitlines()[-1])
    now = datetime.datetime.now(datetime.timezone.utc)
    label = "measured" if options.device == "cuda" else "interpreter: proof, no figures"
    run = {"label": label, "date": f"{now:%Y-%m-%d %H:%M}", "commit": _commit()}
    run |= json.loads(probed.stdout.splitlines()[-1])
    options.out.mkdir(parents=True, exist_ok=True)
    lines = options.out / f"first-run-{run['device'].lower().replace(' ', '-')}-{now:%Y-%m-%d-%H%M%S}.jsonl"
    _append(lines, {"run": run})
    well = True
    with tempfile.TemporaryDirectory() as tree:
        copy_tree(Path(tree))
        for name in chosen:
            line = Runner(options.device, Path(tree), lines.with_suffix(".log"), until).line_of(name)
            _append(lines, line)
            well = well and line["outcome"] in ("right", "not begun")
    print(f"{'all that ran is right' if well else 'NOT all is right'}: {lines}", flush=True)
    return 0 if well else 1


def _refuse(why: str) -> int:
    print(f"first_run: {why}", file=sys.stderr)
    return 2


def _append(file: Path, line: dict) -> None:
    """Write a line to the disk at once, and its beginning to the screen."""
    text = json.dumps(line)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(text + "\n")
        lines.flush()
        os.fsync(lines.fileno())
    print(text[:1000], flush=True)


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+changes", "--exclude=*"]
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    return "unknown"


def copy_tree(tree: Path) -> None:
    """Copy the sources to where an installation puts them: ops/, graph/ and schedules/ inside the package."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    mapped = re.findall(r'^"lancet_kernels\.(\w+)" = "(\w+)"$', project, re.MULTILINE)
    inside = {folder: f"lancet_kernels/{name}" for name, folder in mapped}
    skipped = shutil.ignore_patterns("__pycache__", "results")
    for folder in ("lancet_kernels", *inside, "tests", "bench"):
        shutil.copytree(ROOT / folder, tree / inside.get(folder, folder), ignore=skipped)
    shutil.copy(ROOT / "pyproject.toml", tree)


def wrong(result: object) -> bool:
    """Whether a result, or a part of it, has `right` = false."""
    return isinstance(result, dict) and (result.get("right") is False or any(map(wrong, result.values())))


class Runner(NamedTuple):
    """tree: the folder in which steps run. until: the end, by time.monotonic()."""

    device: str
    tree: Path
    log: Path
    until: float

    def line_of(self, name: str) -> dict:
        """Run a step. -> its line."""
        step, begin = STEPS[name], time.monotonic()
        left = self.until - begin
        lacks_gpu = self.device == "cpu" and name in ONLY_ON_GPU
        if lacks_gpu or left < step.expected_s:
            why = "a GPU" if lacks_gpu else f"{step.expected_s:g} s, {left:.0f} are left"
            return {"step": name, "outcome": "not begun", "why": f"it needs {why}"}
        with self.log.open("a", encoding="utf-8") as file:
            print(f"\n==== {name}", file=file, flush=True)
            from_here = self.log.stat().st_size
            exit_code = self._run(name, file, min(step.limit_s, left))
        output = self.log.read_bytes()[from_here:].decode(errors="replace")
        result: dict = {}
        for fact in re.findall(f"^{FACT}(.*)$", output, re.MULTILINE):
            result |= json.loads(fact)
        outcome = "killed" if exit_code is None else "failed" if exit_code else "right"
        if outcome == "right" and wrong(result):
            outcome = "wrong"
        line = {"step": name, "outcome": outcome, "seconds": round(time.monotonic() - begin, 1)}
        return line | {"result": result} | ({} if outcome == "right" else {"said": output[-600:]})

    def _run(self, name: str, log: IO[str], limit_s: float) -> int | None:
        """-> exit code; None: killed. All processes of a step end with it, in other sessions, too."""
        path = os.pathsep.join(filter(None, [str(self.tree), os.environ.get("PYTHONPATH")]))
        mark = f"{os.getpid()}-{time.monotonic_ns()}"
        environment = os.environ | {"PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "32", "STEP": mark}
        environment["TRITON_INTERPRET"] = "1" if self.device == "cpu" else "0"
        child = subprocess.Popen(
            [sys.executable, "-m", STEPS[name].module, name, self.device], cwd=self.tree, env=environment,
            stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            return child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            for folder in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):
                    if f"STEP={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                        os.kill(int(folder.name), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
