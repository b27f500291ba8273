"""Runs set-ups on two ranks, and makes those that fail smaller."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, replace

from tests.generated_setups.describe import Block, Loop, Setup
from tests.generated_setups.train import Outcome, run_setup
from tests.ranks import RankError, RankPool

RANKS = 2
TIMEOUT_S = 120.0


def outcome_on_ranks(pool: RankPool, setup: Setup) -> Outcome:
    """One set-up, in a process group of its own, so that it cannot disturb the next."""
    try:
        # A rank that fails returns at once; its peer finds that out in the next collective.
        found = pool.run(run_setup, setup, ranks=RANKS, timeout_s=TIMEOUT_S, leave_together=False)
    except RankError as error:
        return Outcome("failed", f"hangs or dies: {str(error).splitlines()[-1]}")
    kinds = {outcome.kind for outcome in found}
    if kinds == {"right"}:
        return replace(found[0], fallbacks=sorted({reason for one in found for reason in one.fallbacks}))
    if kinds == {"refused"}:
        return found[0]
    # What a rank says whose peer has gone is not the cause.
    found.sort(key=lambda one: (one.kind != "failed", "CommunicationError" in one.why, "gloo" in one.why))
    if len(kinds) == 1:
        return found[0]
    return replace(found[0], kind="failed", why="; ".join(f"a rank {one.kind}: {one.why}" for one in found))


def smaller(setup: Setup) -> Iterator[Setup]:
    """Simpler set-ups, the simplest first: without a block, or with one setting as it is by default."""
    for number in range(len(setup.blocks)):
        if (fewer := _without(setup, number)) is not None:
            yield fewer
    for name in setup.loop.differences():
        default = getattr(Loop(), name)
        loop = replace(setup.loop, **{name: default})
        yield replace(setup, loop=replace(loop, one_rank=False) if name == "change" else loop)
    for name in setup.differences():
        if name not in ("blocks", "loop"):
            plainer = "none" if name == "strategy" else getattr(Setup(), name)
            if plainer != getattr(setup, name) and (name != "tokens" or not setup.tied):
                yield replace(setup, **{name: plainer})
    if setup.strategy != "none":
        yield replace(setup, strategy="none")
    for number, block in enumerate(setup.blocks):
        for name in block.differences():
            if name not in ("kind", "variant"):
                simpler = replace(block, **{name: _default(block, name)})
                if simpler != block and _consistent(simpler):
                    yield replace(
                        setup, blocks=(*setup.blocks[:number], simpler, *setup.blocks[number + 1 :])
                    )


def _default(block: Block, name: str) -> object:
    return next(f.default for f in fields(Block) if f.name == name)


def _consistent(block: Block) -> bool:
    return (block.shared == "weight" or block.same_as >= 0) and (
        block.gate != "expert-choice" or block.capacity is not None
    )


def _without(setup: Setup, number: int) -> Setup | None:
    """Without a block; None if another one or the change needs it."""
    if len(setup.blocks) == 1:
        return None
    if any(b.same_as == number for b in setup.blocks):
        return None
    if setup.loop.change and setup.loop.change_block == number:
        return None
    blocks = [replace(b, same_as=b.same_as - (b.same_as > number)) for b in setup.blocks]
    del blocks[number]
    at = setup.loop.change_block
    return replace(setup, blocks=tuple(blocks), loop=replace(setup.loop, change_block=at - (at > number)))


def smallest(pool: RankPool, setup: Setup, failing: Outcome) -> tuple[Setup, Outcome]:
    """The simplest set-up on the way from this one that fails alike, and how it fails."""
    words = signature(failing)
    for candidate in smaller(setup):
        found = outcome_on_ranks(pool, candidate)
        if found.kind == "failed" and signature(found) == words:
            return smallest(pool, candidate, found)
    return setup, failing


def signature(outcome: Outcome) -> str:
    """What failures of one kind have in common: an error's message without its numbers, or what is wrong with
    which sort of tensor."""
    words = re.sub(r"step \d+: |blocks\.[\w.]+|[\d.]+(e-?\d+)?", "", outcome.why)
    return " ".join(words.split())[:120]
