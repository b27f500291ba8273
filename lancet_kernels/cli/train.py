"""`lancet train`: start the ranks, or be one of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lancet_kernels.cli.options import add_options, to_options
from lancet_kernels.cli.training.train_loop import read_config, train
from lancet_kernels.cli.training.train_options import TrainOptions, check_options
from lancet_kernels.files import json_text
from lancet_kernels.measure.launch import LANCET, launch
from lancet_kernels.measure.ranks import start_ranks, under_launcher


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
    command.set_defaults(run=run, command=command)


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    """Train. -> exit code."""
    if arguments.resume:
        arguments = _with_options_of(parser, arguments, argv)
    options: TrainOptions = to_options(TrainOptions, arguments)
    if under_launcher() or options.ranks == 1:
        return _train_here(options, arguments)
    check_options(options, options.ranks)
    command = [*LANCET, *argv]
    launch(options.ranks, command, device=options.chosen_device(), finish_s=options.timeout)
    return 0


def _with_options_of(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: Sequence[str]
) -> argparse.Namespace:
    """Parse again, with the resumed run's options as defaults."""
    saved = read_config(Path(arguments.resume))
    options = {name: saved[name] for name in TrainOptions.__dataclass_fields__ if name in saved}
    arguments.command.set_defaults(**options)
    return parser.parse_args(argv)


def _train_here(options: TrainOptions, arguments: argparse.Namespace) -> int:
    """This process is a rank, or the only one."""
    rank = start_ranks(options.chosen_device(), options.timeout)
    summary = train(options, rank, arguments.resume)
    if summary is not None:
        print(json_text(summary) if arguments.json else _report(options, summary), flush=True)
    return 0


def _report(options: TrainOptions, summary: dict) -> str:
    """The summary as text for people."""
    emulated = " (emulated link)" if options.link_gbps is not None else ""
    text = """\
{model}, {experts} experts behind gate {gate}, {ranks} rank(s) on {device}, {steps} steps on {data}
  loss         {loss_first:.3f} -> {loss_last:.3f}, validation {validation_loss:.3f}
  speed        {tokens_per_s:.0f} tokens/s, {step_ms:.1f} ms per step
  all-to-all   {all_to_all_ms:.1f} ms per step, {exposed_ms:.1f} ms of it exposed{emulated}
  routing      {dropped:.1%} dropped, load-balance loss {balance_loss:.3f}
  written to   {run}""".format(**summary, emulated=emulated)
    if "comparison" in summary:
        # Imported here, because it imports torch's tracer.
        from lancet_kernels.measure.step_bench import table

        text += f"\n{table(summary['comparison'])}\ntimeline in {summary['comparison']['timeline']}"
    return text
