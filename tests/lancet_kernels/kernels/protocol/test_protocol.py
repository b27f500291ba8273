"""The signal protocol of an exchange, every interleaving: right as it is, and wrong in each way it could be.

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
THREE_BY_TURNS = "F1 B1 F2 B2 F3 B3"
THREE_NESTED = "F1 F2 B2 B1 F3 B3"

SHARED = {"gradients": True}  # one exchange for all backward passes

# The number of states is part of the test: a model that shrank without notice would prove less.
RIGHT = [
    (12_532, Config(BY_TURNS, units=3, sparse=True)),
    (2_714, Config(NESTED, units=2, sparse=True)),
    (9_313, Config(THREE_NESTED, programs=2, tiles=2)),
    (6_826, Config(THREE_BY_TURNS, warps=2)),
    # A backward that never comes stops nobody: its rows stay taken.
    (1046, Config("F1 F2 B2 F3")),
    (149, Config(BY_TURNS, units=3, awaited=True)),
    (141, Config(NESTED, units=3, sparse=True, awaited=True)),
    (230, Config(BY_TURNS, units=3, programs=3, sparse=True, awaited=True)),
    (159, Config("F1 F2 F3 B3 B2 B1 F4 B4", units=3, sparse=True, awaited=True)),
    (171, Config(OUT_OF_ORDER, units=3, sparse=True, awaited=True)),
    (95, Config("F1 F2 B2 B1", **SHARED, awaited=True)),
    (305, Config(NESTED, gradients=True, units=3, sparse=True, awaited=True)),
    (5_861, Config(BY_TURNS, gradients=True, units=3, programs=2, awaited=True)),
    (2_735, Config(NESTED, gradients=True, ranks=3, awaited=True)),
    (801, Config(BY_TURNS, ranks=3, awaited=True)),
    (1_641, Config(NESTED, ranks=3, units=2, awaited=True)),
    (1_500, Config(NESTED, ranks=3, units=2, sparse=True, awaited=True)),
    (4_036, Config(THREE_NESTED, ranks=3, programs=2, awaited=True)),
    (49_944, Config(BY_TURNS, units=2, tiles=2, sparse=True, programs=2)),
    (4_643, Config(NESTED, units=3, per_tile=4, sparse=True)),
    (4_177, Config(NESTED, units=3, tiles=2, programs=2, awaited=True)),
    (3_150, Config(BY_TURNS, ranks=3, units=2, programs=2, sparse=True, awaited=True)),
    (1_621, Config(NESTED, ranks=3, units=2, per_tile=3, tiles=2, awaited=True)),
    (18_601, Config(THREE_NESTED, units=2, parts=True)),
    (32_915, Config(THREE_NESTED, units=2, parts=True, programs=2)),
    (188, Config(NESTED, units=3, per_tile=4, parts=True, sparse=True, programs=2, awaited=True)),
    (6_533, Config(NESTED, gradients=True, units=2, parts=True, programs=2, awaited=True)),
    (689, Config(BY_TURNS, ranks=3, units=2, per_tile=3, parts=True, awaited=True)),
    (23_793, Config(NESTED, ranks=4, units=1, per_tile=3, awaited=True)),
]

# What each mistake leads to, and in which system. Some need a program that goes on while another waits.
# Counts of a peer's next pass say already that it is through with the one before; what a release makes safe
# is looked for in the exchange of the backward passes, where counts are not exchanged.
EARLY_READ, OVERWRITE, DEADLOCK = "read before arrival", "overwrite before release", "deadlock"
CAUGHT = {
    "no fence": (EARLY_READ, Config(THREE_NESTED, warps=2)),
    "relaxed signal": (EARLY_READ, Config(THREE_NESTED)),
    # The columns of a tile count themselves without publishing what they stored.
    "relaxed counter": (EARLY_READ, Config(THREE_NESTED, tiles=2, programs=2)),
    "relaxed counter of parts": (EARLY_READ, Config(THREE_NESTED, units=2, parts=True)),
    # A pass takes rows that another one, whose backward is to come, has.
    "rows in one place": (OVERWRITE, Config(THREE_NESTED)),
    "flag reset": (DEADLOCK, Config(THREE_NESTED)),
    # A flag says that rows came, not of which epoch.
    "flag without epoch": (EARLY_READ, Config(THREE_NESTED)),
    "no wait for release": (OVERWRITE, Config("F1 F2 B2 B1", **SHARED)),
    # They wait for the release of epoch e - 2, not e - 1.
    "credit too late": (OVERWRITE, Config("F1 F2 B2 B1", **SHARED)),
    "release before the backward": (OVERWRITE, Config("F1 F2 B2 B1", **SHARED)),
    # By a task of the same launch, while another program still reads.
    "release within the backward": (OVERWRITE, Config("F1 F2 B2 B1", **SHARED, programs=2)),
    "waits for one source only": (EARLY_READ, Config(THREE_NESTED)),
    "results before arrival": (OVERWRITE, Config("F1 F2 B2 B1", **SHARED, programs=2)),
    "counts not waited for": (EARLY_READ, Config(THREE_NESTED)),
    # Rows are put where the counts of the epoch before would have them: among rows that are expected
    # elsewhere, or on top of another source's.
    "offsets of the last epoch": ((EARLY_READ, OVERWRITE), Config(THREE_NESTED, units=2, sparse=True)),
    # The sources of a tile add up in one word that nobody sets back.
    "counter without epoch": (EARLY_READ, Config(THREE_BY_TURNS)),
    # Counts are put where the peer may still read those of the epoch before.
    "counts in one place": (OVERWRITE, Config("F1 B1 F2 B2", units=0)),
    # A PE says where it has room before the backward that makes it has run.
    "counts ahead": (OVERWRITE, Config(THREE_BY_TURNS)),
    # A pass is launched beside another one, which still reads the results that both have.
    "two streams": (OVERWRITE, Config("F1 F2 B2 B1", programs=2)),
}


def name(config: Config) -> str:
    said = [config.stream.replace(" ", "")]
    said += [f"{getattr(config, what)}{what}" for what in ("ranks", "units", "tiles", "programs", "warps")]
    said += [what for what in ("parts", "gradients", "sparse", "awaited") if getattr(config, what)]
    return "-".join(said)


def run(config: Config) -> Result:
    result = explore(build(config))
    print(f"\n{name(config)}: {result.states} states")
    if result.wrong:
        print(f"BROKEN: {config.broken}\n{result}")
    return result


@pytest.mark.parametrize(
    ("states", "config"), few_of(RIGHT, 1, 4, 5, 10), ids=[name(config) for _, config in RIGHT]
)
def test_nothing_goes_wrong(states: int, config: Config) -> None:
    result = run(config)
    assert not result.wrong, str(result)
    assert result.states == states


@pytest.mark.parametrize("awaited", [False, True], ids=["", "awaited"])
@pytest.mark.parametrize("mistake", CAUGHT)
def test_broken_is_caught(mistake: str, awaited: bool) -> None:
    """What `awaited` leaves out hides nothing."""
    expected, config = CAUGHT[mistake]
    assert not explore(build(replace(config, awaited=True))).wrong
    config = replace(config, broken=mistake, awaited=awaited)
    if awaited and mistake in ("flag reset", "counter without epoch"):
        with pytest.raises(ValueError, match="signals that land at any time"):
            run(config)
        return
    if awaited and mistake in ("flag without epoch", "counts in one place"):
        expected = "a word does not grow from signal to signal"
    result = run(config)
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


@pytest.mark.parametrize("gradients", [False, True], ids=["", "gradients"])
def test_passes_may_end_in_any_order(gradients: bool) -> None:
    verdicts = {
        order: explore(build(Config(order, units=2, sparse=True, gradients=gradients, awaited=True))).wrong
        for order in orders(4)
    }
    assert len(verdicts) == 105
    assert not any(verdicts.values()), verdicts
