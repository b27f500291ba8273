"""The signal protocol of an exchange, every interleaving: right as it is, and wrong in each way it could be.

What this alone finds: rows, results, counts or words that are used again too early, in an order of events of
several passes that no seed has to draw.
`protocol_model.py` says which line of the kernels each step stands for. To read the shortest way to what
goes wrong in the broken variants: `pytest -s -k broken` and this file.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.grids import few_of
from tests.lancet_kernels.kernels.protocol.protocol_model import Config, build
from tests.lancet_kernels.kernels.protocol.weak_memory import Result, explore

BY_TURNS = "F1 B1 F2 B2 F3 B3 F4 B4"
NESTED = "F1 F2 B2 B1 F3 F4 B4 B3"
OUT_OF_ORDER = "F1 F2 B1 F3 B2 F4 F5 B3 B5 B4"
THREE_NESTED = "F1 F2 B2 B1 F3 B3"

# The number of states is part of the test: a model that shrank without notice would prove less.
RIGHT = [
    (149, Config(BY_TURNS, units=3)),
    (141, Config(NESTED, units=3, sparse=True)),
    (230, Config(BY_TURNS, units=3, programs=3, sparse=True)),
    (159, Config("F1 F2 F3 B3 B2 B1 F4 B4", units=3, sparse=True)),
    (171, Config(OUT_OF_ORDER, units=3, sparse=True)),
    # A backward that never comes stops nobody: its rows stay taken.
    (40, Config("F1 F2 B2 F3")),
    (305, Config(NESTED, gradients=True, units=3, sparse=True)),
    (5_861, Config(BY_TURNS, gradients=True, units=3, programs=2)),
    (2_735, Config(NESTED, gradients=True, ranks=3)),
    (801, Config(BY_TURNS, ranks=3)),
    (1_500, Config(NESTED, ranks=3, units=2, sparse=True)),
    (4_036, Config(THREE_NESTED, ranks=3, programs=2)),
    (3_150, Config(BY_TURNS, ranks=3, units=2, programs=2, sparse=True)),
    (23_793, Config(NESTED, ranks=4, units=1, per_tile=3)),
]

# What each mistake leads to, and in which system. Some need a program that goes on while another waits.
# Counts of a peer's next pass say already that it is through with the one before; what a release makes safe
# is looked for in the exchange of the backward passes, where counts are not exchanged.
EARLY_READ, OVERWRITE, BACK = "read before arrival", "overwrite before release", "a word does not grow"
FORWARD, BACKWARD = Config(THREE_NESTED), Config("F1 F2 B2 B1", gradients=True)
CAUGHT = {
    "relaxed signal": (EARLY_READ, FORWARD),
    # A pass takes rows that another one, whose backward is to come, has.
    "rows in one place": (OVERWRITE, FORWARD),
    # A flag says that rows came, not of which epoch.
    "flag without epoch": (BACK, FORWARD),
    "no wait for release": (OVERWRITE, BACKWARD),
    # They wait for the release of epoch e - 2, not e - 1.
    "credit too late": (OVERWRITE, BACKWARD),
    "release before the backward": (OVERWRITE, BACKWARD),
    # By a task of the same launch, while another program still reads.
    "release within the backward": (OVERWRITE, replace(BACKWARD, programs=2)),
    "waits for one source only": (EARLY_READ, FORWARD),
    "results before arrival": (OVERWRITE, replace(BACKWARD, programs=2)),
    "counts not waited for": (EARLY_READ, FORWARD),
    # Rows are put where the counts of the epoch before would have them: among rows that are expected
    # elsewhere, or on top of another source's.
    "offsets of the last epoch": ((EARLY_READ, OVERWRITE), Config(THREE_NESTED, units=2, sparse=True)),
    # Counts are put where the peer may still read those of the epoch before.
    "counts in one place": (BACK, Config("F1 B1 F2 B2", units=0)),
    # A PE says where it has room before the backward that makes it has run.
    "counts ahead": (OVERWRITE, Config("F1 B1 F2 B2 F3 B3")),
    # A pass is launched beside another one, which still reads the results that both have.
    "two streams": (OVERWRITE, Config("F1 F2 B2 B1", programs=2)),
}


def run(config: Config) -> Result:
    result = explore(build(config))
    print(f"\n{config}\n{result}")
    return result


@pytest.mark.parametrize(("states", "config"), few_of(RIGHT, 0, 2, 4, 6, 9))
def test_nothing_goes_wrong(states: int, config: Config) -> None:
    assert str(run(config)) == f"{states} states"


@pytest.mark.parametrize("mistake", CAUGHT)
def test_broken_is_caught(mistake: str) -> None:
    expected, config = CAUGHT[mistake]
    assert not run(config).wrong
    result = run(replace(config, broken=mistake))
    assert result.wrong.startswith(expected)
    assert any(line.startswith("PE ") for line in result.steps)


def orders(epochs: int) -> Iterator[str]:
    """Every order of passes in which forwards count up and each backward comes after its forward."""

    def extend(done: list[str], started: int, open_epochs: frozenset[int]) -> Iterator[str]:
        if started == epochs and not open_epochs:
            yield " ".join(done)
        if started < epochs:
            yield from extend([*done, f"F{started + 1}"], started + 1, open_epochs | {started + 1})
        for epoch in sorted(open_epochs):
            yield from extend([*done, f"B{epoch}"], started, open_epochs - {epoch})

    yield from extend([], 0, frozenset())


def test_passes_may_end_in_any_order() -> None:
    verdicts = {
        order: explore(build(Config(order, units=2, sparse=True, gradients=True))).wrong
        for order in orders(4)
    }
    assert len(verdicts) == 105
    assert not any(verdicts.values()), verdicts
