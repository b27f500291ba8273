"""The training loop of `lancet train` on every rank, from the start or a checkpoint to the last step, and the
run's summary."""

from __future__ import annotations

import contextlib
import math
import signal
import statistics
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch.distributed as dist

from lancet_kernels.atomic import write_json_atomically
from lancet_kernels.errors import UserError
from lancet_kernels.ops.comm.groups import from_first_rank, group_name
from lancet_kernels.ops.comm.waiting import waiting
from lancet_kernels.training import checkpoint
from lancet_kernels.training.data import load_corpus
from lancet_kernels.training.ranks import Rank
from lancet_kernels.training.runs import (
    append_metrics,
    new_run,
    read_config,
    read_metrics,
    resolve_run,
    truncate_metrics,
    writing,
)
from lancet_kernels.training.train_options import TrainOptions, check_options
from lancet_kernels.training.trainer import Trainer

_CHECKPOINTS = "checkpoints"
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MEDIANS = ("balance_loss", "tokens_per_s", "step_ms", "all_to_all_ms", "exposed_ms")


def train(options: TrainOptions, rank: Rank, resume: str | None = None) -> dict[str, object] | None:
    """Train from the start, or from the newest checkpoint of the run `resume`, to the last step on this rank.

    Told to stop (Ctrl-C, SIGTERM), all ranks finish the step, save it, and end.

    Returns: the summary on rank 0, None on the others. Leaves the run's folder, which only rank 0 writes but
    for checkpoints. Raises: SystemExit(128 + signal) on all ranks when told to stop.
    """
    check_options(options, rank.world)
    trainer = Trainer(options, rank, load_corpus(options.data, options.tokenizer))
    run = Path()
    if rank.rank == 0:
        run = resolve_run(options.runs, resume) if resume else new_run(options.runs, options.name)
    run = from_first_rank(run, group_name(None), "the run's folder")
    with writing(run) if rank.rank == 0 else contextlib.nullcontext():
        return _train_in(run, trainer, resume is not None)


def _train_in(run: Path, trainer: Trainer, resume: bool) -> dict[str, object] | None:
    """`train` in the folder of a run that this job holds."""
    options, first_rank = trainer.options, trainer.rank.rank == 0
    if resume:
        _check_same(trainer.about, run)
    trainer.plan(run / "plan.json")
    first = _restore(trainer, run) + 1 if resume else 1
    if first_rank:
        # From here on the plan is in the run's own folder.
        given = asdict(replace(options, experts=trainer.model.config.num_experts, plan=None))
        write_json_atomically(run / "config.json", given | {"trains": trainer.about})
        truncate_metrics(run, first - 1)
    log_scalars = _tensorboard(run) if options.tensorboard and first_rank else None
    progress = _Progress(first, options, first_rank)
    with stop_requests() as asked, contextlib.closing(progress):
        for step in range(first, options.steps + 1):
            metrics, stop = trainer.step(step, bool(asked.number))
            progress.show(metrics)
            if first_rank:
                append_metrics(run, metrics)
            if log_scalars is not None:
                log_scalars(metrics)
            every = options.checkpoint_every
            if stop or (every and (step % every == 0 or step == options.steps)):
                checkpoint.save_checkpoint(run / _CHECKPOINTS, step, trainer.model, trainer.optimizer)
            if stop:
                break
    if step < options.steps:
        _stop(run, trainer, step, asked.number or signal.SIGTERM)
    validation_loss = trainer.validation_loss()
    comparison = {"comparison": trainer.compare(run / "timeline.png")} if options.compare else {}
    if not first_rank:
        return None
    summary = _summary(run, trainer, validation_loss) | comparison
    write_json_atomically(run / "summary.json", summary)
    return summary


def _check_same(about: Mapping[str, object], run: Path) -> None:
    """Raise UserError unless a run trains the same model with the same optimizer."""
    saved = read_config(run).get("trains", {})
    for key, value in about.items():
        if saved.get(key) != value:
            raise UserError(
                f"resume: {key}",
                got=f"{saved.get(key)} in {run.name}",
                expected=f"{value}, which this run asks for",
                do=f"resume with the {key} that was saved, or start a new run",
            )


def _restore(trainer: Trainer, run: Path) -> int:
    """Load the newest checkpoint of a run. -> the step it was saved after."""
    newest = checkpoint.find_checkpoint(run / _CHECKPOINTS)
    if newest is None:
        raise UserError(
            "resume",
            got=f"{run.name}, which has no complete checkpoint",
            expected="a run with one",
            do="start a new run",
        )
    step, steps = checkpoint.load_checkpoint(newest, trainer.model, trainer.optimizer), trainer.options.steps
    if step >= steps:
        taken = f"{steps}, with {step} already taken"
        raise UserError("steps", got=taken, expected=f"more than {step}", do="raise --steps")
    return step


def _stop(run: Path, trainer: Trainer, step: int, number: int) -> NoReturn:
    """Say how to go on with a run that was saved, and end this process as the signal would. Collective."""
    if trainer.rank.rank == 0:
        elsewhere = "" if trainer.options.runs == TrainOptions.runs else f" --runs {trainer.options.runs}"
        print(
            f"stopped by {signal.Signals(number).name} after step {step}, which is saved; go on with: "
            f"lancet train --resume {run.name}{elsewhere}",
            file=sys.stderr,
            flush=True,
        )
    if dist.is_initialized():
        # The first rank that ends ends the others.
        with waiting("the end of the stopped run"):
            dist.barrier()
    raise SystemExit(128 + number)


class _Progress:
    """What a person sees of the steps, on the first rank: a bar on a terminal, else a line now and then."""

    def __init__(self, first: int, options: TrainOptions, shown: bool) -> None:
        # Imported here, so that the other commands work where it is not installed.
        from tqdm import tqdm

        on_terminal = sys.stderr.isatty()
        self._first, self._last = first, options.steps
        self._every = options.log_every if shown and not on_terminal else 0
        hidden = not (shown and on_terminal)
        self._bar = tqdm(total=options.steps, initial=first - 1, unit="step", disable=hidden)
        self.close = self._bar.close
        self._since: list[Mapping[str, float]] = []

    def show(self, metrics: Mapping[str, float]) -> None:
        """The step with these metrics is done."""
        self._bar.set_postfix_str(f"loss {metrics['loss']:.3f}, {metrics['tokens_per_s']:.0f} tokens/s")
        self._bar.update()
        if not self._every:
            return
        self._since.append(metrics)
        step = int(metrics["step"])
        if step in (self._first, self._last) or step % self._every == 0:
            ms = statistics.fmean(m["step_ms"] for m in self._since)
            tokens = metrics["tokens_per_s"] * metrics["step_ms"]
            speed = f"{tokens / ms:.0f} tokens/s, {ms:.1f} ms"
            print(
                f"step {step}/{self._last}, loss {metrics['loss']:.3f}, {speed}", file=sys.stderr, flush=True
            )
            self._since.clear()


def _tensorboard(run: Path) -> Callable[[Mapping[str, float]], None]:
    """Write a step's metrics to `run/tensorboard`."""
    # Imported here, because tensorboard is optional.
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run / "tensorboard"))

    def log_scalars(metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if name != "step":
                writer.add_scalar(name, value, int(metrics["step"]))
        writer.flush()

    return log_scalars


def _summary(run: Path, trainer: Trainer, validation_loss: float) -> dict[str, object]:
    """The summary of the run. Times and rates are medians over the steps, without the first (warm-up)."""
    options, config = trainer.options, trainer.model.config
    # NaN, in the metrics of a diverged run, is null in JSON.
    metrics = [{k: math.nan if v is None else v for k, v in m.items()} for m in read_metrics(run)]
    steady = metrics[1:] or metrics
    return {
        "run": run.name,
        "model": config.name,
        "gate": config.gate,
        "experts": config.num_experts,
        "ranks": trainer.rank.world,
        "device": trainer.rank.device.type,
        "data": trainer.corpus.name,
        "steps": len(metrics),
        "loss_first": metrics[0]["loss"],
        "loss_last": metrics[-1]["loss"],
        "validation_loss": validation_loss,
        "dropped": statistics.fmean(m["dropped"] for m in metrics),
        **{key: statistics.median(m[key] for m in steady) for key in _MEDIANS},
        "link": "real" if options.link_gbps is None else f"emulated, {options.link_gbps:g} Gbit/s",
    }


class StopRequest:
    """Ctrl-C and SIGTERM inside `stop_requests`. number: of the signal; 0: none came."""

    number = 0


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Inside the block, Ctrl-C and SIGTERM are noted and interrupt nothing; a second one ends the process as
    if there were no block. Outside the main thread, which alone gets signals, nothing is changed."""
    asked = StopRequest()

    def note(number: int, _frame: FrameType | None) -> None:
        if asked.number:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        asked.number = number

    signals = _STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, note) for number in signals}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
