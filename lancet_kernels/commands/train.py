"""`lancet train`: start the ranks, or be one of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lancet_kernels.atomic import json_text
from lancet_kernels.options import add_options, to_options
from lancet_kernels.training.launch import launch, start_ranks, under_launcher
from lancet_kernels.training.runs import read_config, resolve_run
from lancet_kernels.training.train_loop import train
from lancet_kernels.training.train_options import TrainOptions, check_options


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser of `lancet`."""
    command = commands.add_parser(
        "train",
        help="train a Mixture-of-Experts model on text",
        description="Train a Mixture-of-Experts model on text, on several ranks that this command starts "
        "itself; under torchrun it is one of the ranks.",
    )
    add_options(command, TrainOptions)
    command.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="RUN",
        help="continue from the newest checkpoint of a run (name or path; default: the latest run); "
        "options that are not given are those of that run",
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
    launch(options.ranks, ["-m", "lancet_kernels.cli", *argv], device=options.chosen_device())
    return 0


def _with_options_of(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: Sequence[str]
) -> argparse.Namespace:
    """Parse again, with the resumed run's options as defaults."""
    saved = read_config(resolve_run(arguments.runs, arguments.resume))
    options = {name: saved[name] for name in TrainOptions.__dataclass_fields__ if name in saved}
    arguments.command.set_defaults(**(options | {"runs": arguments.runs}))
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
    get = summary.__getitem__
    return "\n".join(
        (
            f"{get('model')}, {get('experts')} experts behind gate {get('gate')}, "
            f"{get('ranks')} rank(s) on {get('device')}, {get('steps')} steps on {get('data')}",
            f"  loss         {get('loss_first'):.3f} -> {get('loss_last'):.3f}, "
            f"validation {get('validation_loss'):.3f}",
            f"  speed        {get('tokens_per_s'):.0f} tokens/s, {get('step_ms'):.1f} ms per step",
            f"  all-to-all   {get('all_to_all_ms'):.1f} ms per step, "
            f"{get('exposed_ms'):.1f} ms of it exposed{emulated}",
            f"  routing      {get('dropped'):.1%} dropped, load-balance loss {get('balance_loss'):.3f}",
            f"  written to   {options.runs}/{get('run')}",
            *(_comparison(summary["comparison"]) if "comparison" in summary else ()),
        )
    )


def _comparison(figures: dict) -> list[str]:
    """The comparison of blocking and planned iterations, as text for people."""
    rows = [f"  compared on an emulated link of {figures['link_gbps']:.3g} Gbit/s:"]
    for name, iteration_ms in figures["iteration_ms"].items():
        exposed_ms = figures["exposed_ms"][name]
        rows.append(f"    {name:<18} {iteration_ms:.1f} ms per iteration, {exposed_ms:.1f} ms exposed")
    low, middle, high = figures["speedup_quartiles"]
    rows.append(
        f"    {middle:.2f}x as fast, in half of the {figures['iterations']} rounds {low:.2f}x to {high:.2f}x"
    )
    return [*rows, f"    timeline in {figures['timeline']}"]
