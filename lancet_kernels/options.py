"""Command-line options from a dataclass: one place for name, type, default, choices and help.

    @dataclass(frozen=True)
    class Options:
        steps: int = option(200, "training steps")

becomes `--steps 200` with that help, and `Options` is what the program gets.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any


def option(
    default: Any,
    help: str,
    *,
    parse: Callable[[str], Any] | None = None,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
) -> Any:
    """A dataclass field that is also a command-line option.

    parse: turns the argument into the value (default: the type of the default); it may raise ValueError.
    """
    metadata = {"help": help, "parse": parse or type(default), "choices": choices, "metavar": metavar}
    return dataclasses.field(default=default, metadata=metadata)


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """Add every `option` field of a dataclass to the parser. Booleans become flags."""
    for field in dataclasses.fields(options):
        flag = "--" + field.name.replace("_", "-")
        metadata = field.metadata
        if isinstance(field.default, bool):
            parser.add_argument(flag, action="store_true", default=field.default, help=metadata["help"])
            continue
        shown = "" if field.default is None or "default" in metadata["help"] else " (default: %(default)s)"
        parser.add_argument(
            flag,
            type=metadata["parse"],
            default=field.default,
            choices=metadata["choices"],
            metavar=metadata["metavar"],
            help=metadata["help"] + shown,
        )


def to_options(options: type, arguments: argparse.Namespace) -> Any:
    """The dataclass, filled from parsed arguments."""
    return options(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(options)})


def positive_int(text: str) -> int:
    """Parse a whole number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a whole number of at least 1")
    return int(text)


def non_negative_int(text: str) -> int:
    """Parse a whole number of at least 0."""
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"got {text}, expected a whole number of at least 0")
    return int(text)


def positive_float(text: str) -> float:
    """Parse a finite number above 0."""
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, expected a number above 0")
    return float(text)


def non_negative_float(text: str) -> float:
    """Parse a finite number of at least 0."""
    if not 0 <= float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, expected a number of at least 0")
    return float(text)


def positive_float_or_none(text: str) -> float | None:
    """Parse a number above 0, or the word none."""
    return None if text.lower() == "none" else positive_float(text)
