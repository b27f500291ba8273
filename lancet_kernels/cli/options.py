"""Command-line options from a dataclass: one place for name, type, default, choices and help.

    @dataclass(frozen=True)
    class Options:
        steps: int = option(200, "training steps")

becomes `--steps 200` with that help, parsed into an `Options`.

The paper's hyper-parameters (section 7) are options, too, of several commands; they win over the environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lancet_kernels.schedules.cut.partition_range import PartitionOptions


def option(
    default: Any,
    help: str,
    *,
    parse: Callable[[str], Any] | None = None,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
    alias: str | None = None,
    advanced: bool = False,
) -> Any:
    """A dataclass field that is also a command-line option; a boolean is a flag.

    parse: turns the argument into the value (default: the type of the default, of None a string); it may
        raise ValueError.
    alias: another flag for the same, `--ranks` say. advanced: listed apart, after all others.
    """
    arguments: dict[str, Any] = {"action": "store_true"}
    if not isinstance(default, bool):
        kind = str if default is None else type(default)
        arguments = {"type": parse or kind, "choices": choices, "metavar": metavar}
        if default is not None and "default" not in help:
            help += " (default: %(default)s)"
    metadata = {"aliases": [alias] if alias else [], "advanced": advanced}
    return dataclasses.field(default=default, metadata=metadata | {"arguments": arguments | {"help": help}})


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """Add every `option` field of a dataclass to the parser."""
    fields = dataclasses.fields(options)
    rarely = parser.add_argument_group("advanced") if any(f.metadata["advanced"] for f in fields) else parser
    for field in fields:
        group = rarely if field.metadata["advanced"] else parser
        flags = "--" + field.name.replace("_", "-"), *field.metadata["aliases"]
        group.add_argument(*flags, default=field.default, **field.metadata["arguments"])


def to_options(options: type, arguments: argparse.Namespace) -> Any:
    """The dataclass, filled from parsed arguments."""
    return options(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(options)})


def _number(kind: type, expected: str, is_good: Callable[[Any], bool]) -> Callable[[str], Any]:
    """A parser of numbers, which raises ArgumentTypeError for what is none and for one that is not good."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            # argparse would name the function.
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}") from None
        if not is_good(value):
            raise argparse.ArgumentTypeError(f"got {text}, expected {expected}")
        return value

    return parse


positive_int = _number(int, "a whole number of at least 1", lambda value: value >= 1)
non_negative_int = _number(int, "a whole number of at least 0", lambda value: value >= 0)
positive_float = _number(float, "a number above 0", lambda value: 0 < value < math.inf)
non_negative_float = _number(float, "a number of at least 0", lambda value: 0 <= value < math.inf)
fraction = _number(float, "a number between 0 and 1", lambda value: 0 < value < 1)
probability = _number(float, "a number from 0 to below 1", lambda value: 0 <= value < 1)
_positive_float = _number(float, "a number above 0, or none", lambda value: 0 < value < math.inf)


def names_among(choices: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """A parser of some of the names, with commas in between."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        for name in names:
            if name not in choices:
                raise argparse.ArgumentTypeError(f"got {name!r}, expected some of {', '.join(choices)}")
        return names

    return parse


def positive_float_or_none(text: str) -> float | None:
    """Parse a number above 0, or the word none."""
    return None if text.lower() == "none" else _positive_float(text)


@dataclass(frozen=True)
class PlanningFlags:
    """Base class for the options of commands that plan."""

    most_parts: int | None = option(
        None,
        "most chunks that an op is cut into, the paper's rho (default: LANCET_RHO, or 8)",
        parse=positive_int,
        advanced=True,
    )
    group_ms: float | None = option(
        None,
        "consecutive ops are grouped until they take this many milliseconds, the paper's gamma (default: "
        "LANCET_GAMMA, or five groups per MoE layer)",
        parse=positive_float,
        advanced=True,
    )
    longest_range_ms: float | None = option(
        None,
        "longest range of ops that is cut, in milliseconds, the paper's iota (default: LANCET_IOTA, or the "
        "time between two MoE layers)",
        parse=positive_float,
        advanced=True,
    )

    def partition(self) -> PartitionOptions:
        """Raises: UserError for an environment variable that is used and is not a valid number."""
        # Imported here, because most commands do not plan.
        from lancet_kernels.schedules.cut.partition_range import PartitionOptions

        return PartitionOptions.from_environment(self.most_parts, self.group_ms, self.longest_range_ms)
