"""The training loop of `lancet train` on every rank, from the start or a checkpoint to the last step, and the
run's summary."""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from tqdm import tqdm

from lancet_kernels.atomic import write_json_atomically
from lancet_kernels.errors import UserError
from lancet_kernels.ops.comm.groups import from_first_rank, group_name
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
_MEDIANS = ("balance_loss", "tokens_per_s", "step_ms", "all_to_all_ms", "exposed_ms")


def train(options: TrainOptions, rank: Rank, resume: str | None = None) -> dict[str, object] | None:
    """Train from the start, or from the newest checkpoint of the run `resume`, to the last step on this rank.

    Returns: the summary on rank 0, None on the others. Leaves the run's folder, which only rank 0 writes but
    for checkpoints.
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
        asked = asdict(replace(options, experts=trainer.model.config.num_experts, plan=None))
        write_json_atomically(run / "config.json", asked | {"trains": trainer.about})
        truncate_metrics(run, first - 1)
    log_scalars = _tensorboard(run) if options.tensorboard and first_rank else None
    bar = _progress(first, options.steps, first_rank)
    for step in bar:
        metrics = trainer.step(step)
        bar.set_postfix_str(f"loss {metrics['loss']:.3f}, {metrics['tokens_per_s']:.0f} tokens/s")
        if first_rank:
            append_metrics(run, metrics)
        if log_scalars is not None:
            log_scalars(metrics)
        if options.checkpoint_every and step % options.checkpoint_every == 0:
            checkpoint.save_checkpoint(run / _CHECKPOINTS, step, trainer.model, trainer.optimizer)
    validation_loss = trainer.validation_loss()
    comparison = trainer.compare(run / "timeline.png") if options.compare else None
    if not first_rank:
        return None
    summary = _summary(run, trainer, validation_loss)
    if comparison is not None:
        summary["comparison"] = comparison
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
            do="train with --checkpoint-every, or start a new run",
        )
    step, steps = checkpoint.load_checkpoint(newest, trainer.model, trainer.optimizer), trainer.options.steps
    if step >= steps:
        taken = f"{steps}, with {step} already taken"
        raise UserError("steps", got=taken, expected=f"more than {step}", do="raise --steps")
    return step


def _progress(first: int, last: int, shown: bool) -> tqdm:
    """The steps, with a bar on a terminal that also shows the time that remains."""
    hidden = not (shown and sys.stderr.isatty())
    return tqdm(range(first, last + 1), initial=first - 1, total=last, unit="step", disable=hidden)


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
