"""The signal protocol of an exchange, every interleaving: right as it is, and wrong in each way it could be.

`protocol_model.py` says which line of the kernels each step stands for. To read the shortest way to what
goes wrong in the broken variants: `pytest -s -k broken` and this file.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.grids import few_of
from tests.lancet_kernels.kernels.protocol.protocol_model import BROKEN, Config, admits, build
from tests.lancet_kernels.kernels.protocol.weak_memory import AWAITED, EACH, Result, explore

BY_TURNS = "F1 B1 F2 B2 F3 B3 F4 B4"
NESTED = "F1 F2 B2 B1 F3 F4 B4 B3"
THREE_BY_TURNS = "F1 B1 F2 B2 F3 B3"
THREE_NESTED = "F1 F2 B2 B1 F3 B3"

SHARED = {"banks": 2, "gradients": True, "gradient_banks": 1}  # one exchange for all backward passes

# The number of states is part of the test: a model that shrank without notice would prove less.
RIGHT = [
    (25_588, Config(THREE_BY_TURNS, landing=EACH)),
    (15_390, Config(THREE_NESTED, units=2, sparse=True, landing=EACH)),
    (18_138, Config(BY_TURNS)),
    (40_866, Config(BY_TURNS, units=3, sparse=True)),
    (9_990, Config(NESTED, units=2, sparse=True)),
    (13_911, Config(THREE_NESTED, programs=2, tiles=2)),
    (362, Config(BY_TURNS, units=3, landing=AWAITED)),
    (236, Config(NESTED, units=3, sparse=True, landing=AWAITED)),
    (746, Config(BY_TURNS, units=3, programs=3, sparse=True, landing=AWAITED)),
    (262, Config("F1 F2 F3 B3 B2 B1 F4 B4", banks=3, units=3, sparse=True, landing=AWAITED)),
    (215, Config(BY_TURNS, banks=1, units=3, sparse=True, landing=AWAITED)),
    (131, Config("F1 F2 B2 B1", **SHARED, landing=AWAITED)),
    (420, Config(NESTED, gradients=True, units=3, sparse=True, landing=AWAITED)),
    (7_550, Config(BY_TURNS, gradients=True, units=3, programs=2, landing=AWAITED)),
    (3_993, Config(NESTED, gradients=True, ranks=3, landing=AWAITED)),
    (2_317, Config(BY_TURNS, ranks=3, landing=AWAITED)),
    (2_903, Config(NESTED, ranks=3, units=2, landing=AWAITED)),
    (2_429, Config(NESTED, ranks=3, units=2, sparse=True, landing=AWAITED)),
    (9_023, Config(THREE_NESTED, ranks=3, programs=2, landing=AWAITED)),
]
RIGHT_LONG = [
    (116_332, Config(THREE_BY_TURNS, warps=2, landing=EACH)),
    (103_556, Config(BY_TURNS, units=2, tiles=2, sparse=True, programs=2)),
    (7_338, Config(NESTED, units=3, per_tile=4, sparse=True)),
    (14_725, Config(NESTED, units=3, tiles=2, programs=2, landing=AWAITED)),
    (10_407, Config(BY_TURNS, ranks=3, units=2, programs=2, sparse=True, landing=AWAITED)),
    (3_566, Config(NESTED, ranks=3, units=2, per_tile=3, tiles=2, landing=AWAITED)),
    (34_254, Config(NESTED, ranks=4, units=1, per_tile=3, landing=AWAITED)),
]

# What each mistake leads to, and in which system. Some need a program that goes on while another waits.
# Counts of a peer's next use say already that it is through with the one before; what a release alone makes
# safe is looked for where counts are not exchanged, in an exchange that backward passes share.
EARLY_READ, OVERWRITE, DEADLOCK = "read before arrival", "overwrite before release", "deadlock"
CAUGHT = {
    "no fence": (EARLY_READ, Config(THREE_NESTED, warps=2)),
    "relaxed signal": (EARLY_READ, Config(THREE_NESTED)),
    "relaxed counter": (EARLY_READ, Config(THREE_NESTED, tiles=2, programs=2)),
    "one bank": (OVERWRITE, Config("F1 F2 F3 B3 B2 B1", banks=3, gradients=True, gradient_banks=2)),
    "one released word": (
        "a word does not grow",
        Config("F1 F2 F3 B3 B2 B1", banks=3, gradients=True, gradient_banks=2, sparse=True, landing=AWAITED),
    ),
    "flag reset": (DEADLOCK, Config(THREE_NESTED)),
    "flag without epoch": (EARLY_READ, Config(THREE_NESTED)),
    "no wait for release": (OVERWRITE, Config("F1 F2 B2 B1", **SHARED)),
    "credit too late": (OVERWRITE, Config("F1 F2 B2 B1", **SHARED)),
    "release before the backward": (OVERWRITE, Config("F1 F2 B2 B1", **SHARED)),
    "release within the backward": (OVERWRITE, Config("F1 F2 B2 B1", **SHARED, programs=2)),
    "waits for one source only": (EARLY_READ, Config(THREE_NESTED)),
    "results before arrival": (OVERWRITE, Config("F1 F2 B2 B1", **SHARED, programs=2)),
    "counts not waited for": (EARLY_READ, Config(THREE_NESTED)),
    # Among rows that are expected elsewhere, or on top of another source's.
    "offsets of the last epoch": ((EARLY_READ, OVERWRITE), Config(THREE_NESTED, units=2, sparse=True)),
    "counter without epoch": (EARLY_READ, Config(THREE_BY_TURNS)),
    "counts without release": (OVERWRITE, Config("F1 B1 F2 B2", banks=1, units=0)),
    "two streams": (OVERWRITE, Config("F1 F2 B2 B1", programs=2)),
}


def name(config: Config) -> str:
    said = [config.stream.replace(" ", ""), config.landing]
    said += [
        f"{getattr(config, what)}{what}" for what in ("ranks", "units", "tiles", "programs", "warps", "banks")
    ]
    return "-".join([*said, *(["gradients"] * config.gradients), *(["sparse"] * config.sparse)])


def run(config: Config) -> Result:
    result = explore(build(config))
    print(f"\n{name(config)}: {result.states} states")
    if result.wrong:
        print(f"BROKEN: {config.broken}: {BROKEN.get(config.broken)}\n{result}")
    return result


@pytest.mark.parametrize(
    ("states", "config"), few_of(RIGHT, 1, 2, 11), ids=[name(config) for _, config in RIGHT]
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


# With every landing by itself these are 100,000 states and more.
LARGE = {
    "release within the backward",
    "results before arrival",
    "release before the backward",
    "one bank",
    "one released word",
}
LANDINGS = [(mistake, AWAITED) for mistake in CAUGHT] + [(m, EACH) for m in CAUGHT if m not in LARGE]


@pytest.mark.parametrize(("mistake", "landing"), LANDINGS)
def test_every_way_of_landing_finds_the_mistake(mistake: str, landing: str) -> None:
    """What `SIGNAL` and `AWAITED` leave out of `EACH` hides nothing."""
    expected, config = CAUGHT[mistake]
    system = build(replace(config, broken=mistake, landing=landing))
    if mistake in ("flag reset", "counter without epoch") and landing == AWAITED:
        with pytest.raises(ValueError, match="signals that land at any time"):
            explore(system)
    elif landing == AWAITED and mistake in (
        "flag without epoch",
        "one released word",
        "counts without release",
    ):
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
