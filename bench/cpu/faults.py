"""Injects faults into one rank of a training job, and records how the job ends.

    python -m bench.cpu.faults --json bench/results/faults-2-core-cpu.json

Two CPU ranks train a small model, whose experts they share and whose other parameters FSDP shards or both
hold, and save a checkpoint in every second step. Rank 1 fails in the forward, the backward, the trials of
plans, or while it saves. The job must end soon and name the cause; a second one resumes from the last
checkpoint, and must have the losses of an undisturbed run. The table is in docs/explanation/proof.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from itertools import product
from pathlib import Path
from unittest import mock

TIMEOUT_S, MEETING_S = 20.0, 240.0
"""Timeouts of collectives: in a step, in trials and while saving; and before the first step."""
KINDS = ("killed", "stopped", "raises", "10 s late", "60 s late", "disk full")
PLACES = ("forward", "backward", "trials", "saving")
WAYS = ("experts and FSDP", "experts")
EVERY, STRUCK, STEPS = 2, 6, 8
"""Steps between checkpoints; the step of the fault; steps of the whole run."""
BOUND = 1e-9
"""Largest relative difference of a loss from that of an undisturbed run, in float64."""


@dataclass(frozen=True)
class Fault:
    """kind and place of the fault of rank 1; way: distribution of the parameters, one of WAYS."""

    kind: str
    place: str
    way: str


@dataclass(frozen=True)
class End:
    """The end of a job. after_s: from the fault to the end of all ranks; None: it went on. said: its error
    line. lost: trained steps that are in no checkpoint. same: whether a second job has the losses of an
    undisturbed run."""

    fault: Fault
    after_s: float | None
    said: str
    lost: int
    same: bool


def faults() -> list[Fault]:
    """All combinations; a full disk only matters while saving."""
    every = (Fault(*one) for one in product(KINDS, PLACES, WAYS))
    return [fault for fault in every if fault.kind != "disk full" or fault.place == "saving"]


class Injector:
    """Injects the fault, once, on rank 1 and at its place."""

    def __init__(self, fault: Fault | None, rank: int, folder: Path) -> None:
        self.fault = fault if rank == 1 else None
        self.folder, self.place = folder, ""

    def here(self) -> None:
        """Called at the start of messages, and after a checkpoint is written."""
        if self.fault is None or self.fault.place != self.place:
            return
        kind, self.fault = self.fault.kind, None
        self.note()
        if kind in ("killed", "stopped"):
            os.kill(os.getpid(), signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
        if kind == "raises":
            raise ValueError("something in the user's own code")
        time.sleep(float(kind.partition(" ")[0]))

    def note(self) -> None:
        (self.folder / "struck").write_text(repr(time.time()))


def train(fault: Fault | None, way: str, folder: Path) -> int:
    """A rank: from the last checkpoint in `folder` to the last step."""
    import torch
    from torch.distributed.checkpoint import FileSystemWriter

    from lancet_kernels import fsdp
    from lancet_kernels.cli.trainer import find_checkpoint, load_checkpoint, save_checkpoint
    from lancet_kernels.layer.gpt2_moe import GPT2MoE, ModelConfig, TrainingStep
    from lancet_kernels.measure.launch import start_ranks
    from lancet_kernels.ops.comm.link import link
    from lancet_kernels.optimization import optimize as library

    rank = start_ranks("cpu", MEETING_S).rank
    torch.manual_seed(0)
    model = GPT2MoE(ModelConfig("small", 2, 16, 2, 8, 32, num_experts=4)).double()
    if way == WAYS[0]:
        fsdp(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpoint = find_checkpoint(folder)
    first = load_checkpoint(checkpoint, model, optimizer) + 1 if checkpoint else 1
    injector = Injector(fault, rank, folder)

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = torch.Generator().manual_seed(10 * step + rank)
        ids, targets = torch.randint(0, 32, (2, 4, 8), generator=own)
        return ids, targets

    sends, writes, tries = link.start, FileSystemWriter.write_data, library.fastest

    def start(*args, **kwargs):
        injector.here()
        return sends(*args, **kwargs)

    def write_data(*args):
        result = writes(*args)
        injector.here()
        return result

    def fastest(*args):
        _wait_briefly()
        injector.place = "trials"
        return tries(*args)

    patches = mock.patch.object(link, "start", start), mock.patch.object(library, "fastest", fastest)
    with patches[0], patches[1], mock.patch.object(FileSystemWriter, "write_data", write_data):
        measured = fault is not None and fault.place == "trials"
        strategy, cluster = ("auto", None) if measured else ("lancet-dw", "p3dn")
        module = TrainingStep(model, ranks=1)
        times = folder / "times.json"
        step = library.optimize(module, batch(0), strategy=strategy, cluster=cluster, times=times)
        _wait_briefly()
        for number in range(first, STEPS + 1):
            injector.place = "forward" * (number == STRUCK)
            loss = step(*batch(number)).objective
            injector.place = "backward" * (number == STRUCK)
            loss.backward()
            injector.place = ""
            optimizer.step()
            optimizer.zero_grad()
            with (folder / f"losses-{rank}.jsonl").open("a") as file:
                print(json.dumps([number, loss.item()]), file=file)
            if number % EVERY == 0:
                injector.place = "saving" * (number == STRUCK)
                if injector.fault is not None and injector.fault.kind == "disk full" and injector.place:
                    full = folder / f"step-{number:08d}" / "__1_0.distcp"
                    full.parent.mkdir(exist_ok=True)
                    full.symlink_to("/dev/full")
                    injector.note()
                    injector.fault = None
                save_checkpoint(folder, number, model, optimizer)
                injector.place = ""
    return 0


def _wait_briefly() -> None:
    from torch.distributed import distributed_c10d

    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S), group)


def run(fault: Fault | None, way: str, folder: Path) -> tuple[float | None, str]:
    """-> seconds from the fault to the end of all ranks, or None if they finished; the error line."""
    from lancet_kernels.errors import RankFailed
    from lancet_kernels.measure.launch import launch

    own = [] if fault is None else [fault.kind, fault.place]
    try:
        launch(2, [__file__, "--rank", str(folder), way, *own])
    except RankFailed as error:
        if fault is None or not (struck := folder / "struck").exists():
            raise
        after_s = time.time() - float(struck.read_text())
        said = str(error).replace(f"{folder}/", "")
        return after_s, re.sub(r" \(traceback in .*\)$", "", said)
    return None, ""


def losses(folder: Path) -> dict[int, tuple[float, ...]]:
    """The losses of both ranks by step; if a step was trained twice, the later ones."""
    own, other = (
        dict(json.loads(line) for line in (folder / f"losses-{rank}.jsonl").read_text().splitlines())
        for rank in range(2)
    )
    return {step: (own[step], other[step]) for step in own if step in other}


def ends(chosen: list[Fault]) -> Iterator[End]:
    """Run a job for each fault."""
    from lancet_kernels.cli.trainer import find_checkpoint

    with tempfile.TemporaryDirectory(prefix="lancet-faults-") as temporary:
        for way in dict.fromkeys(fault.way for fault in chosen):
            alone = Path(temporary, way)
            alone.mkdir()
            run(None, way, alone)
            undisturbed = losses(alone)
            for number, fault in enumerate(fault for fault in chosen if fault.way == way):
                folder = Path(temporary, f"{way} {number}")
                folder.mkdir()
                yield _end(fault, folder, undisturbed, find_checkpoint)
                shutil.rmtree(folder)


def _end(fault: Fault, folder: Path, undisturbed: dict[int, tuple[float, ...]], find_checkpoint) -> End:
    after_s, said = run(fault, fault.way, folder)
    last = max(losses(folder), default=0) if (folder / "losses-0.jsonl").exists() else 0
    checkpoint = find_checkpoint(folder)
    lost = last - (int(checkpoint.name[5:]) if checkpoint else 0)
    if after_s is not None:
        for file in folder.glob("step-*/*"):
            if file.is_symlink():  # there is room again
                file.unlink()
        run(None, fault.way, folder)
    own = losses(folder)
    same = own.keys() == undisturbed.keys() and all(
        abs(a - b) <= BOUND * abs(b)
        for step in own
        for a, b in zip(own[step], undisturbed[step], strict=True)
    )
    return End(fault, after_s, said, lost, same)


def line(end: End) -> str:
    fault, after = end.fault, "went on" if end.after_s is None else f"{end.after_s:.1f} s"
    resumed = f"{end.lost} steps lost, {'the same' if end.same else 'OTHER LOSSES'} afterwards"
    return f"{fault.kind} in {fault.place} ({fault.way}): {after}; {end.said or '-'}; {resumed}"


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--only", nargs="+", default=(), help="words of the faults that are tried")
    options = parser.parse_args()
    rows = []
    for end in ends([f for f in faults() if {*options.only} <= {f.kind, f.place, f.way}]):
        print(line(end), flush=True)
        rows.append(asdict(end))
        if options.json:
            about = {"torch": torch.__version__, "date": str(date.today()), "timeout_s": TIMEOUT_S}
            options.json.write_text(json.dumps(about | {"ends": rows}, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        from lancet_kernels.measure.launch import report_errors

        place, held, *own = sys.argv[2:]
        struck_by = Fault(own[0], own[1], held) if own else None
        sys.exit(report_errors(lambda: train(struck_by, held, Path(place))))
    main()
