"""What does a strategy cost on its way through the graph? Equations (4) and (5) of HiDup, block by block.

For stages with communication c_i and computation k_i of one microbatch,

    psi = k_1 + sum over i > 1 of (max(k_{i-1}, c_i) + max(c_i, k_i)) + k_m,    phi = -k_m

(stage 1 has c_1 = 0 in the paper; here it may gather weights). Backward runs the stages from the last to the
first, and what it costs is the same sum over its own times: the adjoint collectives, and `BACKWARD` times
the computation. Both are added up as one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lancet_kernels.graph.program.forms import Form
from lancet_kernels.schedules.shard.blocks import BlockSignature

BACKWARD = 2.0
"""Backward computes twice as much as forward: gradients of inputs and of weights."""
COPIES = 2
STATE_COPIES = 4
"""A weight on a device: itself, its gradient, and Adam's two moments."""
EPSILON = 1e-9


class Communication(NamedTuple):
    """A tensor whose form changes in a stage, and its collective; of a parameter that is whole at rest and
    when it is read, the all-reduce of its gradient. Milliseconds of one microbatch, forward and backward."""

    tensor: str
    source: Form
    target: Form
    collective: str
    ms: float
    backward_ms: float


class BlockChoice(NamedTuple):
    """One block with its signature, the forms its parameters rest in, and what it asks the stage to
    communicate; `new_stage` when it is the first of one."""

    new_stage: bool
    block: int
    signature: BlockSignature
    rests: tuple[tuple[str, Form], ...]
    communication: tuple[Communication, ...]
    """Activations', then parameters'."""


class Label(NamedTuple):
    """A strategy on its way: costs as of `psi`, and the step that led here.

    front: time until both the communication of the open stage and the computation before it are over.
    slack, slack_b: communication that would still hide behind the stage before, forward and backward.
    comm, comm_b: of the open stage. comp: its computation so far, forward. bytes: held on a device.
    """

    front: float
    slack: float
    slack_b: float
    comm: float
    comm_b: float
    comp: float
    bytes: float
    before: Label | None
    step: Any
    """A `BlockChoice`; or what a search that passes many blocks at once puts here."""

    @property
    def psi(self) -> float:
        """Were the stage closed here: equation (5), forward and backward together."""
        comp_b = BACKWARD * self.comp
        return self.front + max(self.comm, self.comp) + self.comp + max(self.comm_b, comp_b) + comp_b

    def closed(self) -> Label:
        """The next stage is open, and empty."""
        return self._replace(
            front=self.psi,
            slack=self.comp,
            slack_b=BACKWARD * self.comp,
            comm=0.0,
            comm_b=0.0,
            comp=0.0,
        )

    def grown(
        self,
        comm: float,
        comm_b: float,
        comp: float,
        more_bytes: float,
        step: BlockChoice,
        exposed: float = 0.0,
    ) -> Label:
        """The open stage with one more block. exposed: communication of both microbatches that nothing
        hides."""
        late, late_b = max(0.0, comm - self.slack), max(0.0, comm_b - self.slack_b)
        return Label(
            self.front + late + late_b + exposed,
            max(0.0, self.slack - comm),
            max(0.0, self.slack_b - comm_b),
            self.comm + comm,
            self.comm_b + comm_b,
            self.comp + comp,
            self.bytes + more_bytes,
            self,
            step,
        )


def dominates(a: Label, b: Label, with_memory: bool, tolerance: float = EPSILON) -> bool:
    """Is `a` at least as good as `b` whatever follows (up to a tolerance), both being in the same state?

    What follows costs `a` at most as much more as it has less slack and more communication in the open
    stage; a longer computation costs twice (that of the second microbatch comes, too), a shorter one gains
    at least what it hides less.
    """
    allowed = b.front + tolerance - a.front
    if allowed < 0 or (with_memory and a.bytes > b.bytes):
        return False
    # Without calls of max: this is where a search spends its time.
    if a.slack < b.slack:
        allowed -= b.slack - a.slack
    if a.slack_b < b.slack_b:
        allowed -= b.slack_b - a.slack_b
    if a.comm > b.comm:
        allowed -= a.comm - b.comm
    if a.comm_b > b.comm_b:
        allowed -= a.comm_b - b.comm_b
    if a.comp > b.comp:
        allowed -= 2 * (1 + BACKWARD) * (a.comp - b.comp)
    return allowed >= 0


def psi_of(stages: list[tuple[float, float]]) -> float:
    """Equation (5) for (communication, computation) of each stage."""
    total, last = 0.0, 0.0
    for comm, comp in stages:
        total += max(last, comm) + max(comm, comp)
        last = comp
    return total + last
