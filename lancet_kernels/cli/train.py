"""`lancet train`: start the ranks; on each of them the loop, from the start or a checkpoint to the last step,
and the run's summary.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import signal
import statistics
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist

from lancet_kernels.cli.options import add_options, to_options
from lancet_kernels.cli.train_options import TrainOptions, check_options, load_corpus
from lancet_kernels.cli.trainer import Trainer, find_checkpoint, load_checkpoint, save_checkpoint
from lancet_kernels.errors import UserError
from lancet_kernels.files import file_errors, json_text, write_json_atomically, write_text_atomically
from lancet_kernels.measure.launch import LANCET, Rank, launch, start_ranks, under_launcher
from lancet_kernels.ops.comm.groups import from_first_rank, group_name
from lancet_kernels.ops.comm.waiting import waiting


def add_parser(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "train",
        help="train a Mixture-of-Experts model on text",
        description="Train a Mixture-of-Experts model on text, on several ranks that this command starts "
        "itself; under torchrun it is one of the ranks.",
    )
    add_options(command, TrainOptions)
    command.add_argument(
        "--resume",
        metavar="FOLDER",
        help="continue a run from its newest checkpoint; options that are not given are those of that run",
    )
    command.add_argument("--json", action="store_true", help="print the summary as JSON")
    command.set_defaults(run=run)


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Train. -> exit code."""
    if arguments.resume:
        # Parsed again, behind the resumed run's options.
        saved = read_config(Path(arguments.resume))
        saved_flags = [
            f"--{field.name.replace('_', '-')}={'none' if value is None else value}"
            for field in fields(TrainOptions)
            if (value := saved.get(field.name, field.default)) != field.default
        ]
        arguments = parser.parse_args([*argv[:1], *saved_flags, *argv[1:]])
    options: TrainOptions = to_options(TrainOptions, arguments)
    if under_launcher() or options.ranks == 1:
        rank = start_ranks(options.chosen_device(), options.timeout)
        summary = train(options, rank, arguments.resume)
        if summary is not None:
            print(json_text(summary) if arguments.json else _report(options, summary), flush=True)
        return 0
    check_options(options, options.ranks)
    command = [*LANCET, *argv]
    launch(options.ranks, command, device=options.chosen_device(), finish_s=options.timeout)
    return 0


def _report(options: TrainOptions, summary: dict) -> str:
    """The summary as text for people."""
    emulated = " (emulated link)" if options.link_gbps is not None else ""
    return """\
{model}, {experts} experts behind gate {gate}, {ranks} rank(s) on {device}, {steps} steps on {data}
  loss         {loss_first:.3f} -> {loss_last:.3f}, validation {validation_loss:.3f}
  speed        {tokens_per_s:.0f} tokens/s, {step_ms:.1f} ms per step
  all-to-all   {all_to_all_ms:.1f} ms per step, {exposed_ms:.1f} ms of it exposed{emulated}
  routing      {dropped:.1%} dropped, load-balance loss {balance_loss:.3f}
  written to   {run}""".format(**summary, emulated=emulated)


_CONFIG, _METRICS, _CHECKPOINTS = "config.json", "metrics.jsonl", "checkpoints"
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MEDIANS = ("balance_loss", "tokens_per_s", "step_ms", "all_to_all_ms", "exposed_ms")


def train(options: TrainOptions, rank: Rank, resume: str | None = None) -> dict[str, object] | None:
    """Train from the start, or from the newest checkpoint of the run `resume`, to the last step on this rank.

    Told to stop (Ctrl-C, SIGTERM), all ranks finish the step, save it, and end.

    Returns: the summary on rank 0, None on the others. Leaves the run's folder, which only rank 0 writes but
    for checkpoints. Raises: SystemExit(128 + signal) on all ranks when told to stop.
    """
    check_options(options, rank.world)
    trainer = Trainer(options, rank, load_corpus(options.data))
    run, first_rank = Path(), rank.rank == 0
    if first_rank:
        run = Path(resume) if resume else _new_folder(options.output)
    run = from_first_rank(run, group_name(None), "the run's folder")
    if resume:
        _check_same(trainer.about, run)
    trainer.plan(run / "plan.json")
    first = _restore(trainer, run) + 1 if resume else 1
    if first_rank:
        # From here on the plan is in the run's own folder.
        config = asdict(replace(options, experts=trainer.model.config.num_experts, plan=None))
        write_json_atomically(run / _CONFIG, config | {"trains": trainer.about})
        # A resumed run repeats the steps after its checkpoint.
        earlier = [json_text(m) + "\n" for m in _read_metrics(run) if m["step"] < first]
        write_text_atomically(run / _METRICS, "".join(earlier))
    since: list[Mapping[str, float]] = []
    with stop_requests() as request:
        for step in range(first, options.steps + 1):
            metrics, stop = trainer.step(step, bool(request.number))
            if first_rank:
                with (run / _METRICS).open("a", encoding="utf-8") as file:
                    file.write(json_text(metrics) + "\n")
                since.append(metrics)
                if options.log_every and (step in (first, options.steps) or step % options.log_every == 0):
                    print(_line(since, options.steps), file=sys.stderr, flush=True)
                    since.clear()
            every = options.checkpoint_every
            if stop or (every and (step % every == 0 or step == options.steps)):
                save_checkpoint(run / _CHECKPOINTS, step, trainer.model, trainer.optimizer)
            if stop:
                break
    if step < options.steps:
        _stop(run, trainer, step, request.number or signal.SIGTERM)
    validation_loss = trainer.validation_loss()
    if not first_rank:
        return None
    summary = _summary(run, trainer, validation_loss)
    write_json_atomically(run / "summary.json", summary)
    return summary


def _check_same(about: Mapping[str, object], run: Path) -> None:
    """Raise UserError unless a run trains the same model with the same optimizer."""
    saved = read_config(run).get("trains", {})
    for key, value in about.items():
        if saved.get(key) != value:
            raise UserError(
                f"resume: {key}",
                got=f"{saved.get(key)} in {run}",
                expected=f"{value}, which this run asks for",
                do=f"resume with the {key} that was saved, or start a new run",
            )


def _restore(trainer: Trainer, run: Path) -> int:
    """Load the newest checkpoint of a run. -> the step it was saved after."""
    newest = find_checkpoint(run / _CHECKPOINTS)
    if newest is None:
        raise UserError(
            "resume",
            got=f"{run}, which has no complete checkpoint",
            expected="a run with one",
            do="start a new run",
        )
    step, steps = load_checkpoint(newest, trainer.model, trainer.optimizer), trainer.options.steps
    if step >= steps:
        got = f"{steps}, with {step} already taken"
        raise UserError("steps", got=got, expected=f"more than {step}", do="raise --steps")
    return step


def _stop(run: Path, trainer: Trainer, step: int, number: int) -> NoReturn:
    """Say how to go on with a run that was saved, and end this process as the signal would. Collective."""
    if trainer.rank.rank == 0:
        print(
            f"stopped by {signal.Signals(number).name} after step {step}, which is saved; go on with: "
            f"lancet train --resume {run}",
            file=sys.stderr,
            flush=True,
        )
    if dist.is_initialized():
        # The first rank that ends ends the others.
        with waiting("the end of the stopped run"):
            dist.barrier()
    raise SystemExit(128 + number)


def _line(steps: Sequence[Mapping[str, float]], of: int) -> str:
    """The log line of these steps."""
    last, ms = steps[-1], statistics.fmean(m["step_ms"] for m in steps)
    tokens = last["tokens_per_s"] * last["step_ms"]
    return f"step {last['step']}/{of}, loss {last['loss']:.3f}, {tokens / ms:.0f} tokens/s, {ms:.1f} ms"


def _new_folder(output: str | None) -> Path:
    """Make the folder of a new run. Raises: UserError for one that has a run."""
    run = Path(output or datetime.now().strftime("runs/%Y%m%d-%H%M%S"))
    with file_errors(run):
        # One that another run made in this second has no config yet.
        run.mkdir(parents=True, exist_ok=output is not None)
    if (run / _CONFIG).exists():
        raise UserError("output", got=f"{run}, which has a run", expected="a new folder", do="use --resume")
    return run


def read_config(run: Path) -> dict[str, Any]:
    """The `config.json` of the run in a folder. Raises: UserError if it is missing or another JSON."""
    try:
        config = json.loads((run / _CONFIG).read_text(encoding="utf-8"))
        if not (isinstance(config, dict) and isinstance(config.get("trains", {}), dict)):
            raise ValueError("not what a run writes")
        return config
    except (OSError, ValueError) as error:
        raise UserError(
            "run", got=f"{run / _CONFIG} ({getattr(error, 'strerror', None) or error})",
            expected="the JSON file of a run", do="name the folder of a run of lancet train",
        ) from error  # fmt: skip


def _read_metrics(run: Path) -> list[dict[str, Any]]:
    """The steps of a run in order, without lines that are none: a kill cuts the last one short. None in JSON
    is NaN."""
    if not (run / _METRICS).exists():
        return []
    steps = []
    for line in (run / _METRICS).read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            steps.append(json.loads(line))
    return [
        {k: math.nan if v is None else v for k, v in step.items()}
        for step in steps
        if isinstance(step, dict) and "step" in step
    ]


def _summary(run: Path, trainer: Trainer, validation_loss: float) -> dict[str, object]:
    """The summary of the run. Times and rates are medians over the steps, without the first (warm-up)."""
    options, config = trainer.options, trainer.model.config
    metrics = _read_metrics(run)
    steady = metrics[1:] or metrics
    return {
        "run": str(run),
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
    request = StopRequest()

    def note(number: int, _frame: FrameType | None) -> None:
        if request.number:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        request.number = number

    signals = _STOP_SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, note) for number in signals}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
