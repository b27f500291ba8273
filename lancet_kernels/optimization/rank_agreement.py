"""Makes all ranks run the same collectives in the same order.

Otherwise gloo ends the process, and NCCL hangs. So whatever changes that order is decided by rank 0, by all
ranks together, or from state that all ranks share:

    decision                                 by
    arguments of optimize(), left out passes compared (`check_settings`): an error that names them
    the graph, parameters                    compared (`alike`): an error that names the ranks
    measure again, or use stored times       rank 0 reads the file (`graph.costs.profiler`); later figures are
                                             means, medians or maxima over all ranks
    a plan of the cache, a stale one, a new  rank 0 (`result_of_first_rank`), also fused launches or streams,
    one; the order of a pair                 and its error is that of all ranks
    the plans of each strategy for `auto`    the ranks that plan them, each for all (`results_of_ranks`)
    which plan after trials, none, in pairs  the times of the slowest rank in each round (`trial`)
    with the plan or without it: a mode, a   all ranks before the call (`CallAgreement`): if one cannot run
    setting, a dtype, a batch of no tokens,  the plan, none does; not asked where only gradients are summed,
    a graph with other instructions          as those sums are the same with the plan and without it
    microbatches in pairs or one by one      all ranks before the first of them (`CallAgreement`)
    inputs of another shape                  each rank: its collectives are those of the plan
    captured shapes that are dropped         each rank: no collectives
    compare parameters in this call          the number of calls, which is the same by the above
    gradients that the plan does not sum     each rank, on separate communicators: a rank that stays away is
                                             named after the timeout
    number of microbatches, no_sync,         the caller: compared before the call (`CallAgreement`)
    gradients on or off
    a rank that ends or raises               nobody: waits are bounded, and name it (`ops.comm.waiting`)

Collectives outside of optimized modules are compared with LANCET_CHECK=1 (`ops.comm.checked`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from lancet_kernels.errors import UserError
from lancet_kernels.ops.comm.groups import (
    from_rank,
    group_of,
    group_rank,
    group_size,
    host_group,
    is_of_processes,
    values_of_ranks,
)
from lancet_kernels.ops.comm.waiting import waiting
from lancet_kernels.schedules.rewrite.walk import WITHOUT_PASSES

Value = TypeVar("Value")
_COMPARISON = "comparison of the ranks' graphs and plans"
_MESSAGE_BYTES = 512


def alike(
    make: Callable[[], Value], digest_of: Callable[[Value], str], group: str, what: str, do: str
) -> Value:
    """The result of `make`, whose digest has to be the same on all ranks. Collective.

    Args: what, do: for the message.
    Raises: the UserError of `make` on this rank; UserError that names the ranks with another digest, or none.
    """
    value, refusal, digest = None, None, ""
    try:
        value = make()
        digest = digest_of(value)
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


def result_of_first_rank(group: str, make: Callable[[], Value]) -> Value:
    """The result of `make` on rank 0, on every rank. Collective. Raises: as `results_of_ranks`."""
    return results_of_ranks(group, [make])[0]


def results_of_ranks(group: str, makes: Sequence[Callable[[], Value]]) -> list[Value]:
    """The result of each of `makes`, on every rank; they are distributed over the ranks in turn. Collective.

    Raises: the first error on the rank that ran into it; on the others the same if it is a UserError, else a
    UserError with its text.
    """
    # Ranks that are only stood in for run nothing.
    size = group_size(group) if group and is_of_processes(group_of(group)) else 1
    rank = group_rank(group)
    own: dict[int, Value | UserError] = {}
    failure: Exception | None = None
    for number in (n for n in range(len(makes)) if n % size == rank):
        try:
            own[number] = makes[number]()
        except UserError as error:
            failure = own[number] = error
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
            failure = error
            own[number] = UserError(f"plan of rank {rank}", got=got, expected="a plan", do="report it")
        if failure is not None:
            break
    # Also after an error, because the other ranks wait.
    sent = [from_rank(n % size, own.get(n), group, "what was planned") for n in range(len(makes))]
    if failure is not None:
        raise failure
    for result in sent:
        if isinstance(result, UserError):
            raise result
    return cast("list[Value]", sent)


def check_settings(group: str, settings: Mapping[str, object]) -> None:
    """Raise UserError on all ranks unless they have called `optimize` alike. Collective."""
    own = {**settings, WITHOUT_PASSES: os.environ.get(WITHOUT_PASSES, "")}
    by_rank = values_of_ranks(own, group, _COMPARISON)
    for name in own:
        values = [settings[name] for settings in by_rank]
        if (other := next((r for r, value in enumerate(values) if value != values[0]), 0)) > 0:
            raise UserError(
                "optimize() across ranks",
                got=f"{name}={values[0]!r} on rank 0 and {values[other]!r} on rank {other}",
                expected="the same on every rank",
                do="call it alike on all ranks",
            )


class CallAgreement:
    """An agreement of all ranks before the first collective of a call of an optimized module: 512 bytes from
    each rank to all others, over the hosts.

    Args: group: the ranks; "": nothing is to be agreed on. name: of the module, for messages. Collective.
    """

    def __init__(self, group: str, name: str) -> None:
        self._group, self._name = host_group(group), name

    def way(self, call: str, own_way: Callable[[], Value | str]) -> Value | str:
        """The result of `own_way`; if any rank's is a reason (str) not to run the plan, a reason on all.

        Args: call: in words, the same on all ranks. Collective.
        Raises: the UserError of `own_way`, and on the other ranks one that names this rank; UserError if
            `call` differs.
        """
        if not self._group or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return own_way()
        refusal, way, own_reason = None, cast("Value | str", ""), ""
        try:
            way = own_way()
            own_reason = way if isinstance(way, str) else ""
        except UserError as error:
            refusal, own_reason = error, str(error)
        own = "\n".join([call, "refuses" if refusal else "", *own_reason.splitlines()[:1], ""])
        by_rank = self._gathered(own)
        if refusal is not None:
            raise refusal
        self._compare([call for call, *_ in by_rank])
        for rank, (_, refuses, reason, *_) in enumerate(by_rank):
            if refuses:
                raise self._error(f"an error on rank {rank}: {reason}", "none", "mend it there")
        reasons = [(rank, reason) for rank, (_, _, reason, *_) in enumerate(by_rank) if reason]
        return f"rank {reasons[0][0]}: {reasons[0][1]}" if reasons and not own_reason else way

    def _compare(self, calls: list[str]) -> None:
        ranks: dict[str, list[str]] = {}
        for rank, call in enumerate(calls):
            ranks.setdefault(call, []).append(str(rank))
        if len(ranks) > 1:
            got = " and ".join(f"{call} on rank(s) {', '.join(r)}" for call, r in ranks.items())
            raise self._error(got, "the same on every rank", "let all ranks do the same")

    def _error(self, got: str, expected: str, do: str) -> UserError:
        return UserError(f"{self._name} across ranks", got=got, expected=expected, do=do)

    def _gathered(self, text: str) -> list[list[str]]:
        """The lines of the texts of all ranks."""
        encoded = text.encode()[: _MESSAGE_BYTES - 4].ljust(_MESSAGE_BYTES, b"\0")
        own = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        rows = own.new_empty(group_size(self._group), _MESSAGE_BYTES)
        with waiting(f"agreement on a call of {self._name}", group_of(self._group)):
            dist.all_gather(list(rows), own, group=group_of(self._group))
        texts = (row.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for row in rows)
        return [text.split("\n") for text in texts]
