"""The training loop of `lancet train` on every rank, from the start or a checkpoint to the last step, and the
run's summary."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

from lancet_kernels.errors import UserError
from lancet_kernels.ops.groups import from_first_rank, group_name
from lancet_kernels.training import checkpoint
from lancet_kernels.training.data import load_corpus
from lancet_kernels.training.launch import Rank
from lancet_kernels.training.runs import RunFolder, resolve_run
from lancet_kernels.training.train_options import TrainOptions, check_options
from lancet_kernels.training.trainer import Trainer

_CHECKPOINTS = "checkpoints"


def train(options: TrainOptions, rank: Rank, resume: str | None = None) -> dict[str, object] | None:
    """Train from the start, or from the newest checkpoint of the run `resume`, to the last step on this rank.

    Returns: the summary on rank 0, None on the others. Leaves the run's folder behind.
    """
    check_options(options, rank.world)
    trainer = Trainer(options, rank, load_corpus(options.data, options.tokenizer))
    run, path = _open_run(options, rank, resume)
    try:
        trainer.plan(path / "plan.json")
        first = _restore(trainer, path, options.steps) + 1 if resume else 1
    except BaseException:
        if run is not None and not resume:
            run.discard()
        raise
    if run is not None:
        # From here on the plan is in the run's own folder.
        run.write_config(asdict(replace(options, experts=trainer.model.config.num_experts, plan=None)))
        run.truncate_metrics(first - 1)
        run.point_latest()
    log_scalars = _tensorboard(path) if options.tensorboard and run is not None else None
    bar = _progress(first, options.steps, rank)
    for step in bar:
        metrics = trainer.step(step)
        bar.set_postfix_str(f"loss {metrics['loss']:.3f}, {metrics['tokens_per_s']:.0f} tokens/s")
        if run is not None:
            run.append_metrics(metrics)
        if log_scalars is not None:
            log_scalars(metrics)
        if options.checkpoint_every and step % options.checkpoint_every == 0:
            checkpoint.save_checkpoint(
                path / _CHECKPOINTS, step, trainer.model, trainer.optimizer, trainer.about
            )
    validation_loss = trainer.validation_loss()
    comparison = trainer.compare(path / "timeline.png") if options.compare else None
    if run is None:
        return None
    with run:
        summary = _summary(run, trainer, validation_loss)
        if comparison is not None:
            summary["comparison"] = comparison
        run.write_summary(summary)
    return summary


def _open_run(options: TrainOptions, rank: Rank, resume: str | None) -> tuple[RunFolder | None, Path]:
    """The run's folder, which only rank 0 opens, and its path on every rank."""
    run: RunFolder | None = None
    path = ""
    if rank.rank == 0:
        if resume:
            # The ranks of a launcher that was just killed take a moment to end.
            run = RunFolder.open(resolve_run(options.runs, resume), wait_s=5.0)
        else:
            run = RunFolder.create(options.runs, options.name)
        path = str(run.path)
    return run, Path(from_first_rank(path, group_name(None), "the run's folder"))


def _restore(trainer: Trainer, run: Path, steps: int) -> int:
    """Load the newest whole checkpoint of a run. -> the step it was saved after."""
    newest = checkpoint.find_checkpoint(run / _CHECKPOINTS)
    if newest is None:
        raise UserError(
            "resume",
            got=f"{run.name}, which has no complete checkpoint",
            expected="a run with one",
            do="train with --checkpoint-every, or start a new run",
        )
    step = checkpoint.load_checkpoint(newest, trainer.model, trainer.optimizer, trainer.about)
    if step >= steps:
        raise UserError(
            "steps",
            got=f"{steps}, with {step} already taken",
            expected=f"more than {step}",
            do="raise --steps",
        )
    return step


def _progress(first: int, last: int, rank: Rank) -> tqdm:
    """The steps, with a bar on a terminal of rank 0 that also shows the time that remains."""
    shown = rank.rank == 0 and sys.stderr.isatty()
    return tqdm(range(first, last + 1), initial=first - 1, total=last, unit="step", disable=not shown)


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


def _summary(run: RunFolder, trainer: Trainer, validation_loss: float) -> dict[str, object]:
    """The summary of the run. Times and rates are medians over the steps, without the first (warm-up)."""
    options, config = trainer.options, trainer.model.config
    # NaN, in the metrics of a diverged run, is null in JSON.
    metrics = [{k: math.nan if v is None else v for k, v in m.items()} for m in run.read_metrics()]
    steady = metrics[1:] or metrics

    def median(key: str) -> float:
        return statistics.median(m[key] for m in steady)

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
        "balance_loss": median("balance_loss"),
        "dropped": statistics.fmean(m["dropped"] for m in metrics),
        "tokens_per_s": median("tokens_per_s"),
        "step_ms": median("step_ms"),
        "all_to_all_ms": median("all_to_all_ms"),
        "exposed_ms": median("exposed_ms"),
        "link": "real" if options.link_gbps is None else f"emulated, {options.link_gbps:g} Gbit/s",
    }
