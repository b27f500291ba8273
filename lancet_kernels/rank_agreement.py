"""Do all ranks have the same graph and the same plan before the first step?

Rank 0 decides, and its decision or its error is sent to every rank. A rank that differs is named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict

import torch.distributed as dist
from torch import fx

from lancet_kernels.captured_step import CapturedStep
from lancet_kernels.errors import UserError
from lancet_kernels.graph.from_fx import program_from_fx
from lancet_kernels.graph.program_json import fingerprint
from lancet_kernels.ops.groups import from_first_rank, group_of, group_rank, group_size
from lancet_kernels.ops.waiting import waiting
from lancet_kernels.schedules.plan import FusedGroup, Plan


def capture_alike(step: CapturedStep) -> tuple[fx.GraphModule, list[object]]:
    """The joint graph and example values of its inputs. Compares the graphs of all ranks before anything
    runs.

    Raises: CaptureError (this rank's), UserError naming the ranks with another graph or without one.
    """
    digest, refusal = "", None
    try:
        module, inputs = step.graph(), step.graph_inputs()
        tensors = [*step.model.named_parameters(), *step.model.named_buffers()]
        state = [(name, list(t.shape), str(t.dtype)) for name, t in tensors]
        # Each rank gets this of every rank, so a digest of it.
        digest = fingerprint(program_from_fx(module)) + hashlib.sha256(repr(state).encode()).hexdigest()
    except UserError as error:
        refusal = error
    fingerprints = values_of_ranks(step.groups.world, digest)
    if refusal is not None:
        raise refusal
    for others, what in (
        ([peer for peer, other in enumerate(fingerprints) if not other], "no graph"),
        ([peer for peer, other in enumerate(fingerprints) if other != fingerprints[0]], "another one"),
    ):
        if others:
            raise UserError(
                "training step across ranks",
                got=f"{what} on rank(s) {', '.join(map(str, others))}",
                expected=f"the graph of rank 0 on all {len(fingerprints)} ranks",
                do="give every rank the same model and the same input shapes",
            )
    return module, inputs


def plans_of_first_rank(group: str, make: Callable[[], list[Plan]]) -> list[Plan]:
    """The plans of rank 0 on every rank. Raises: UserError on all ranks if rank 0 has none."""
    plans = [
        Plan.from_json(data) for data in made_by_first_rank(group, lambda: [p.to_json() for p in make()])
    ]
    if len(set(values_of_ranks(group, tuple(plan.fingerprint for plan in plans)))) != 1:
        raise UserError(
            "plan across ranks",
            got="different plans",
            expected="the same plan on every rank",
            do="start all ranks with one version",
        )
    return plans


def fused_groups_of_first_rank(
    group: str, choose: Callable[[], tuple[FusedGroup, ...]]
) -> tuple[FusedGroup, ...]:
    """Which layers rank 0 fuses, on every rank. Raises: as `made_by_first_rank`."""
    chosen = made_by_first_rank(group, lambda: [asdict(group) for group in choose()])
    return tuple(FusedGroup(**{**data, "fillers": tuple(data["fillers"])}) for data in chosen)


def made_by_first_rank(group: str, make: Callable[[], list]) -> list:
    """The result of `make` on rank 0, on every rank. Raises: its error on rank 0, UserError with it on the
    others."""
    made: list | str = []
    failure: Exception | None = None
    if group_rank(group) == 0:
        try:
            made = make()
        except Exception as error:
            failure, made = error, f"{type(error).__name__}: {error}"
    # Also when it failed: the others wait for it.
    made = from_first_rank(made, group, "what rank 0 planned")
    if failure is not None:
        raise failure
    if isinstance(made, str):
        raise UserError("plan of rank 0", got=made, expected="a plan", do="see what rank 0 says")
    return made


def values_of_ranks(group: str, value: object) -> list:
    """The value of every rank of the group; only that of this process without a group."""
    if not group:
        return [value]
    values: list = [None] * group_size(group)
    process_group = group_of(group)
    with waiting("comparison of the ranks' graphs and plans", process_group):
        dist.all_gather_object(values, value, group=process_group)
    return values
