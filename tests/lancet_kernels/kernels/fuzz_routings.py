"""Fused passes of random routings, sizes and delays: do all finish, with every row where it belongs?

    TRITON_INTERPRET=1 python -m tests.lancet_kernels.kernels.fuzz_routings --ranks 2 --passes 5000

Every pass has its own numbers of tokens on each rank (0 to 6), routing, capacity and grid; every fifth one
has a backward. Tiles have 4 rows, so that segments lie in several tiles, and tiles hold rows of several
sources; groups have 2 tiles. Up to three passes are open at once, and end in any order. Naps fall before
passes, between tasks and before releases; nothing else keeps ranks in step.

Inputs are small integers, and values before the activation multiples of 16, where gelu is exactly relu: all
sums are exact in float32 in any order, so that every result has one right value, which float64 gives.

What this alone finds: what is wrong for some counts, with the kernels as they are, between processes. A pass
is wrong if a row is missing or differs in a bit from its source's, if anything was written where no open pass
has rows or beside a buffer, or if out or a gradient differs from the right value. Rows and results are looked
at, and poisoned, before they are given back. A pass hangs if a wait runs out of time.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from unittest import mock

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from lancet_kernels.kernels.config import GemmConfig, OverlapConfig
from lancet_kernels.kernels.overlap import SavedPass
from lancet_kernels.kernels.protocol import tasks
from lancet_kernels.kernels.protocol.exchange import Exchange
from tests.lancet_kernels.kernels.overlap_cases import Answer, Case, reference
from tests.lancet_kernels.kernels.overlap_ranks import (
    GuardedMemory,
    Layer,
    answer_of,
    make_exchange,
    received,
    same_bits,
)
from tests.poisoned_buffers import poisoned_buffers
from tests.ranks import RankPool

TOKENS = 6
TILE = OverlapConfig(GemmConfig(4, 8, 8, 1, 1), put_rows=2, put_block=8, reduce_tokens=4, reduce_block=8)
BACKWARD_EVERY = 5
WAIT_S = 120.0


@dataclass(frozen=True)
class Fuzzed(Case):
    """Values are small integers, and ranks have any number of tokens up to `tokens`."""

    tokens: int = TOKENS
    width: int = 8
    hidden: int = 8
    bias: bool = False

    def tokens_of(self, rank: int) -> int:
        return random.Random(f"{self.seed} {rank}").randint(0, self.tokens)

    def values(self, what: str, number: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(
            random.Random(f"{self.seed} {what} {number}").getrandbits(60)
        )
        most = {"x": 16, "dy": 4}.get(what, 1)
        return torch.randint(-most, most + 1, shape, generator=generator) * (16.0 if what == "x" else 1.0)

    def weights(self, *shape: int, generator: torch.Generator) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).float()

    def of_pass(self, seed: int) -> Fuzzed:
        """The tokens of that pass, and where they go: any rank can recompute them."""
        chance = random.Random(seed)
        return replace(
            self,
            seed=seed,
            tokens=0 if chance.random() < 0.03 else TOKENS,
            choose=chance.choice(("random", "few", "one")),
            capacity=chance.choice((1, 3, TOKENS, TOKENS)),
            favourite=chance.randrange(self.experts),
        )


class Fuzz:
    """The passes of one rank through one pair of exchanges."""

    def __init__(self, memory: GuardedMemory, local: int, passes: int, nap_s: float, seed: int) -> None:
        self.memory, self.case = memory, Fuzzed(world=memory.world, local=local)
        self.chance, self.nap_s = random.Random(f"{seed} {memory.rank}"), nap_s
        # Room for one more whatever the others take and wherever they lie.
        sizes = {
            "chunk_rows": TILE.gemm.block_m, "timeout_s": WAIT_S, "passes": passes,
            "room": (2 * passes - 1) * self.case.receive_rows,
        }  # fmt: skip
        ways = (make_exchange(memory, f"{way}{seed}", self.case, **sizes) for way in ("x", "dy"))
        self.layer = Layer(self.case, memory.rank, *ways)
        memory.barrier()
        # By exchange and epoch.
        self.expected_rows: dict[tuple[int, int], Tensor] = {}
        self.expected_weights: Tensor | None = None
        self.open: list[tuple[int, SavedPass]] = []

    def nap(self, chance: float) -> None:
        if self.nap_s and self.chance.random() < chance:
            time.sleep(self.nap_s * self.chance.random())

    def run(self, seed: int) -> None:
        """Forward `seed`, and the end of some that are open. The ranks end the same ones.

        Raises AssertionError if it is wrong, CommunicationError if a wait ran out of time.
        """
        layer = self.layer
        x_rows, _, _ = self.begin(seed)
        self.expected_rows[id(layer.forward), int(layer.forward._epoch) + 1] = x_rows
        self.nap(0.5)
        with poisoned_buffers():
            out, saved = layer.run_forward()
            layer.forward.check()
        self.memory.check_guards()
        self.compare(Answer(out, *[None] * 6))
        self.open.append((seed, saved))
        shared = random.Random(f"{seed} ends")
        for _ in range(max(len(self.open) + 1 - layer.forward.passes, shared.randint(0, len(self.open)))):
            self.end(*self.open.pop(shared.randrange(len(self.open))))

    def end(self, seed: int, saved: SavedPass) -> None:
        """Every fifth pass has a backward."""
        layer = self.layer
        _, dy_rows, self.expected_weights = self.begin(seed)
        if seed % BACKWARD_EVERY == 0:
            self.expected_rows[id(layer.backward), int(layer.backward._epoch) + 1] = dy_rows
            self.nap(0.5)
            with poisoned_buffers():
                made = layer.run_backward(saved)
                layer.backward.check()
            self.compare(answer_of(None, made))
        else:
            layer.forward.release(saved.opened)
        self.memory.check_guards()

    def begin(self, seed: int) -> list[Tensor]:
        """Take the tokens of that pass. -> what comes to this rank."""
        self.tokens = self.case.of_pass(seed)
        self.layer.load(self.tokens)
        self.layer.config = replace(TILE, programs=1 + seed % 5)
        return received(self.tokens, self.layer.rank)

    def compare(self, answer: Answer) -> None:
        """float32, since in float64 the gradient of gelu at -16 is 1e-55."""
        right = vars(reference(self.case, self.tokens)[self.layer.rank])
        for name, value in vars(answer).items():
            assert value is None or torch.equal(value, right[name].float()), self.say(f"{name} is wrong")

    def say(self, what: str) -> str:
        return f"rank {self.layer.rank} of {self.tokens}: {what}"

    def look_and_poison(self, exchange: Exchange, place: int, words: Tensor, backward: bool) -> None:
        """Before rows are given back: they are the sources' rows, and nothing is where no pass has any."""
        expected = self.expected_rows.pop((id(exchange), int(words[0])))
        begin, end = (0, len(expected)) if backward else exchange.occupied[place].tolist()
        rows = exchange.rows.local
        if backward:
            got = exchange.row_weights.local[: len(expected)]
            assert same_bits(got, self.expected_weights), self.say(f"weights of {exchange.name}")
        assert same_bits(rows[begin:end], expected), self.say(f"rows of {exchange.name}")
        rows[begin:end] = float("nan")
        for kept in exchange._kept.values():
            kept[begin:end] = float("nan")
        free = torch.ones(len(rows), dtype=torch.bool)
        for first, last in exchange.occupied.tolist():
            free[first:last] = False
        assert rows[free].isnan().all(), self.say(f"written where no pass of {exchange.name} has rows")
        exchange.results.local.fill_(float("nan"))
        self.nap(0.3)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, releases and tasks go through this object."""
        give_back, find_task = Exchange._give_back, tasks.gemm_task

        def look_and_give(exchange: Exchange, place: int, words: Tensor, *, backward: bool) -> None:
            self.look_and_poison(exchange, place, words, backward)
            give_back(exchange, place, words, backward=backward)

        def nap_and_find(*given):
            self.nap(0.05)
            return find_task(*given)

        nap_and_find.__triton_builtin__ = True
        # Indices of these sizes cannot overflow; looking for it takes half of the interpreter's time.
        options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        with (
            mock.patch.object(Exchange, "_give_back", look_and_give),
            mock.patch.object(tasks, "gemm_task", nap_and_find),
            # An expert here has not 8 tiles, but several groups of 2.
            mock.patch.object(tasks, "GROUP", tl.constexpr(2)),
            mock.patch.object(interpreter.interpreter_builder, "options", options),
        ):
            yield


def fuzz_on_rank(first: int, passes: int, nap_s: float) -> None:
    """Raises for the first pass that is wrong or does not finish."""
    with closing(GuardedMemory(timeout_s=WAIT_S)) as memory:
        local = 1 + first // passes % 2 if memory.world > 2 else 2
        fuzz = Fuzz(memory, local, passes=1 + first // passes % 3, nap_s=nap_s, seed=first)
        with fuzz.watched():
            for seed in range(first, first + passes):
                fuzz.run(seed)
            for held in fuzz.open:
                fuzz.end(*held)
        memory.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--passes", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first pass")
    given = parser.parse_args()
    pool = RankPool(given.ranks)
    for first in range(given.first, given.first + given.passes, 50):
        limits = {"timeout_s": 50 * WAIT_S, "collective_timeout_s": WAIT_S}
        pool.run(fuzz_on_rank, first, 50, 5e-3, ranks=given.ranks, **limits)
        print(f"{first + 50 - given.first} passes: none hung, nothing wrong", flush=True)
    pool.close()


if __name__ == "__main__":
    main()
