"""Trials of `optimize` whose times a test chooses."""

from unittest import mock

import lancet_kernels.optimization.trial as library


def with_times(**ms: float):
    """Pretends that real steps took so long, after running them; those that are not named take 100 ms."""
    real = library.milliseconds_of

    def pretend(step, ways, rounds):
        return {name: ms.get(name, 100.0) for name in real(step, ways, rounds)}

    return mock.patch.object(library, "milliseconds_of", pretend)
