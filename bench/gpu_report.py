"""What is written about a run: one JSON file, and a short table."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch
import triton

import lancet_kernels

MEASURED = "measured"


class Report:
    """Figures as they come; the file is whole after each of them, so that a run cut short leaves what it had.

    Attributes:
        figures: one dict for each figure. not_measured: what is missing, and why.
    """

    def __init__(self, path: Path, label: str, device: torch.device) -> None:
        self.path, self.label = path, label
        self.figures: list[dict] = []
        self.not_measured: list[dict[str, str]] = []
        self._conditions = conditions(label, device)

    def add(self, figure: dict) -> None:
        self.figures.append(figure)
        self.write()

    def miss(self, what: str, why: str) -> None:
        self.not_measured.append({"what": what, "why": why})
        self.write()

    def write(self) -> None:
        found = {**self._conditions, "figures": self.figures, "not_measured": self.not_measured}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")
        part.replace(self.path)

    def table(self) -> str:
        """A line for each ratio, with its goal if it has one."""
        if self.label != MEASURED:
            return f"{self.label}; ran: " + ", ".join(f"{f['figure']} ({f['name']})" for f in self.figures)
        lines = [f"{'figure':<44}{'sizes':<14}{'ratio':<38}{'median':>8}{'p10':>8}{'p90':>8}{'goal':>7}"]
        for figure in self.figures:
            for ratio in figure["ratios"]:
                value, goal = ratio["value"], ratio["goal"]
                reached = (
                    "" if goal is None else f"{goal:>7.2f}" + ("" if value["median"] >= goal else "  below")
                )
                lines.append(
                    f"{figure['figure']:<44}{figure['name']:<14}{ratio['what']:<38}{value['median']:>8.3f}"
                    f"{value['p10']:>8.3f}{value['p90']:>8.3f}{reached}"
                )
            if "exposed_ms" in figure:
                exposed = ", ".join(f"{way} {v['median']:.2f}" for way, v in figure["exposed_ms"].items())
                lines.append(
                    f"    emulated link, {figure['gb_per_s']:.1f} GB/s; exposed communication, ms: {exposed}"
                )
        lines += [f"not measured: {miss['what']}: {miss['why']}" for miss in self.not_measured]
        return "\n".join(lines)


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
