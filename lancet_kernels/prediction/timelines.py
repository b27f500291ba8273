"""Timelines of simulated chains: events for traces and pictures."""

from __future__ import annotations

from lancet_kernels.prediction.answer import Simulated
from lancet_kernels.schedules.time.simulate import Event, Timeline


def events_of(simulated: Simulated) -> list[Event]:
    """One event per instruction of the longest chain that was simulated."""
    return Timeline(simulated.step.program, simulated.times).events
