"""Measures the kernels on a GPU, writes one JSON file, prints a table. `make gpu` runs it after the tests.

    python -m bench.gpu.gpu_measure --out bench/results/gpu.json  on a GPU
    python -m bench.gpu.gpu_measure --smoke --out smoke.json      tiny sizes in the interpreter, any machine

Exit code 0: all was measured, 1: something was not, or is wrong (the JSON says what and why), 2: no GPU.
An interrupt (SIGINT) ends the run with what was measured so far.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

SMOKE_LABEL = "smoke: interpreter, no figures"


@dataclass(frozen=True)
class Part:
    """Something to measure: `run` yields figures, `rehearse` does once what makes its kernels compile."""

    name: str
    run: Callable[[], Iterator[dict]]
    rehearse: Callable[[], object]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes in the interpreter: no figures")
    parser.add_argument("--budget-s", type=float, default=240, help="start nothing new after so many seconds")
    parser.add_argument("--rounds", type=int, help="rounds per figure")
    parser.add_argument("--only", default="", help="only parts whose name contains this")
    options = parser.parse_args(argv)
    begin = time.monotonic()
    interrupt_once()
    if options.smoke:
        # Before anything imports Triton.
        os.environ["TRITON_INTERPRET"] = "1"
    if not options.smoke and not torch.cuda.is_available():
        print(f"gpu_measure: no CUDA device that torch {torch.__version__} can use", file=sys.stderr)
        return 2
    from bench.gpu.gpu_report import Report
    from bench.gpu.gpu_table import MEASURED, remarks, table
    from lancet_kernels.measuring.timing import Clock

    device = torch.device("cpu" if options.smoke else "cuda")
    rounds = options.rounds or (1 if options.smoke else 20)
    wanted = [part for part in parts(Clock(device), rounds, options.smoke) if options.only in part.name]
    label = SMOKE_LABEL if options.smoke else MEASURED
    report = Report(options.out, label, device, [part.name for part in wanted])
    try:
        report.write()
        compile_all(wanted, report)
        measure_all(wanted, report, begin, options.budget_s)
        report.complete = True
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    finally:
        report.write()
        found = report.found()
        print(table(found), *remarks(found), sep="\n")
    return 1 if remarks(found) else 0


def interrupt_once() -> None:
    """The first SIGINT is a KeyboardInterrupt, even if it was ignored; what that leads to none cuts short."""

    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)


def measure_all(wanted: list[Part], report, begin: float, budget_s: float) -> None:
    for part in wanted:
        if time.monotonic() - begin > budget_s:
            report.miss(part.name, f"out of time ({budget_s:g} s)")
            continue
        try:
            for figure in part.run():
                report.add(figure)
            report.done(part.name)
        except Exception as error:
            traceback.print_exc()
            report.miss(part.name, f"{type(error).__name__}: {error}")
        give_back()
        print(f"{part.name}: done after {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def parts(clock, rounds: int, smoke: bool) -> list[Part]:
    """What there is to measure, in the order of importance: when time runs out, the last are left out."""
    from bench.gpu import gpu_fused, gpu_layer
    from lancet_kernels.tuning.workloads import WORKLOADS, Workload

    device, dtype = clock.device, torch.float32 if smoke else torch.bfloat16
    warmup = 0 if smoke else 3

    def part(what: str, w: Workload, kind: type, measure: Callable[..., Iterator[dict]], rounds: int) -> Part:
        make = partial(kind, w, device, dtype)
        name = f"{what}, {w.name}"
        return Part(name, lambda: measure(clock, make(), rounds, warmup), lambda: make().rehearse())

    sizes = gpu_fused.SMOKE if smoke else gpu_fused.SIZES
    layers = [w.small() if smoke else w for w in WORKLOADS.values() if w.name != "gpt2-l-moe"]
    fused_parts = [part("fused launches", w, gpu_fused.FusedLayer, gpu_fused.measure, rounds) for w in sizes]
    return fused_parts + [
        part("MoE layer EP=1", w, gpu_layer.Layers, gpu_layer.measure, max(1, rounds // 2))
        for w in (layers[:1] if smoke else layers)
    ]


def compile_all(wanted: list[Part], report) -> None:
    """Compile the kernels of all parts side by side, before anything is measured."""
    from lancet_kernels.kernels.rehearsal import rehearsal
    from lancet_kernels.kernels.runtime import INTERPRETED

    if INTERPRETED:
        return
    begin = time.monotonic()
    with rehearsal():
        for part in wanted:
            try:
                part.rehearse()
            except Exception as error:
                traceback.print_exc()
                report.miss(f"{part.name} (rehearsal)", f"{type(error).__name__}: {error}")
            torch.cuda.synchronize()
            give_back()
    print(f"compiled in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def give_back() -> None:
    """The memory of one part, which the allocator keeps by stream, and its exchanges, for the next one."""
    from lancet_kernels import reset_exchanges

    reset_exchanges()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
