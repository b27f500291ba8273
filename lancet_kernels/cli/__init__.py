"""The subcommands of `lancet`, one file each: `add_parser` adds its parser to `lancet`'s, `run` does it."""

from collections.abc import Collection, Sequence


def aligned(lines: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """A table of aligned columns. Args: right: the numbers of right-aligned ones."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    columns = [f"{{:{'>' if i in right else '<'}{width}}}" for i, width in enumerate(widths)]
    return "\n".join("  ".join(columns).format(*line).rstrip() for line in lines)
