"""What is written about a run: one JSON file, with the median and spread of samples."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
import triton

import lancet_kernels
from bench.gpu.gpu_table import wrong
from lancet_kernels.tuning.workloads import Workload


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and the tenth and ninetieth percentile. Example: [3, 1, 2] -> median 2, p10 1, p90 3."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "median": statistics.median(ordered),
        "p10": ordered[round(0.1 * last)],
        "p90": ordered[round(0.9 * last)],
        "rounds": len(ordered),
    }


def ratio(what: str, ours: Sequence[float], theirs: Sequence[float], goal: float | None = None) -> dict:
    """How many times as fast we are, round by round: contenders of one round saw the same clocks."""
    return {"what": what, "value": spread([b / a for a, b in zip(ours, theirs, strict=True)]), "goal": goal}


def letters(w: Workload) -> dict[str, int]:
    """The sizes as figures give them."""
    return {"T": w.tokens, "D": w.width, "F": w.hidden, "E": w.experts, "K": w.choices}


class Report:
    """Figures as they come; the file is whole after each of them, so that a run cut short leaves what it had.

    Attributes:
        planned: names of the parts. complete: did the run come to its end?
        figures: one dict for each figure.
    """

    def __init__(self, path: Path, label: str, device: torch.device, planned: Sequence[str]) -> None:
        self.path, self.planned, self.complete = path, list(planned), False
        self.figures: list[dict] = []
        self._missed: list[dict[str, str]] = []
        self._done: set[str] = set()
        self._conditions = conditions(label, device)

    def add(self, figure: dict) -> None:
        self.figures.append(figure)
        self.write()

    def miss(self, what: str, why: str) -> None:
        self._missed.append({"what": what, "why": why})
        self._done.add(what)
        self.write()

    def done(self, part: str) -> None:
        """All of its figures are here."""
        self._done.add(part)
        self.write()

    def found(self) -> dict:
        """All that there is, as in the file."""
        rest = [name for name in self.planned if name not in self._done]
        return {
            **self._conditions,
            "complete": self.complete,
            "planned": self.planned,
            "not_measured": [*self._missed, *({"what": name, "why": "not reached"} for name in rest)],
            "wrong": [
                {"what": f"{figure['figure']}, {figure['name']}", "why": wrong(figure)}
                for figure in self.figures
                if wrong(figure)
            ],
            "figures": self.figures,
        }

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.found(), indent=1, default=str) + "\n", encoding="utf-8")
        part.replace(self.path)


def conditions(label: str, device: torch.device) -> dict[str, object]:
    """Where, when and with what; everything that a figure needs beside it."""
    found: dict[str, object] = {
        "label": label,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": os.environ.get("LANCET_COMMIT", "unknown"),
        "device": platform.processor() or platform.machine(),
        "versions": {
            "lancet_kernels": lancet_kernels.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
        },
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = properties.name
        found["sms"] = properties.multi_processor_count
        found["memory_gib"] = round(properties.total_memory / 2**30, 1)
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["clocks"] = _clocks()
    return found


def _clocks() -> str:
    """Driver, clocks and power as nvidia-smi says; "" without it."""
    if shutil.which("nvidia-smi") is None:
        return ""
    query = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f"{query}: {done.stdout.strip()}"
