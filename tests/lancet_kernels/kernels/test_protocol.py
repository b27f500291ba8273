"""The signal protocol of an exchange, every interleaving: right as it is, and wrong in each way it could be.

`protocol_model.py` says which line of the kernels each step stands for. To read the shortest way to what
goes wrong in the broken variants: `pytest -s -k broken tests/lancet_kernels/kernels/test_protocol.py`.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.grids import few_of
from tests.lancet_kernels.kernels.protocol_model import BROKEN, Config, admits, build
from tests.lancet_kernels.kernels.weak_memory import AWAITED, EACH, Result, explore

BY_TURNS = "F1 B1 F2 B2 F3 B3 F4 B4"
NESTED = "F1 F2 B2 B1 F3 F4 B4 B3"
THREE_BY_TURNS = "F1 B1 F2 B2 F3 B3"
THREE_NESTED = "F1 F2 B2 B1 F3 B3"

# The number of states is part of the test: a model that shrank without notice would prove less.
RIGHT = [
    (51_559, Config(THREE_BY_TURNS, landing=EACH)),
    (26_226, Config(THREE_NESTED, landing=EACH)),
    (24_141, Config(BY_TURNS)),
    (125_155, Config(BY_TURNS, chunks=2, sparse=True)),
    (25_774, Config(NESTED, chunks=2, sparse=True)),
    (51_577, Config(THREE_NESTED, programs=2, tiles=2)),
    (447, Config(BY_TURNS, chunks=2, landing=AWAITED)),
    (393, Config(NESTED, chunks=2, landing=AWAITED)),
    (4_779, Config(BY_TURNS, chunks=2, programs=3, sparse=True, landing=AWAITED)),
    (185, Config("F1 F2 F3 B3 B2 B1 F4 B4", banks=3, landing=AWAITED)),
    (789, Config(NESTED, gradients=True, chunks=2, sparse=True, landing=AWAITED)),
    (11_285, Config(BY_TURNS, gradients=True, chunks=2, programs=2, landing=AWAITED)),
    (5_124, Config(NESTED, gradients=True, ranks=3, landing=AWAITED)),
    (3_245, Config(BY_TURNS, ranks=3, landing=AWAITED)),
    (8_942, Config(NESTED, ranks=3, chunks=2, landing=AWAITED)),
    (7_434, Config(NESTED, ranks=3, chunks=2, sparse=True, landing=AWAITED)),
    (17_887, Config(THREE_NESTED, ranks=3, programs=2, landing=AWAITED)),
]
RIGHT_LONG = [
    (308_759, Config(THREE_BY_TURNS, warps=2, landing=EACH)),
    (814_205, Config(BY_TURNS, chunks=2)),
    (296_746, Config(NESTED, chunks=2)),
    (196_229, Config(NESTED, chunks=2, tiles=2, programs=2, landing=AWAITED)),
    (95_860, Config(THREE_BY_TURNS, programs=2, tiles=2)),
    (390_947, Config(BY_TURNS, ranks=3, chunks=2, programs=2, sparse=True, landing=AWAITED)),
    (39_902, Config(NESTED, ranks=3, chunks=2, tiles=2, landing=AWAITED)),
    (41_933, Config(NESTED, ranks=4, landing=AWAITED)),
]

# What each mistake leads to, and in which system. Some need a program that goes on while another waits.
EARLY_READ, OVERWRITE, DEADLOCK = "read before arrival", "overwrite before release", "deadlock"
CAUGHT = {
    "no fence": (EARLY_READ, Config(THREE_NESTED, warps=2)),
    "relaxed signal": (EARLY_READ, Config(THREE_NESTED)),
    "relaxed counter": (EARLY_READ, Config(THREE_NESTED, tiles=2, programs=2)),
    "one bank": (OVERWRITE, Config(THREE_BY_TURNS)),
    "one released word": (OVERWRITE, Config(THREE_NESTED)),
    "flag reset": (DEADLOCK, Config(THREE_NESTED)),
    "flag without epoch": (EARLY_READ, Config(THREE_NESTED)),
    "no wait for release": (OVERWRITE, Config(THREE_NESTED)),
    "credit too late": (OVERWRITE, Config(THREE_NESTED)),
    "release before the backward": (OVERWRITE, Config(THREE_NESTED)),
    "release within the backward": (OVERWRITE, Config(THREE_NESTED, programs=2)),
    "empty is not signalled": (DEADLOCK, Config(THREE_NESTED, sparse=True)),
    "waits for chunk 0 only": (EARLY_READ, Config(THREE_NESTED, chunks=2)),
    "results before arrival": (OVERWRITE, Config(THREE_NESTED, programs=3)),
}


def name(config: Config) -> str:
    said = [config.stream.replace(" ", ""), config.landing]
    said += [f"{getattr(config, what)}{what}" for what in ("ranks", "chunks", "tiles", "programs", "warps")]
    return "-".join([*said, *(["gradients"] * config.gradients), *(["sparse"] * config.sparse)])


def run(config: Config) -> Result:
    result = explore(build(config))
    print(f"\n{name(config)}: {result.states} states")
    if result.wrong:
        print(f"BROKEN: {config.broken}: {BROKEN.get(config.broken)}\n{result}")
    return result


@pytest.mark.parametrize(
    ("states", "config"), few_of(RIGHT, 0, 1, 2), ids=[name(config) for _, config in RIGHT]
)
def test_nothing_goes_wrong(states: int, config: Config) -> None:
    result = run(config)
    assert not result.wrong, str(result)
    assert result.states == states


@pytest.mark.long
@pytest.mark.parametrize(("states", "config"), RIGHT_LONG, ids=[name(config) for _, config in RIGHT_LONG])
def test_nothing_goes_wrong_in_larger_systems(states: int, config: Config) -> None:
    test_nothing_goes_wrong(states, config)


def test_every_mistake_is_looked_for() -> None:
    assert CAUGHT.keys() == BROKEN.keys()


@pytest.mark.parametrize("mistake", CAUGHT)
def test_broken_is_caught(mistake: str) -> None:
    expected, config = CAUGHT[mistake]
    assert not explore(build(replace(config, landing=AWAITED))).wrong
    result = run(replace(config, broken=mistake))
    assert result.wrong.startswith(expected)
    assert any(line.startswith("PE ") for line in result.steps)


# 181,001 states with every landing by itself.
LARGE = {"results before arrival"}


@pytest.mark.parametrize("landing", few_of([EACH, AWAITED]))
@pytest.mark.parametrize(
    "mistake", [pytest.param(key, marks=pytest.mark.long) if key in LARGE else key for key in CAUGHT]
)
def test_every_way_of_landing_finds_the_mistake(mistake: str, landing: str) -> None:
    """What `SIGNAL` and `AWAITED` leave out of `EACH` hides nothing."""
    expected, config = CAUGHT[mistake]
    system = build(replace(config, broken=mistake, landing=landing))
    if mistake == "flag reset" and landing == AWAITED:
        with pytest.raises(ValueError, match="resets words"):
            explore(system)
    elif landing == AWAITED and mistake in ("flag without epoch", "one released word"):
        assert "does not grow" in explore(system).wrong
    else:
        assert explore(system).wrong.startswith(expected)


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
@pytest.mark.parametrize("banks", [2, 3])
def test_host_refuses_exactly_the_orders_that_would_hang(banks: int, gradients: bool) -> None:
    verdicts = {
        order: explore(build(Config(order, banks=banks, gradients=gradients, landing=AWAITED))).wrong
        for order in orders(4)
    }
    assert len(verdicts) == 105
    for order, wrong in verdicts.items():
        assert wrong.startswith("deadlock") != admits(order, banks), order
        assert bool(wrong) != admits(order, banks), order


def test_counting_open_passes_would_not_do() -> None:
    """Only one pass is open when F3 comes, but it holds the bank that F3 takes, and its B1 is behind F3."""
    order = "F1 F2 B2 F3 B3 B1"
    assert not admits(order, banks=2)
    assert run(Config(order)).wrong.startswith("deadlock")


@pytest.mark.parametrize("order", [BY_TURNS, NESTED])
def test_no_word_runs_ahead_of_a_wait(order: str) -> None:
    """Waits for equality would end too: while a PE waits for an epoch, no peer is further in that word."""
    assert not explore(build(Config(order, sparse=True, exact=True))).wrong


def test_a_backward_that_never_comes_keeps_its_bank() -> None:
    """Why a pass without backward (no_grad, a dropped graph) must release too."""
    assert run(Config("F1 F2 B2 F3")).wrong.startswith("deadlock")
