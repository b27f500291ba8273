"""What happens to a training job when something happens to one of its ranks?

    python -m bench.cpu.faults --json bench/results/faults-2-core-cpu.json

Two CPU ranks train a small model, whose experts they share and whose other parameters FSDP shards or both
hold, and keep a checkpoint of every second step. Rank 1 is struck in the forward, the backward, the trials of
plans, or while it saves. The job is to end soon and to name the cause; a second one goes on from the last
checkpoint, and is to train as if nothing had happened. The table is in docs/explanation/proof.md.
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
"""How long a collective waits for a rank: in a step, in trials and while saving; and before."""
KINDS = ("killed", "stopped", "raises", "10 s late", "60 s late", "disk full")
PLACES = ("forward", "backward", "trials", "saving")
WAYS = ("experts and FSDP", "experts")
EVERY, STRUCK, STEPS = 2, 6, 8
"""Steps between checkpoints; the step in which a rank is struck; steps of the whole run."""
BOUND = 1e-9
"""Largest difference of a loss from that of a run that was left alone, relative, in float64."""


@dataclass(frozen=True)
class Fault:
    """What happens to rank 1, where, and how the parameters are held."""

    kind: str
    place: str
    way: str


@dataclass(frozen=True)
class End:
    """What became of a job. after_s: from the fault to the end of all ranks; None: it went on. said: its one
    line. lost: steps that were trained and are in no checkpoint. same: does a second job train what a run
    does that was left alone?"""

    fault: Fault
    after_s: float | None
    said: str
    lost: int
    same: bool


def faults() -> list[Fault]:
    """All of them; a disk is only full for who saves."""
    every = (Fault(*one) for one in product(KINDS, PLACES, WAYS))
    return [fault for fault in every if fault.kind != "disk full" or fault.place == "saving"]


# ---- On a rank


class Struck:
    """Does the fault, once, on rank 1 and where it belongs."""

    def __init__(self, fault: Fault | None, rank: int, folder: Path) -> None:
        self.fault = fault if rank == 1 else None
        self.folder, self.place = folder, ""

    def here(self) -> None:
        """Called where messages leave, and where a checkpoint has been written."""
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
    done = load_checkpoint(checkpoint, model, optimizer) if checkpoint else 0
    struck = Struck(fault, rank, folder)

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = torch.Generator().manual_seed(10 * step + rank)
        ids, targets = torch.randint(0, 32, (2, 4, 8), generator=own)
        return ids, targets

    sends, writes, tries = link.start, FileSystemWriter.write_data, library.fastest

    def start(*given, **by_name):
        struck.here()
        return sends(*given, **by_name)

    def write_data(*given):
        written = writes(*given)
        struck.here()
        return written

    def fastest(*given):
        _wait_briefly()
        struck.place = "trials"
        return tries(*given)

    patches = mock.patch.object(link, "start", start), mock.patch.object(library, "fastest", fastest)
    with patches[0], patches[1], mock.patch.object(FileSystemWriter, "write_data", write_data):
        measured = fault is not None and fault.place == "trials"
        strategy, cluster = ("auto", None) if measured else ("lancet-dw", "p3dn")
        module = TrainingStep(model, ranks=1)
        times = folder / "times.json"
        step = library.optimize(module, batch(0), strategy=strategy, cluster=cluster, times=times)
        _wait_briefly()
        for number in range(done + 1, STEPS + 1):
            struck.place = "forward" * (number == STRUCK)
            loss = step(*batch(number)).objective
            struck.place = "backward" * (number == STRUCK)
            loss.backward()
            struck.place = ""
            optimizer.step()
            optimizer.zero_grad()
            with (folder / f"losses-{rank}.jsonl").open("a") as file:
                print(json.dumps([number, loss.item()]), file=file)
            if number % EVERY == 0:
                struck.place = "saving" * (number == STRUCK)
                if struck.fault is not None and struck.fault.kind == "disk full" and struck.place:
                    full = folder / f"step-{number:08d}" / "__1_0.distcp"
                    full.parent.mkdir(exist_ok=True)
                    full.symlink_to("/dev/full")
                    struck.note()
                    struck.fault = None
                save_checkpoint(folder, number, model, optimizer)
                struck.place = ""
    return 0


def _wait_briefly() -> None:
    from torch.distributed import distributed_c10d

    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S), group)


# ---- The jobs


def run(fault: Fault | None, way: str, folder: Path) -> tuple[float | None, str]:
    """-> seconds from the fault to the end of all ranks, or None if they finished; the line that was said."""
    from lancet_kernels.errors import RankFailed
    from lancet_kernels.measure.launch import launch

    own = [] if fault is None else [fault.kind, fault.place]
    try:
        launch(2, [__file__, "--rank", str(folder), way, *own])
    except RankFailed as error:
        if fault is None:
            raise
        after_s = time.time() - float((folder / "struck").read_text())
        said = str(error).replace(f"{folder}/", "")
        return after_s, re.sub(r" \(traceback in .*\)$", "", said)
    return None, ""


def losses(folder: Path) -> dict[int, tuple[float, ...]]:
    """By step, of both ranks; of a step that was trained twice the later one."""
    of_rank = [
        dict(json.loads(line) for line in (folder / f"losses-{rank}.jsonl").read_text().splitlines())
        for rank in range(2)
    ]
    return {step: (of_rank[0][step], of_rank[1][step]) for step in of_rank[0] if step in of_rank[1]}


def ends(wanted: list[Fault]) -> Iterator[End]:
    """What becomes of each fault."""
    from lancet_kernels.cli.trainer import find_checkpoint

    with tempfile.TemporaryDirectory(prefix="lancet-faults-") as temporary:
        for way in dict.fromkeys(fault.way for fault in wanted):
            alone = Path(temporary, way)
            alone.mkdir()
            run(None, way, alone)
            undisturbed = losses(alone)
            for number, fault in enumerate(fault for fault in wanted if fault.way == way):
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
    """One of the table."""
    fault, after = end.fault, "went on" if end.after_s is None else f"{end.after_s:.1f} s"
    told = f"{end.lost} steps lost, {'the same' if end.same else 'OTHER LOSSES'} afterwards"
    return f"{fault.kind} in {fault.place} ({fault.way}): {after}; {end.said or '-'}; {told}"


def main() -> None:
    """Print what becomes of each fault."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--only", nargs="+", default=(), help="words of the faults that are tried")
    given = parser.parse_args()
    rows = []
    for end in ends([f for f in faults() if {*given.only} <= {f.kind, f.place, f.way}]):
        print(line(end), flush=True)
        rows.append(asdict(end))
        if given.json:
            about = {"torch": torch.__version__, "date": str(date.today()), "timeout_s": TIMEOUT_S}
            given.json.write_text(json.dumps(about | {"ends": rows}, indent=2) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        from lancet_kernels.measure.launch import report_errors

        place, held, *own = sys.argv[2:]
        struck_by = Fault(own[0], own[1], held) if own else None
        sys.exit(report_errors(lambda: train(struck_by, held, Path(place))))
    main()
