"""The subcommands of `lancet`, one file each: `add_parser` says what it takes, `run` does it."""
