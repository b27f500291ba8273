"""What became of a set-up on all ranks of a job."""

from __future__ import annotations

from tests.generated_setups.describe import Setup
from tests.generated_setups.train import Outcome, run_setup
from tests.ranks import RankError, RankPool

BUSY = {"timeout_s": 600.0, "collective_timeout_s": 120.0}
"""Limits for a machine that may be busy."""


def end_of(pool: RankPool, setup: Setup) -> Outcome:
    """The outcome of all ranks together.

    "right": it trains as the plain module on all of them. "refused": all say why, but those that lost a rank
    which does. "without its plan": right, but a step had none.
    """
    try:
        # A rank that fails returns at once; its peer finds that out in the next collective.
        outcomes = pool.run(run_setup, setup, ranks=setup.ranks, leave_together=False, **BUSY)
    except RankError as error:
        return Outcome("failed", f"hangs or dies: {str(error).splitlines()[-1]}")
    kinds = {outcome.kind for outcome in outcomes}
    if kinds == {"right"}:
        why = next((one.why for one in outcomes if one.why), "")
        return Outcome("without its plan" if why else "right", why)
    if kinds <= {"refused", "lost a rank"} and "refused" in kinds:
        return next(one for one in outcomes if one.kind == "refused")
    # What a rank says whose peer has gone is not the cause.
    outcomes.sort(key=lambda one: (one.kind != "failed", one.kind == "lost a rank", "gloo" in one.why))
    return Outcome("failed", "; ".join(f"a rank {one.kind}: {one.why} ({one.where})" for one in outcomes))
