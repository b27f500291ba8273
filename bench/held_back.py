"""Times the stages of a fused pass: its launches are held back, and then run stage by stage.

    with held_back() as launches:
        out, saved = moe_forward(...)           # prepares everything, launches nothing
    for stages in ("put", "in out", "reduce"):
        for launch in launches:                 # two, if the configuration is split
            launch(stages)

    stage    what it does
    put      puts of rows (backward: of dy and weights) to peers
    in       first GEMM of the rows
    out      second GEMM, with results stored at the peer
    wgrad    dW2, dW1
    dense    independent GEMMs
    reduce   weighted sum of the returned rows

Every stage of a pass must be launched on every PE, in this order, because stages wait for earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol
from unittest import mock

from lancet_kernels.kernels import overlap
from lancet_kernels.kernels.tasks import LaunchShape

# What makes a launch hold a stage, in the words of tasks.LaunchShape, and what it has without it.
STAGES: dict[str, tuple[str, Any]] = {
    "put": ("put", False),
    "in": ("tiles_in", 0),
    "out": ("tiles_out", 0),
    "wgrad": ("wgrad", False),
    "dense": ("dense_tiles", 0),
    "reduce": ("reduce_blocks", 0),
}


class HeldLaunch(Protocol):
    """A prepared launch."""

    def __call__(self, stages: str, programs: int | None = None) -> None:
        """Launch those of its stages that are named, if any. programs: another grid than configured."""


@contextmanager
def staged(run: Callable[[HeldLaunch], object]) -> Iterator[None]:
    """Inside, passes of this process do not do the launch that they have prepared, but run(launch).

    So what `run` puts between the stages comes before whatever the pass does after its launch.
    """
    launch = overlap._Launch._launch

    def instead(self: overlap._Launch, shape: LaunchShape, **given: Any) -> None:
        def some(stages: str, programs: int | None = None) -> None:
            wanted = stages.split()
            without = dict(nothing for stage, nothing in STAGES.items() if stage not in wanted)
            if all(getattr(shape, field) == nothing for field, nothing in map(STAGES.__getitem__, wanted)):
                return
            changes = dict(without)
            if programs is not None:
                changes |= {"programs": programs, "comm_programs": min(programs, shape.comm_programs)}
            launch(self, replace(shape, **changes), **given)

        run(some)

    with mock.patch.object(overlap._Launch, "_launch", instead):
        yield


@contextmanager
def held_back() -> Iterator[list[HeldLaunch]]:
    """Inside, passes of this process prepare their launches but do not do them; see above."""
    launches: list[HeldLaunch] = []
    with staged(launches.append):
        yield launches
