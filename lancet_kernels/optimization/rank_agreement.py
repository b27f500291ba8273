"""Makes sure that all ranks have the same graph and the same plan before the first step.

Rank 0 plans, and sends its plan, or its error, to all ranks. If graphs differ, the error names the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from lancet_kernels.errors import UserError
from lancet_kernels.ops.comm.groups import from_first_rank, group_rank, values_of_ranks
from lancet_kernels.schedules.plan import Plan

Value = TypeVar("Value")
_COMPARISON = "comparison of the ranks' graphs and plans"


def alike(make: Callable[[], tuple[Value, str]], group: str, what: str, do: str) -> Value:
    """What `make` gives beside a digest, which has to be the same on all ranks. Collective.

    Args: what: it gives. do: the advice.
    Raises: the UserError of `make` on this rank; UserError that names the ranks with another digest, or none.
    """
    value, refusal, digest = None, None, ""
    try:
        value, digest = make()
    except UserError as error:
        refusal = error
    digests = values_of_ranks(digest, group, _COMPARISON)
    if refusal is not None:
        raise refusal
    for others, got in (
        ([rank for rank, other in enumerate(digests) if not other], "no graph"),
        ([rank for rank, other in enumerate(digests) if other != digests[0]], "another one"),
    ):
        if others:
            raise UserError(
                f"{what} across ranks",
                got=f"{got} on rank(s) {', '.join(map(str, others))}",
                expected=f"the graph of rank 0 on all {len(digests)} ranks",
                do=do,
            )
    return cast("Value", value)


def plans_of_first_rank(group: str, make: Callable[[], list[Plan]]) -> list[Plan]:
    """The plans of rank 0, on every rank. Raises: UserError on all ranks if rank 0 failed."""
    plans = result_of_first_rank(group, make)
    if len(set(values_of_ranks(tuple(plan.fingerprint for plan in plans), group, _COMPARISON))) != 1:
        raise UserError(
            "plan across ranks",
            got="different plans",
            expected="the same plan on every rank",
            do="start all ranks with one version",
        )
    return plans


def result_of_first_rank(group: str, make: Callable[[], Value]) -> Value:
    """The result of `make` on rank 0, on every rank. Raises: the error of `make` on rank 0; on the others the
    same if it is a UserError, else a UserError with its text."""
    result, message = None, None
    failure: Exception | None = None
    if group_rank(group) == 0:
        try:
            result = make()
        except UserError as error:
            failure, message = error, (error.what, str(error.got), str(error.expected), error.do)
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
            failure, message = error, ("plan of rank 0", got, "a plan", "report it")
    # Also after an error, because the other ranks wait.
    result, message = from_first_rank((result, message), group, "what rank 0 planned")
    if failure is not None:
        raise failure
    if message is not None:
        what, got, expected, do = message
        raise UserError(what, got=got, expected=expected, do=do)
    return cast("Value", result)
